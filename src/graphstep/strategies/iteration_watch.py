"""The eager run of a step that shows what a capture of it has to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphstep.capture.attributes import Attributes
from graphstep.capture.session import GraphSession
from graphstep.capture.tree import flatten
from graphstep.engine import torch_private
from graphstep.errors import CaptureError
from graphstep.strategies.gradient_threads import gradient_threads_watched
from graphstep.strategies.iteration_refusals import (
    FREEZES,
    OTHER_THREADS,
    RETURNS_LOSS,
    SETS_FLAGS,
    WRITES,
    refused,
    with_children,
)
from graphstep.strategies.iteration_state import Iteration, Step


def watched_run(step: Step, iteration: Iteration, session: GraphSession, modules: Sequence[nn.Module]) -> Any:
    """Run the step for real, and note in ``iteration`` what was seen.

    Args:
        step: what runs, on the static inputs.
        iteration: the key.
        session: of the graphs.
        modules: all modules of the step.
    """
    places = step.reads(iteration.static.arguments)
    attributes = iteration.attributes = Attributes(with_children(step.modules), places=places)
    flags = [module.training for module in modules]
    frozen = _frozen(modules)
    versions = iteration.static.versions()
    before = iteration.gradients.before(modules, step.optimizers.parameters())
    # DistributedDataParallel sends each gradient as soon as it is there.
    is_sent = any(isinstance(module, DistributedDataParallel) for _, module in with_children(step.modules))
    mine = [] if is_sent else before
    leaves = (each.leaf for each in mine)
    with gradient_threads_watched(leaves) as came_unseen, iteration.gradients.watching(mine):
        result, observation = session.watch_run(lambda: step.function(iteration.static.arguments))
    tensors, iteration.structure = flatten(result)
    iteration.gradients.learn(before, observation)
    where = f"{step.stage}, the captured function"
    iteration.refusal = None
    if came_unseen():
        iteration.refusal = refused(where, *OTHER_THREADS)
    elif iteration.static.versions() != versions:
        iteration.refusal = refused(where, *WRITES)
    elif [module.training for module in modules] != flags:
        iteration.refusal = refused(where, *SETS_FLAGS)
    elif _frozen(modules) != frozen:
        iteration.refusal = refused(where, *FREEZES)
    elif any(tensor.requires_grad for tensor in tensors) and not iteration.gradients.are_filled():
        iteration.refusal = refused(where, *RETURNS_LOSS)
    else:
        try:
            is_first = iteration.num_eager == 0
            attributes.refuse_changes(where, observation.externals, may_leave_losses=True, may_fill=is_first)
        except CaptureError as error:
            iteration.refusal = error
    observation.forget_storages(torch_private.storage_key(home.tensor) for home in session.gradient_homes.values())
    iteration.observation = observation
    return result


def _frozen(modules: Sequence[nn.Module]) -> set[int]:
    """Identities of parameters that want no gradient."""
    parameters = (each for module in modules for each in module._parameters.values())
    return {id(each) for each in parameters if each is not None and not each.requires_grad}
