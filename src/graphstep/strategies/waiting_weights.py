"""Runs of layers whose backward is done, and whose weight gradients a schedule puts later."""

from __future__ import annotations

from graphstep.capture.triple_run import WaitingRun

Place = tuple[int, int]
"""A model chunk and a microbatch of it."""


class WaitingWeights:
    """Keeps such runs until their turn comes."""

    def __init__(self) -> None:
        self._runs: dict[Place, list[WaitingRun]] = {}
        self._are_computed_at_once = False

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def add(self, place: Place, run: WaitingRun) -> None:
        """The backward of a run is done.

        Raises:
            LifecycleError, StaleAddressError: there are no turns any more, and see
                :meth:`WaitingRun.prepare_weight_gradients`.
        """
        if self._are_computed_at_once:
            run.prepare_weight_gradients()
            run.weight_gradients()
        else:
            self._runs.setdefault(place, []).append(run)

    def prepare(self, place: Place) -> None:
        """Refuse what the runs of a microbatch could not give. Nothing has happened then.

        Raises:
            LifecycleError, StaleAddressError: see :meth:`WaitingRun.prepare_weight_gradients`.
        """
        for run in self._runs.get(place, ()):
            run.prepare_weight_gradients()

    def compute(self, place: Place) -> None:
        """Accumulate the weight gradients of a microbatch, in the order of the backwards. Follows :meth:`prepare`."""
        for run in self._runs.pop(place, ()):
            run.weight_gradients()

    def compute_all(self) -> None:
        """There are no turns any more: compute what waits, and from now on directly after each backward.

        Raises:
            LifecycleError, StaleAddressError: see :meth:`WaitingRun.prepare_weight_gradients`.
        """
        self._are_computed_at_once = True
        for place in list(self._runs):
            self.prepare(place)
            self.compute(place)

    def give_up(self) -> None:
        """The step will not go on."""
        for run in (run for runs in self._runs.values() for run in runs):
            run.close()
        self._runs.clear()
