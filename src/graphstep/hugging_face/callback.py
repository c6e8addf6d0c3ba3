"""A callback for the ``Trainer`` of transformers: layers are captured while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError, Problem
from graphstep.strategies.manager import attach

if TYPE_CHECKING:
    from graphstep.capture.report import CaptureReport
    from graphstep.strategies.manager import CudaGraphManager


class GraphstepCallback:
    """Attaches graphs to the model when training begins, captures after the first step, and takes them off at the end.

    ``Trainer(..., callbacks=[GraphstepCallback()])``. Evaluation in between runs eagerly. It is no subclass of
    ``TrainerCallback``, so that transformers need not be installed to import it: it answers the same events.

    Args:
        config: as of :func:`graphstep.attach`; by default layers whole, but for experts.
        regions: as there.
    """

    def __init__(self, config: CudaGraphConfig | None = None, *, regions: Mapping[str, str] | None = None) -> None:
        self._config, self._regions = config, regions
        self._manager: CudaGraphManager | None = None
        self._report: CaptureReport | None = None

    @property
    def report(self) -> CaptureReport | None:
        """What has been captured: so far, or in the last training; ``None`` before the first one."""
        return self._manager.report() if self._manager is not None else self._report

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_named: Any) -> None:
        """Attach.

        Raises:
            ConfigError: see :class:`graphstep.CudaGraphManager`; or a training is under way already.
        """
        del args, state, control
        if self._manager is not None:
            raise ConfigError(
                Problem(
                    "trains-already",
                    "this callback serves a training that has not ended",
                    "GraphstepCallback",
                    "give each Trainer a callback of its own; after a failed training call close()",
                )
            )
        self._manager = attach(model, self._config, regions=self._regions)

    def on_step_end(self, args: Any, state: Any, control: Any, **_named: Any) -> None:
        """The optimizer has stepped: what was observed can be captured."""
        del args, state, control
        if self._manager is not None:
            self._manager.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_named: Any) -> None:
        """Take everything off."""
        del args, state, control
        self.close()

    def close(self) -> None:
        """Free the graphs, also after a training that failed. May be called twice."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            self._report = manager.report()
            manager.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return _nothing  # Events that do not matter here, those of later versions among them.
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """Answers an event."""
