"""Why a whole step cannot be captured, as far as its eager runs and its modules tell."""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphstep.capture.places import Place
from graphstep.errors import CaptureError
from graphstep.strategies.local_forward import has_graphs

Named = tuple[str, nn.Module]

WARMUP_OF_WRAPPER: Final = 11
"""Forwards after which DistributedDataParallel on a GPU waits for no timings any more."""

_MOST_NAMED: Final = 5


def with_children(modules: Sequence[Named]) -> list[Named]:
    """All modules, each once, with their paths."""
    found: dict[int, Named] = {}
    for path, root in modules:
        for name, module in root.named_modules(prefix=path):
            found.setdefault(id(module), (name, module))
    return list(found.values())


def parts_not_captured(modules: Sequence[Named], places: Sequence[Place], where: str) -> CaptureError | None:
    """What a replay would leave out: graphs that parts have of their own, which the warmup has run, and iterators."""
    found = [path or "the model" for path, module in modules if has_graphs(module)]
    if found:
        what = f"{len(found)} modules of the step have graphs of their own: {', '.join(found[:_MOST_NAMED])}"
        return refused(where, what, _CLOSE_THEM)
    steps = [place.path for place in places if getattr(type(place.value()), "launches_graphs", False)]
    if steps:
        what = f"the step uses {', '.join(steps[:_MOST_NAMED])}, which has a graph of its own"
        return refused(where, what, _CALL_WHAT_IS_INSIDE)
    iterators = [
        place.path
        for place in places
        if isinstance(value := place.value(), Iterator) and not isinstance(value, io.IOBase)
    ]
    if iterators:
        what = f"the step takes from {', '.join(iterators[:_MOST_NAMED])}, an iterator; a replay runs no Python"
        return refused(where, what, _TAKE_IT_BEFORE)
    return None


def is_wrapped(modules: Sequence[Named], device: torch.device) -> bool:
    """True if DistributedDataParallel is a part of the step, and there are streams it may have been built on."""
    return device.type == "cuda" and any(isinstance(module, DistributedDataParallel) for _, module in modules)


def least_warmup(modules: Sequence[Named], device: torch.device) -> int:
    """Eager runs that a step needs before its capture because of what it consists of.

    In its first ten forwards DistributedDataParallel waits for timings on the host (torch's notes on CUDA graphs ask
    for eleven eager iterations).
    """
    return WARMUP_OF_WRAPPER if is_wrapped(with_children(modules), device) else 0


def told_of_wrapper(error: CaptureError, problem: str | None) -> CaptureError:
    """The same error, with a word about DistributedDataParallel.

    Args:
        error: of the capture.
        problem: why it could not be set up again on the stream of the capture, if that was tried.
    """
    about = (
        f"which could not be set up again on the stream of the capture: {problem}" if problem else "which may be why"
    )
    what = f"{error.what} (the step has DistributedDataParallel, {about})"
    return CaptureError(what, where=error.where, fix=f"{error.fix}; {_BUILD_IT_THERE}")


def told_of_clipping(error: CaptureError) -> CaptureError:
    """The same error, with another fix where torch reads a threshold or a norm to clip gradients."""
    cause: BaseException | None = error
    while cause is not None:
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__))
        if any(file == nn.utils.clip_grad.__file__ for file in files):
            return CaptureError(error.what, where=error.where, fix=_CLIP_HERE)
        cause = cause.__cause__ or cause.__context__
    return error


def refused(where: str, what: str, fix: str) -> CaptureError:
    """The error for one of the texts below."""
    return CaptureError(what, where=where, fix=fix)


WRITES: Final = (
    "the step writes into its arguments; a replay writes into copies of them",
    "keep the tensor outside of the arguments, as a variable or buffer that the step reads, or return what is new",
)
SETS_FLAGS: Final = (
    "the step changes the training flags of modules (train() or eval()); a replay would not",
    "call train() or eval() before the step, and put back in it what it changes",
)
FREEZES: Final = (
    "each run changes which parameters want a gradient (requires_grad); a replay would not",
    "freeze and thaw parameters before the step, or put back in it what it changes",
)
RETURNS_LOSS: Final = (
    "the step returns a tensor that wants a gradient, and runs no backward; what a replay returns has no history",
    "call backward in the step, or return the tensor detached",
)
OTHER_THREADS: Final = (
    "the step runs a backward pass in another thread; only what the thread of the step does, and autograd for it, is "
    "captured",
    "call backward in the thread of the step",
)
RETURNS_OTHERS: Final = (
    "the step returned something else in the capture than in the last eager run, and not only in its tensors",
    "return tensors, and values that are always the same",
)
_CLOSE_THEM: Final = (
    "close() what attach, make_graphed_callables or TECudaGraphHelper gave before the first step; or leave the step as "
    "it is, and make a graph of the optimizer: OptimizerGraph(optimizer, session=manager.session)"
)
_BUILD_IT_THERE: Final = (
    "or build DistributedDataParallel on the stream of the capture: session = GraphSession(device), then with "
    "session.engine.capture_stream(): DistributedDataParallel(model), and give session=session"
)
_CALL_WHAT_IS_INSIDE: Final = (
    "call the plain function in the step (step.__wrapped__ of what graph_step has wrapped, optimizer.step() in place "
    "of an OptimizerGraph), or leave the outer function as it is"
)
_CLIP_HERE: Final = (
    "give a threshold in a tensor to graphstep.clip_grad_norm_; leave error_if_nonfinite out, and look at the norm "
    "after the step"
)
_TAKE_IT_BEFORE: Final = "take the batch before the step, and give it as an argument"
