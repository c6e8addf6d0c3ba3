"""The next call that a run of a chain expects."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphstep.capture.chain import Place, Receiver
from graphstep.errors import LifecycleError

if TYPE_CHECKING:
    from graphstep.capture.chain_run import ChainRun
    from graphstep.capture.read_ahead import ReadAhead


class Pending:
    """What the next call of a run has to look like, and the results for it and those after it.

    It lives where that call is expected. It goes when the call comes, or when the tensor that the call would be given
    is gone.
    """

    def __init__(
        self,
        run: ChainRun,
        handles: list[list[Tensor]],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        ambient: tuple[Any, ...],
    ) -> None:
        self._run: ChainRun | None = run
        self._handles = handles
        self._next = 0
        self._places = run.chain.handover
        carried = {place for place, _ in self._places}
        self._arguments = [(k, value) for k, value in enumerate(arguments) if k not in carried]
        self._named = [(k, value) for k, value in named.items() if k not in carried]
        self._sizes = len(arguments), len(named)
        others = [value for _, value in (*self._arguments, *self._named) if isinstance(value, Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in others]
        self.ambient = ambient
        """The modes around the calls of the run."""
        self.pair = run.chain.pairs[run.first]
        """The pair that is called next."""
        self.training: tuple[bool, ...] = ()
        """Training flags at the capture of the next call."""
        self.trainable: tuple[bool, ...] = ()
        """Which of its parameters wanted a gradient then."""
        self._expected: list[tuple[Place, weakref.ref[Tensor], int]] = []
        self._read: tuple[ReadAhead, int, list[int]] | None = None
        """If the next pair has run already: what its graph reads, its place there and the versions at the launch."""
        self._receiver: Receiver | None = None

    @classmethod
    def resumed(
        cls,
        run: ChainRun,
        index: int,
        handles: list[list[Tensor]],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        ambient: tuple[Any, ...],
        expected: list[tuple[Place, Tensor, int]],
        versions: list[tuple[Tensor, int]],
    ) -> Pending:
        """What the compiled part waited for: the call of the pair ``index`` with these results of the pair before.

        Args:
            run: under way.
            index: the pair that is called next.
            handles: the results for all calls of the run; those of calls that came are gone.
            arguments: of the first call.
            named: those given by keyword.
            ambient: the modes around the calls of the run.
            expected: results that the next call is given, by argument, with their versions when they were handed out.
            versions: of the other tensors among the arguments, when the run began.
        """
        made = cls(run, handles, arguments, named, ambient)
        made._next = index - run.first
        made._versions = versions
        made._expect(index, [(place, weakref.ref(t, made._gone), version) for place, t, version in expected])
        return made

    def arm(self) -> None:
        """Wait for the next call."""
        run = self._live_run()
        results = self._handles[self._next]
        expected = [
            (place, weakref.ref(results[output], self._gone), results[output]._version)
            for place, output in self._places
        ]
        self._handles[self._next] = []
        self._next += 1
        self._expect(run.latest + 1, expected)

    def _expect(self, index: int, expected: list[tuple[Place, weakref.ref[Tensor], int]]) -> None:
        run = self._live_run()
        self._expected = expected
        self.pair = run.chain.pairs[index]
        self._read = run.read_ahead(index)
        self.training, self.trainable = self.pair.signature.training, self.pair.signature.trainable
        self._receiver = run.chain.receivers[index]
        self._receiver.expect(self)

    def matches(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """True if a call with these arguments is the next one of the run."""
        run = self._run
        if run is None or run.chain.lane.latest is not run.span or (len(arguments), len(named)) != self._sizes:
            return False
        return self._has_results(arguments, named) and self._has_others(arguments, named)

    def has_run_on_old(self) -> bool:
        """True if the next pair has run already, and what it reads was written since."""
        if self._read is None:
            return False
        read, place, versions = self._read
        return read.has_changed(place, versions)

    def _has_results(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        for place, expected, version in self._expected:
            result = expected()
            given: object = arguments[place] if isinstance(place, int) else named.get(place)
            if result is None or result is not given or result._version != version:
                return False
            if result._backward_hooks or result.retains_grad:
                return False  # Somebody wants to see the gradient that passes here.
        return True

    def _has_others(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        # Loops, not `all`: this runs at each call of each layer.
        for position, value in self._arguments:
            if arguments[position] is not value:
                return False
        for name, value in self._named:
            if named.get(name, self) is not value:
                return False
        for tensor, version in self._versions:  # noqa: SIM110
            if tensor._version != version:
                return False
        return True

    def advance(self) -> Any:
        """Run the next pair and give its result."""
        run = self._live_run()
        run.advance()
        pair = run.chain.pairs[run.latest]
        results = self._handles[self._next]
        if run.copied:
            run.fill(run.latest, results)
        result = pair.form.of(results)
        if self._next + 1 < len(self._handles):
            self.arm()
        else:
            self.drop()
        return result

    def drop(self) -> None:
        """Expect nothing any more and let go of the results that were not asked for."""
        if self._receiver is not None and self._receiver.pending is self:
            self._receiver.pending = None
        run, self._run = self._run, None
        self._handles, self._expected, self._versions = [], [], []
        self._arguments, self._named = [], []
        if run is not None:
            run.undo_ahead()

    def _live_run(self) -> ChainRun:
        if self._run is None:
            raise LifecycleError("this run does not expect a call any more", where=self.pair.region.name)
        return self._run

    def _gone(self, _reference: Any) -> None:
        self.drop()
