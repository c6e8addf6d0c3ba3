"""``local`` as a strategy of the training loop: layers, or chosen parts of them, own graphs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.static_inputs import to_device
from graphstep.config import CudaGraphConfig
from graphstep.strategies.manager import CudaGraphManager
from graphstep.strategies.protocol import ForwardBackward


class LocalGraphs:
    """Captures a model's layers. The first training step runs eagerly and is observed; :meth:`end_step` captures.

    Args:
        forward_backward_func: runs the step; called with batches on the session's device.
        model: contains at least one module with a segment that is to be captured.
        session: owner of the graphs.
        config: what to capture and how; by default whole layers.

    Raises:
        ConfigError: see :class:`CudaGraphManager`.
    """

    def __init__(
        self,
        forward_backward_func: ForwardBackward,
        *,
        model: nn.Module,
        session: GraphSession,
        config: CudaGraphConfig | None = None,
    ) -> None:
        self._function = forward_backward_func
        self._model = model
        self.manager = CudaGraphManager(model, config, session=session, is_automatic=False)

    @property
    def function(self) -> ForwardBackward:
        """What runs the step."""
        return self._function

    @property
    def session(self) -> GraphSession:
        """Owner of the graphs."""
        return self.manager.session

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Run the step: eager code with replays in it. Returns losses [num_microbatches].

        Raises:
            StaleAddressError: a parameter, buffer or gradient has moved since the capture, or a module was replaced.
            LifecycleError: this object is closed, or a second backward was asked for.
        """
        self.manager.session.require_open()
        device = self.manager.session.device
        batches = (to_device(batch, device) for batch in islice(data_iterator, num_microbatches))
        return self._function(
            data_iterator=batches, model=self._model, num_microbatches=num_microbatches, forward_only=forward_only
        )

    def end_step(self) -> None:
        """After a step with a backward pass: capture what was observed.

        Raises:
            CaptureError: names the region that cannot be captured.
            StaleAddressError: a weight or buffer has moved since an earlier capture.
            LifecycleError: this object is closed.
        """
        self.manager.end_step()

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self.manager.report()

    def close(self) -> None:
        """Put the layers' own ``forward`` back and free the graphs. May be called twice."""
        self.manager.close()
