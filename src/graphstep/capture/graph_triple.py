"""A graph pair whose backward half is two recordings: gradients of the inputs, and later those of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.gradients import Guests, hooks_off
from graphstep.capture.graph_pair import BACKWARD_LANE, GraphPair
from graphstep.capture.observe import Observation
from graphstep.capture.pair_capture import capture_backwards
from graphstep.capture.saved_tensors import CreatedStorages, with_memory_of_their_own
from graphstep.capture.split_backward import SplitBackward, TensorHooks
from graphstep.engine import Recording
from graphstep.errors import LifecycleError


class GraphTriple(GraphPair):
    """Forward, gradients of the inputs, gradients of the parameters. Takes the same arguments as a pair.

    NEW -> FORWARD -> BACKWARD -> READY: :meth:`capture_weight_gradients` follows the two captures of a pair. The lane
    of the backward half holds the gradients that the weight gradients are computed from, and is not free before they
    have been. Replays go through :class:`graphstep.capture.triple_run.TripleRun`.
    """

    weights: Recording | None = None
    """``None`` if no parameter has a gradient."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.accumulated_later: list[Tensor] = []
        """Parameters whose gradients are accumulated inside the recording of the weight gradients."""
        self.exposed_later: list[Tensor] = []
        """Those whose gradients are results of it."""
        self._registers_hooks = False
        self._split: SplitBackward | None = None

    def _learn(self, trained: Sequence[Tensor], observation: Observation) -> None:
        super()._learn(trained, observation)
        self.accumulated_later, self.accumulated = self.accumulated, []
        self.exposed_later, self.exposed = self.exposed, []

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that get a gradient."""
        return [*self.accumulated_later, *self.exposed_later]

    @property
    def has_static_gradient(self) -> bool:
        """True if some argument wants a gradient, so that there is a recording of the backward half."""
        return any(layout.requires_grad for layout in self.signature.layouts)

    @property
    def is_undivided(self) -> bool:
        """True if all gradients are computed in the backward half. See :class:`SplitBackward`."""
        return self._registers_hooks or self.observation.saves_by_hooks

    def has_new_hook(self) -> bool:
        """True if a parameter got a hook on its gradient, which the recording would not run."""
        return any(parameter._backward_hooks for parameter in self.accumulated_later)

    # ----- capture

    def warm_up(self, num_runs: int) -> None:
        """Run both halves eagerly and learn what they use."""
        # Here and not at the capture: a mode that is new there would have compiled functions compiled again.
        with TensorHooks() as hooks:
            super().warm_up(num_runs)
        self._registers_hooks = hooks.were_registered

    def warm_up_as(self, other: GraphPair) -> None:
        """Take over what the warmup of another one of the variant has found."""
        super().warm_up_as(other)
        self._registers_hooks = isinstance(other, GraphTriple) and other._registers_hooks

    def capture_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """See :func:`capture_backwards`; nothing is recorded if no argument wants a gradient."""
        if self.has_static_gradient:
            capture_backwards([self], grad_outputs)
            return
        self.grad_outputs = self.form.without_repeated(grad_outputs)
        self.run_backward()
        self.note_backward(None)
        if self.forward is not None:
            self.forward.release_result()

    def run_backward(self) -> list[Tensor | None]:
        """Run the gradients of the inputs, and keep what those of the parameters are computed from."""
        pairs = [(output, g) for output, g in zip(self.outputs, self.grad_outputs, strict=True) if g is not None]
        repeated = {position for position, _ in self.signature.repeated}  # Their first one has the whole gradient.
        wants = [tensor.requires_grad and index not in repeated for index, tensor in enumerate(self.inputs)]
        leaves = self._leaves()
        self._split = SplitBackward(
            [output for output, _ in pairs],
            [gradient for _, gradient in pairs],
            [tensor for tensor, is_wanted in zip(self.inputs, wants, strict=True) if is_wanted],
            leaves,
            is_undivided=self.is_undivided,
        )
        created = CreatedStorages()
        with hooks_off(leaves), torch.autocast(self.session.device.type, enabled=False), created:
            gradients = self._split.input_gradients()
        found = iter(with_memory_of_their_own(gradients, created))
        self.grad_inputs = [next(found) if is_wanted else None for is_wanted in wants]
        return list(self.grad_inputs)

    def _leaves(self) -> list[Tensor]:
        return [self._aliases.current_leaf(parameter) for parameter in (*self.exposed_later, *self.accumulated_later)]

    def _let_go_forward(self) -> None:
        """Not before the weight gradients: they read what autograd saved."""

    def capture_weight_gradients(self) -> None:
        """Capture the gradients of the parameters.

        Raises:
            CaptureError: it cannot be captured.
            LifecycleError: the backward is not captured yet, or this is already.
        """
        split = self._split
        if split is None or not self.is_backward_captured:
            raise LifecycleError("there is no backward whose weight gradients are to come", where=self.region.name)
        self._split = None
        if self.trained:
            recording = self.session.capture(
                self.stats,
                lambda: self._run_weight_gradients(split),
                observation=self.observation,
                lane=BACKWARD_LANE,
            )
            self.weights = recording
        split.forget()
        super()._let_go_forward()
        if self.weights is not None:
            self.weights.release_result()

    def _run_weight_gradients(self, split: SplitBackward) -> list[Tensor | None]:
        with hooks_off(self._leaves()), torch.autocast(self.session.device.type, enabled=False):
            gradients = list(split.parameter_gradients())
        self.exposed_gradients = gradients[: len(self.exposed_later)]
        self.homes.accumulate(self.accumulated_later, gradients[len(self.exposed_later) :])
        self._saved.poison(keep=[*self.inputs, *self.outputs, *self.exposed_gradients])
        return self.exposed_gradients

    def release(self) -> None:
        """Close what is captured. Results that callers hold stay as they are."""
        super().release()
        if self._split is not None:
            self._split.forget()
        self.session.release([self.weights] if self.weights is not None else [], self.stats)

    # ----- replay

    def launch_weight_gradients(self, guests: Guests) -> None:
        """Replay the gradients of the parameters; then run what follows an accumulation."""
        if self.weights is not None:
            self.weights.replay()
            self.stats.num_launches += 1
        self._have_accumulated(self.accumulated_later, guests)
