"""One eager run under observation: what a function touches, with nothing left behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from graphstep.capture.randomness import HostRandomness
from graphstep.engine import torch_private
from graphstep.engine.protocol import Engine
from graphstep.engine.tape_ops import OperationTable
from graphstep.engine.undo import UndoLog, WriteObserver
from graphstep.engine.user_frame import user_line_of
from graphstep.errors import CaptureError

T = TypeVar("T")


@dataclass(slots=True)
class Observation:
    """What a function used."""

    leaves: list[Tensor] = field(default_factory=list)
    """Leaf tensors that a backward pass filled, in the order of first use."""
    generators: list[torch.Generator] = field(default_factory=list)
    """Generators given to random operations by name."""
    externals: list[Tensor] = field(default_factory=list)
    """One alias over each storage that existed before and was used. Of a real run: of those that outlived it."""
    gone: dict[int, torch_private.WeakStorage] = field(default_factory=dict)
    """The others of a real run, by key, which no other storage has meanwhile."""
    sources: list[weakref.ref[Tensor]] = field(default_factory=list)
    """For each of those, the tensor that was used first, as long as its owner keeps it."""
    saves_by_hooks: bool = False
    """It recomputes or offloads something: what autograd has saved is not to be looked at."""
    is_pure: bool = False
    """It wrote into nothing that existed before, and drew no random numbers."""
    is_random: bool = True
    """It drew random numbers."""
    written: list[Tensor] = field(default_factory=list)
    """One alias, as bytes, over each storage that existed before and was written."""
    only_in_backward: set[int] = field(default_factory=set)
    """Storages that existed before and that the forward has not used, by key."""

    def lost_tensors(self, known: Collection[int]) -> list[str]:
        """Tensors that the function read and whose owner has let go of them, in words, but for storages ``known``.

        Their memory is still there, with the values of that time; the function would read something else now.
        """
        return [
            f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
            for tensor, source in zip(self.externals, self.sources, strict=True)
            if source() is None and torch_private.storage_key(tensor) not in known
        ]

    def used(self) -> set[int]:
        """All storages that existed before and were used, by key."""
        return {*map(torch_private.storage_key, self.externals), *self.gone}

    def forget_storages(self, known: Iterable[int]) -> None:
        """Do not hold on to these: somebody else does."""
        keys = set(known)
        kept = [torch_private.storage_key(tensor) not in keys for tensor in self.externals]
        self.sources = [source for source, is_kept in zip(self.sources, kept, strict=False) if is_kept]
        self.externals = [tensor for tensor, is_kept in zip(self.externals, kept, strict=True) if is_kept]

    def forget_unheld(self) -> None:
        """Let go of what nobody else holds: another run would not find it. All is kept where torch cannot tell."""
        alone = torch.empty(1)
        num_of_one, *counts = torch_private.HolderCount([alone, *self.externals]).now()
        pairs = zip(self.externals, counts, strict=True)
        self.forget_storages([torch_private.storage_key(each) for each, count in pairs if 0 < count <= num_of_one])

    @classmethod
    def joined(cls, each: Iterable[Observation]) -> Observation:
        """What several functions used, as far as a capture of all of them has to know."""
        found = cls()
        for observation in each:
            found.generators += [g for g in observation.generators if g not in found.generators]
            found.externals += observation.externals
            found.sources += observation.sources
        return found


def watch_run(function: Callable[[], T]) -> tuple[T, Observation]:
    """Run ``function`` for real, on the current stream, and tell what it touched."""
    watcher = WriteObserver(None, OperationTable())
    with watcher, _sparse_refused():
        result = function()
    return result, Observation(_filled(watcher.leaves), watcher.generators, watcher.externals, watcher.gone())


def observe(function: Callable[[], Any], engine: Engine, *, num_runs: int = 1) -> Observation:
    """Run ``function`` eagerly on the capture stream and undo everything it did to existing state.

    Buffers, gradients (values and identity), random generators (those of the host as well) and weights are afterwards
    as before, bit for bit, also when the function fails. Python attributes that it assigns are its own business.

    Args:
        function: takes nothing; its result is dropped.
        num_runs: how often to run it; the first run is the observed one.
    """
    log = UndoLog()
    watcher = WriteObserver(log, OperationTable())
    host = HostRandomness(engine.device)
    with generators_kept(engine.device) as have_drawn, engine.capture_stream():
        try:
            with watcher, _sparse_refused():
                function()
            leaves = _filled(watcher.leaves)
            is_random = bool(watcher.generators) or have_drawn()
            written = log.contents()
            for _ in range(num_runs - 1):
                function()
        finally:
            watcher.restore_gradients()
            watcher.restore_generators()
            log.restore()
            host.restore()
    return Observation(
        leaves,
        watcher.generators,
        watcher.externals,
        {},
        watcher.sources,
        watcher.sees_saved_taken,
        is_pure=not (written or is_random),
        is_random=is_random,
        written=written,
        only_in_backward=watcher.only_in_backward,
    )


@contextmanager
def _sparse_refused() -> Iterator[None]:
    """Say so when a tensor has no storage to observe, and so none at a fixed address."""
    try:
        yield
    except NotImplementedError as error:
        if "access storage" not in str(error):
            raise
        raise CaptureError(
            "the step makes a tensor without storage of its own, such as the gradient of a sparse embedding",
            where=str(user_line_of(error) or ""),
            fix="use dense tensors: nn.Embedding(sparse=False)",
        ) from error


def _filled(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Those with a gradient. Autograd makes a leaf of its own for one that it saved; a backward pass fills neither."""
    return [leaf for leaf in leaves if leaf.grad is not None or getattr(leaf, "main_grad", None) is not None]


@contextmanager
def generators_kept(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Put the default generators of the host and of ``device`` back after the body; it can ask if they were used."""
    host = torch.default_generator
    kept = [(host, host.get_state())]
    if device.type == "cuda":
        own = torch.cuda.default_generators[device.index]
        kept.append((own, own.get_state()))

    def used() -> list[tuple[torch.Generator, Tensor]]:
        return [(generator, state) for generator, state in kept if not torch.equal(generator.get_state(), state)]

    try:
        yield lambda: bool(used())
    finally:
        for generator, state in used():
            generator.set_state(state)


@contextmanager
def training_flags_set(modules: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
    """Give the ``training`` flags these values for the body; all that are not named keep theirs."""
    with training_flags_kept(modules):
        for module, flag in zip(modules, flags, strict=False):
            module.training = flag
        yield


@contextmanager
def training_flags_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put the ``training`` flags back after the body, module by module."""
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
