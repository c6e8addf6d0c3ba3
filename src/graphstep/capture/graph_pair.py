"""Forward and backward recordings of one region, slot and signature, replayed through autograd."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.gradients import GradientHomes, has_gradient_hooks, hooks_off, leaves_reached
from graphstep.capture.observe import Observation
from graphstep.capture.parameter_aliases import ParameterAliases
from graphstep.capture.randomness import NoRandomness
from graphstep.capture.region import Region
from graphstep.capture.replay_function import Replay
from graphstep.capture.report import RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import refresh
from graphstep.capture.tree import flatten, unflatten
from graphstep.engine import Recording, torch_private
from graphstep.errors import CaptureError, LifecycleError


class GraphPair:
    """The two halves and the tensors at their seams.

    NEW -> FORWARD -> READY: :meth:`capture_forward`, then :meth:`capture_backward`, in the order of the plan.

    Args:
        region: what is captured.
        signature: of the captured call.
        inputs: argument tensors at fixed addresses, detached, requiring grad as in the call.
        in_place: positions of inputs that belong to the model and are read where they are.
        session: owner of the recordings.
        stats: the region's counts.
        chained: positions of inputs that are outputs of other pairs, and those pairs. Nothing is copied there, and the
            gradients are handed on without a copy.
        through_autograd: identities of parameters whose gradients autograd accumulates: those that are used outside
            the region too, so that their parts are summed in the order of eager execution. Parameters with hooks on
            their gradient are treated so without being named.
        lane: memory that the recordings share with others, see the engine.
    """

    def __init__(
        self,
        region: Region,
        signature: Signature,
        inputs: Sequence[Tensor],
        in_place: frozenset[int],
        session: GraphSession,
        stats: RegionStats,
        *,
        chained: Mapping[int, GraphPair] | None = None,
        through_autograd: frozenset[int] = frozenset(),
        lane: Hashable = 0,
    ) -> None:
        self.region = region
        self.signature = signature
        self.inputs = list(inputs)
        self.in_place = in_place
        self.chained = dict(chained or {})
        self._consumers: list[GraphPair] = []
        for source in self.chained.values():
            source._consumers.append(self)
        self.is_in_flight = False
        """A forward has run whose backward may still come."""
        self.outputs: list[Tensor] = []
        self.grad_outputs: list[Tensor | None] = []
        self.grad_inputs: list[Tensor | None] = []
        self.homes = GradientHomes()
        self.gradient_is_handed_on = False
        """The gradients of the inputs are read by the next backward of the plan and by nothing else."""
        self._session = session
        self._stats = stats
        self._result_structure: Any = None
        self._differentiable: tuple[bool, ...] = ()
        self._through_autograd = through_autograd
        self._lane = lane
        self._parameters: list[Tensor] = []
        """Their gradients are accumulated inside the backward recording."""
        self._exposed: list[Tensor] = []
        """Their gradients are results of the backward recording, and autograd accumulates them."""
        self._exposed_gradients: list[Tensor | None] = []
        self._num_holders: list[int | None] | None = None
        self._observation = Observation()
        self._aliases = ParameterAliases(region.modules)
        self._forward: Recording | None = None
        self._backward: Recording | None = None
        self._anchor = torch.empty(0, device=session.device, requires_grad=True)
        """A leaf of every replay, so that there is a backward at all, and to see which kind of pass it is."""

    # ----- capture

    def warm_up(self, num_runs: int) -> None:
        """Run both halves eagerly on the static inputs and learn which parameters and generators they use."""
        own = {id(tensor) for tensor in self.inputs}
        trained: list[Tensor] = []

        def both_halves() -> None:
            versions = [tensor._version for tensor in self.inputs]
            outputs = [output for output in flatten(self._call())[0] if output.requires_grad]
            if [tensor._version for tensor in self.inputs] != versions:
                raise CaptureError(
                    "this region writes into its arguments; a replay would write into copies of them",
                    where=self.region.name,
                    fix="use an operation that makes a new tensor, such as x + y instead of x.add_(y)",
                )
            leaves = [leaf for leaf in leaves_reached(outputs) if id(leaf) not in own]
            if outputs:
                # Not `backward`: that would accumulate.
                wanted = [*leaves, *self._wanted_inputs()]
                with hooks_off(leaves), NoRandomness(self.region.name):
                    found = torch.autograd.grad(
                        outputs, wanted, [torch.zeros_like(o) for o in outputs], allow_unused=True
                    )
                used = [leaf for leaf, gradient in zip(leaves, found, strict=False) if gradient is not None]
                trained[:] = [self._aliases.original_of(leaf) for leaf in used]

        with self._aliases.installed():
            self._observation = self._session.observe(both_halves, num_runs=max(1, num_runs))
        self._exposed = [leaf for leaf in trained if id(leaf) in self._through_autograd or has_gradient_hooks(leaf)]
        exposed = {id(leaf) for leaf in self._exposed}
        self._parameters = [leaf for leaf in trained if id(leaf) not in exposed]
        self.homes.add(self._parameters)

    def capture_forward(self) -> None:
        """Capture the forward half. Its outputs and what autograd saved stay in the pool until the backward half."""
        if self._forward is not None:
            raise LifecycleError("the forward half is captured already", where=self.region.name)
        with self._aliases.installed():
            self._forward = self._session.capture(
                self._stats, self._call, observation=self._observation, lane=self._lane
            )
        self.outputs, self._result_structure = flatten(self._forward.result)
        self._differentiable = tuple(output.requires_grad for output in self.outputs)

    def capture_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Capture the backward half: gradients of the inputs, and of the parameters added to where they live.

        Args:
            grad_outputs: for each output, the static tensor that holds its gradient; ``None`` where it has none.
        """
        if self._forward is None:
            raise LifecycleError("the forward half is not captured yet", where=self.region.name)
        if self._backward is not None:
            raise LifecycleError("the backward half is captured already", where=self.region.name)
        self.grad_outputs = list(grad_outputs)
        outputs = [output for output, wanted in zip(self.outputs, self._differentiable, strict=True) if wanted]
        given = [gradient for gradient in grad_outputs if gradient is not None]
        exposed = [self._aliases.current_leaf(parameter) for parameter in self._exposed]
        accumulated = [self._aliases.current_leaf(parameter) for parameter in self._parameters]
        wanted = [*self._wanted_inputs(), *exposed]

        def backward() -> list[Tensor | None]:
            with hooks_off(exposed):
                gradients = torch.autograd.grad(outputs, [*wanted, *accumulated], given, allow_unused=True)
            self._accumulate(gradients[len(wanted) :])
            return list(gradients[: len(wanted)])

        self._backward = self._session.capture(self._stats, backward, observation=self._observation, lane=self._lane)
        found = iter(self._backward.result)
        self.grad_inputs = [next(found) if tensor.requires_grad else None for tensor in self.inputs]
        self._exposed_gradients = list(found)

    def _call(self) -> Any:
        with self.signature.ambient.entered(self._session.device.type):
            carried: Any = unflatten(self.signature.structure, self.inputs)
            return self.region.function(*carried)

    def _wanted_inputs(self) -> list[Tensor]:
        return [tensor for tensor in self.inputs if tensor.requires_grad]

    def _accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = [(self.homes.of(p), g) for p, g in zip(self._parameters, gradients, strict=True) if g is not None]
        # One launch for all gradients of a dtype instead of one each; the arithmetic is that of `add_`.
        for dtypes in dict.fromkeys((home.dtype, gradient.dtype) for home, gradient in pairs):
            group = [pair for pair in pairs if (pair[0].dtype, pair[1].dtype) == dtypes]
            torch._foreach_add_([home for home, _ in group], [gradient for _, gradient in group])

    # Seam tensors whose memory the rest of the plan may use again become views that do not own it.

    def let_go_forward(self) -> None:
        """Stop owning all that autograd saved. The outputs stay: a caller may hold them until the next replay."""
        borrow = self._session.engine.borrowed_view
        self.outputs = [output.detach() for output in self.outputs]
        self._exposed_gradients = [None if g is None else borrow(g) for g in self._exposed_gradients]
        for position in self.chained:
            needs_grad = self.inputs[position].requires_grad
            self.inputs[position] = self.inputs[position].detach().requires_grad_(needs_grad)
        for recording in (self._forward, self._backward):
            if recording is not None:
                recording.release_result()
        self._aliases = ParameterAliases(())

    def let_go_grad_inputs(self) -> None:
        """Stop owning the gradients of the inputs."""
        self.grad_inputs = [None if g is None else self._session.engine.borrowed_view(g) for g in self.grad_inputs]

    def let_go_grad_outputs(self) -> None:
        """Stop owning the gradients of the outputs."""
        self.grad_outputs = [None if g is None else self._session.engine.borrowed_view(g) for g in self.grad_outputs]

    # ----- replay

    @property
    def is_ready(self) -> bool:
        """True once both halves are captured."""
        return self._forward is not None and self._backward is not None

    def is_held(self) -> bool:
        """True if somebody still holds a result of an earlier replay, which the next one would overwrite.

        The first call, before any replay, tells how many holders there are without the callers of replays.
        """
        now = [torch_private.num_holders(output) for output in self.outputs]
        if self._num_holders is None:
            self._num_holders = now
        return now != self._num_holders

    def why_not(self, tensors: Sequence[Tensor]) -> str:
        """Why a call with these arguments cannot be replayed now; empty if it can."""
        if any(has_gradient_hooks(parameter) for parameter in self._parameters):
            return "a parameter got a hook on its gradient after the capture"
        if any(consumer.is_in_flight for consumer in self._consumers):
            return "the place of its result is in use"
        for position, source in self.chained.items():
            is_copied = tensors[position].data_ptr() != self.inputs[position].data_ptr()
            if is_copied and (source.is_in_flight or source.is_held()):
                return "the place of its argument is in use"
        return ""

    def moved_inputs(self, tensors: Sequence[Tensor]) -> bool:
        """True if an input that is read in place is not where it was captured."""
        return any(tensors[position].data_ptr() != self.inputs[position].data_ptr() for position in self.in_place)

    def replay(self, tensors: Sequence[Tensor], lease: Any) -> Any:
        """Run the forward half and hook the backward half into autograd.

        Args:
            tensors: the flat arguments of a call with the captured signature.
            lease: kept by autograd until the backward has run or the result is dropped; its ``backward_begins`` and
                ``close`` are called.

        Returns:
            The captured function's result over the static outputs: valid until the next replay of this pair, which
            the caller does not start as long as :meth:`is_held` says that the result is still in use.
        """
        leaves = (*self._exposed, self._anchor)
        outputs: tuple[Tensor, ...] = Replay.apply(self, lease, len(tensors), *tensors, *leaves)  # type: ignore[no-untyped-call]
        self._stats.num_replays += 1
        return unflatten(self._result_structure, outputs)

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Refresh the static inputs, where they are not the same memory already, and run the forward half."""
        if self._forward is None:
            raise LifecycleError("the forward half is not captured yet", where=self.region.name)
        for static, given in zip(self.inputs, tensors, strict=True):
            if static.data_ptr() != given.data_ptr():
                refresh(static, given)
        self._forward.replay()
        # Anything that autograd saved from the last replay's outputs is now stale; autograd checks versions.
        for output in self.outputs:
            torch.autograd.graph.increment_version(output)
        return tuple(output.detach() for output in self.outputs)

    def replay_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Refresh the gradients of the outputs, run the backward half.

        Returns:
            Gradients of the inputs, then of the parameters that autograd accumulates for: all of them static.
        """
        if self._backward is None:
            raise LifecycleError("the backward half is not captured yet", where=self.region.name)
        for static, given in zip(self.grad_outputs, gradients, strict=True):
            if static is None:
                continue
            if given is None:
                static.zero_()
            elif static.data_ptr() != given.data_ptr() or static.stride() != given.stride():
                static.copy_(given)
        self.homes.settle()
        self._backward.replay()
        self._run_hooks()
        return [None if g is None else g.detach() for g in (*self.grad_inputs, *self._exposed_gradients)]

    def _run_hooks(self) -> None:
        """Hooks that follow an accumulation run as they would eagerly.

        One that moves ``.grad`` to ``main_grad`` finds ``None`` there: the recording has added to ``main_grad`` itself.
        """
        for parameter in self._parameters:
            for hook in torch_private.post_accumulate_hooks(parameter):
                hook(parameter)

    @property
    def accumulates(self) -> bool:
        """True if the backward half adds to gradients by itself."""
        return bool(self._parameters)

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """For each output, whether it has a gradient."""
        return self._differentiable

    def require_gradients(self) -> None:
        """Refuse a region that no gradient reaches.

        Raises:
            CaptureError: no output depends on an input or parameter that wants a gradient.
        """
        if not any(self._differentiable):
            raise CaptureError(
                "no output of this region has a gradient",
                where=self.region.name,
                fix="capture it forward-only, or leave it out of the captured modules",
            )
