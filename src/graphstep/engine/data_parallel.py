"""DistributedDataParallel, set up again on the stream of a capture. Private interfaces, with a fallback."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from graphstep.engine import leaf_nodes

_HELPER_TAKES: Final = ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")


def why_not_anew(wrapper: DistributedDataParallel) -> str | None:
    """Why :func:`set_up_anew` cannot be used on a wrapper, or ``None``."""
    problem = _why_never_anew(wrapper)
    if problem is not None:
        return problem
    if any(map(leaf_nodes.is_held, _parameters(wrapper))):
        return "somebody holds the nodes that accumulate gradients of its parameters"
    return None if is_finished(wrapper) else "a backward of it is still to come"


def is_finished(wrapper: DistributedDataParallel) -> bool:
    """False from the first gradient of a backward to the last reduction of it."""
    check = getattr(getattr(wrapper, "reducer", None), "_check_reducer_finalized", None)
    if check is None:
        return True
    try:
        check()
    except RuntimeError:
        return False
    return True


def give_up_backward(wrapper: DistributedDataParallel) -> bool:
    """Let a wrapper forget a backward that has failed, which it would wait for; else its next forward raises.

    Left as it is where that cannot be done. The nodes of that backward may still be held by an error; nobody runs it.

    Returns:
        Whether it was set up anew.
    """
    if is_finished(wrapper) or _why_never_anew(wrapper) is not None:
        return False
    set_up_anew(wrapper)
    return True


def _why_never_anew(wrapper: DistributedDataParallel) -> str | None:
    helper = getattr(wrapper, "_ddp_init_helper", None)
    if helper is None or tuple(inspect.signature(helper).parameters) != _HELPER_TAKES:
        return "this version of torch sets it up in another way"
    if not hasattr(getattr(wrapper, "reducer", None), "_remove_autograd_hooks"):
        return "this version of torch does not let go of its hooks"
    special = {
        "mixed_precision": getattr(wrapper, "mixed_precision", None) is not None,
        "delay_all_reduce_named_params": bool(getattr(wrapper, "_delay_all_reduce_params", ())),
        "the reducer in Python": bool(getattr(wrapper, "_use_python_reducer", False)),
        "optimizers in the backward": any(hasattr(p, "_in_backward_optimizers") for p in wrapper.parameters()),
        "a built-in communication hook": not wrapper._comm_hooks and bool(_name_of_hook(wrapper)),
    }
    found = [name for name, is_there in special.items() if is_there]
    return f"it has {' and '.join(found)}" if found else None


def set_up_anew(wrapper: DistributedDataParallel) -> None:
    """Let a wrapper make its buckets and hooks again, on the current stream, as unpickling one does.

    The nodes that it holds for its parameters are those of the stream on which it was built; a backward pass that
    reaches them from a capture breaks it where that is the default stream. Communication hooks and options stay. It
    starts as after it was built: buckets follow the order of the gradients from the second step on, and the host waits
    for timings in the first ten forwards. To be called on all ranks, between steps, where :func:`why_not_anew` says
    nothing; no communication happens.
    """
    made: Any = wrapper
    parameters, are_sparse = made._build_params_for_reducer()
    names = made._build_debug_param_to_name_mapping(parameters)
    is_static = bool(made.static_graph)
    made.reducer._remove_autograd_hooks()
    for parameter in parameters:
        leaf_nodes.renew(parameter)
    made._ddp_init_helper(parameters, are_sparse, names, is_static)
    made._has_rebuilt_buckets = False
    hooks, made._comm_hooks = made._comm_hooks, []
    for hook, state in hooks:
        made.register_comm_hook(state, hook)
    if is_static:
        made.static_graph = False
        made._set_static_graph()


def _name_of_hook(wrapper: Any) -> str:
    data = wrapper._get_ddp_logging_data()
    return str(data.get("comm_hook", "")) if isinstance(data, dict) else ""


def _parameters(wrapper: DistributedDataParallel) -> Iterable[Tensor]:
    return [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
