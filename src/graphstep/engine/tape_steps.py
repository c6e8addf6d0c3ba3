"""The steps of a tape: how one recorded call is repeated on the same storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.tape_ops import OperationTraits, Replay, replace_tensors, tensors_in
from graphstep.errors import CaptureError

Step = Callable[[], Any]


def step_for(
    func: Any, traits: OperationTraits, args: Sequence[Any], kwargs: dict[str, Any], fresh: Sequence[Tensor]
) -> Step | None:
    """What a replay has to do for a call that has just run, or ``None``.

    Args:
        fresh: those of its results that do not lie in the memory of an argument.
    """
    has_content = not fresh or any(tensor.device.type != "meta" for tensor in fresh)
    if traits.replay is Replay.NOTHING or traits.changes_metadata or not has_content:
        return None
    call = fixed_call(func, args, kwargs)
    if traits.replay is Replay.CALL and not fresh:
        return call
    if not fresh:
        # Without annotations it returned its argument: in ATen that is a view, elsewhere it wrote it.
        return call if traits.is_foreign else None
    if traits.replay is Replay.OUT and len(fresh) == len(traits.out_names) and not any(map(_repeated, fresh)):
        accepted = {name: value for name, value in call.keywords.items() if name in traits.out_arguments}
        variant = partial(traits.out_variant, *call.args, **accepted)
        if _gives_the_same(variant, traits.out_names, fresh):
            into = partial(variant, **dict(zip(traits.out_names, fresh, strict=True)))
            return partial(_write_out, into, traits.name, [(out, out.shape) for out in fresh])
    return partial(_copy_results, _fix_dtype(func, call, fresh), traits.name, fresh)


def fixed_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> partial[Any]:
    """The call with its tensors replaced by aliases that no Python of the user can change."""
    return partial(
        func,
        *replace_tensors(tuple(args), torch_private.plain_alias),
        **{name: replace_tensors(value, torch_private.plain_alias) for name, value in kwargs.items()},
    )


def restore_constant(content: Tensor) -> Step:
    """A step that brings a constant of the function back to what it is now, in case the function writes to it."""
    return partial(content.copy_, content.clone())


def _gives_the_same(variant: partial[Any], names: Sequence[str], results: Sequence[Tensor]) -> bool:
    """Try an out-variant on other memory: some do not write it for some layouts, or replace it on the way."""
    if any(result.is_conj() or result.is_neg() for result in results):
        return False
    with torch._C.DisableTorchFunction():
        probes = [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in results]
        addresses = [probe.data_ptr() for probe in probes]
        for probe in probes:
            torch_private.all_bytes(probe).fill_(0x5A)
        try:
            variant(**dict(zip(names, probes, strict=True)))
        except (RuntimeError, TypeError):
            return False
        if [probe.data_ptr() for probe in probes] != addresses or [p.shape for p in probes] != [
            r.shape for r in results
        ]:
            return False
        return all(_same_bits(probe, result) for probe, result in zip(probes, results, strict=True))


def _same_bits(left: Tensor, right: Tensor) -> bool:
    flat = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8) for t in (left, right)]
    return bool(torch.equal(*flat))


def _write_out(variant: Step, name: str, outs: Sequence[tuple[Tensor, torch.Size]]) -> None:
    variant()
    for out, shape in outs:
        if out.shape != shape:
            raise _changed(name, f"shape from {tuple(shape)} to {tuple(out.shape)}")


def _copy_results(call: partial[Any], name: str, recorded: Sequence[Tensor]) -> None:
    write_results(name, recorded, new_tensors(call(), call))


def new_tensors(result: Any, call: partial[Any]) -> list[Tensor]:
    """Those results of a call that do not lie in the memory of an argument."""
    given = {torch_private.storage_key(tensor) for tensor in tensors_in([*call.args, *call.keywords.values()])}
    return [tensor for tensor in tensors_in(result) if torch_private.storage_key(tensor) not in given]


def write_results(name: str, recorded: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy results into the recorded ones.

    Raises:
        CaptureError: their number, shape or dtype is not the recorded one.
    """
    if len(recorded) != len(values):
        raise _changed(name, f"number of new results from {len(recorded)} to {len(values)}")
    for target, value in zip(recorded, values, strict=True):
        if target.shape != value.shape or target.dtype != value.dtype:
            raise _changed(
                name, f"result from {tuple(target.shape)} {target.dtype} to {tuple(value.shape)} {value.dtype}"
            )
        for dimension in _repeated(target):
            # Entries that share memory are written once.
            target, value = target.narrow(dimension, 0, 1), value.narrow(dimension, 0, 1)  # noqa: PLW2901
        target.copy_(value)


def _repeated(tensor: Tensor) -> list[int]:
    """Dimensions along which all entries are the same memory."""
    return [d for d, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[d] > 1]


def _fix_dtype(func: Any, call: partial[Any], fresh: Sequence[Tensor]) -> partial[Any]:
    """Make a factory's dtype explicit: the default dtype of the process may be another when it is replayed."""
    names = {argument.name for argument in func._schema.arguments}
    if {"dtype", "layout", "device"} <= names and len(fresh) == 1 and call.keywords.get("dtype") is None:
        return partial(call, dtype=fresh[0].dtype)
    return call


def _changed(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"{name} changed its {what} in a replay; the replay is incomplete",
        where=name,
        fix="capture again for these inputs, or keep shapes independent of values",
    )
