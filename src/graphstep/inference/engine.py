"""The engine of generation: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from graphstep.capture import CaptureReport, GraphSession
from graphstep.config import InferenceCudaGraphScope
from graphstep.errors import InputMismatchError, LifecycleError
from graphstep.inference.attention import attention_for
from graphstep.inference.blocks import BlockPool
from graphstep.inference.cache import CacheShape, InferenceCache
from graphstep.inference.draws import DrawReader, PendingDraws
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.engine_states import CacheMode, EngineState, WeightUpdate, misfit
from graphstep.inference.fusions import fusions_for
from graphstep.inference.memory import plan_cache
from graphstep.inference.metadata import StepMetadata
from graphstep.inference.model_steps import ModelSteps
from graphstep.inference.requests import FinishReason, Output, Request, SamplingParams
from graphstep.inference.runner import StepRunner
from graphstep.inference.scheduler import Scheduler, SchedulerCounts
from graphstep.inference.step import Step
from graphstep.inference.streams import TokenStream
from graphstep.models import GPTModel

__all__ = ["CacheMode", "DynamicEngine", "EngineState", "WeightUpdate"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Launched:
    """A step that the device computes, or has computed."""

    step: Step
    draws: PendingDraws


class DynamicEngine:
    """Generates tokens for requests that join and leave a running batch.

    With `EngineConfig.async_scheduling` the next step is launched before the tokens of this one are read: they go from
    step to step on the device, and the host works while it computes. A request that ends with a token has then been
    given one more, which is thrown away. What `step` returns, and every token, is as without it; but between two calls
    the device may be computing, so that weights are changed within `weight_update`.

    Not safe for several threads. The model is read only; it has to be in evaluation mode when a step runs. What the
    graphs read (weights, cache, step description) stays at its address; weights that moved are refused by name.

    Owns: the session with its graphs, the cache, the buffers of a step. `close` frees them in that order.

    Args:
        model: whose weights are used where they are. On one device.
        config: sizes, graphs, seed.
        session: for graphs, of the engine's own from now on; by default a new one for the model's device.

    Raises:
        ConfigError: sizes that do not fit each other or the model; all problems of a kind at once.
        CaptureError: a graph cannot be captured, and has to be.
    """

    def __init__(self, model: GPTModel, config: EngineConfig | None = None, *, session: GraphSession | None = None):
        self.config = config or EngineConfig()
        self.model = model
        device = model.embedding.weight.device
        options = self.config.inference
        shape = CacheShape.of(model)
        self.limits = self.config.limits(model, shape)
        self._vocabulary = self.config.vocabulary_of(model)
        block_size = options.inference_dynamic_batching_block_size
        self._metadata = StepMetadata(self.limits, block_size, device)
        if self.config.scope is not InferenceCudaGraphScope.none:
            self._require_evaluation("DynamicEngine")
        self.cache_plan = plan_cache(model, shape, self.config, self.limits, self._metadata)
        num_blocks = self.cache_plan.num_blocks
        self._pool = BlockPool(num_blocks, block_size, prefix_caching=self.config.prefix_caching and not shape.mixers)
        self._cache = InferenceCache(shape, num_blocks, block_size, self.limits.max_requests, device)
        self._session = session if session is not None else GraphSession(device)
        steps = ModelSteps(
            model,
            self._cache,
            attention_for(device, shape.dtype, is_batch_invariant=self.config.inference.batch_invariant_mode),
            fusions_for(device),
        )
        self._runner = StepRunner(
            steps,
            self._metadata,
            self._session,
            scope=self.config.scope,
            ladder=self.config.ladder(self.limits, has_states=steps.has_states),
            limits=self.limits,
            vocabulary=self._vocabulary,
            num_warmup_runs=self.config.num_warmup_runs,
            is_required=self.config.is_required,
        )
        self._has_states = steps.has_states
        self._scheduler = Scheduler(
            self.limits,
            self._pool,
            chunked_prefill=options.enable_chunked_prefill,
            seed=self.config.seed,
            matcher=self._runner.matcher if options.inference_cuda_graph_all_prefills else None,
            vocabulary=self._vocabulary,
            most_in_flight=2 if self.config.async_scheduling else 1,
        )
        self._reader = DrawReader(self.limits.max_requests, device)
        self._launched: deque[_Launched] = deque()
        self._kept: list[Output] = []
        """What steps gave that were read outside of `step`, which returns it later."""
        self._streams: dict[int, TokenStream] = {}
        self._state = EngineState.READY
        if self.config.captures_at_start:
            try:
                self._capture_all()
            except BaseException:
                self.close()
                raise

    @property
    def state(self) -> EngineState:
        """Where it is in its life."""
        return self._state

    @property
    def has_work(self) -> bool:
        """Has `step` something to compute or to return?"""
        return self._scheduler.has_work or bool(self._kept)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return self._scheduler.num_waiting

    @property
    def counts(self) -> SchedulerCounts:
        """What has happened since the start."""
        return self._scheduler.counts

    @property
    def runner(self) -> StepRunner:
        """The graphs."""
        return self._runner

    @property
    def cache(self) -> InferenceCache:
        """Keys, values and states."""
        return self._cache

    @property
    def blocks(self) -> BlockPool:
        """Who holds which block."""
        return self._pool

    def add_request(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Request:
        """Let a request wait for its turn; `step` computes it.

        Raises:
            RequestError: it could never be served; all problems at once.
            LifecycleError: the engine is closed.
        """
        if self._state is EngineState.CLOSED:
            raise LifecycleError("the engine is closed", where="DynamicEngine.add_request", fix="make a new one")
        return self._scheduler.add(prompt, sampling or SamplingParams())

    def cancel(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request early; its blocks are free at once. An open stream of it ends with this reason."""
        if request.is_finished:
            return
        self._scheduler.end(request, reason)
        self._hand_out([Output(request, None, finish_reason=reason)])
        try:
            self._drop_surplus()
        except RuntimeError as error:
            _log.warning("the device failed in a step that nobody waits for any more: %s", error)

    def step(self) -> list[Output]:
        """Compute one step for as many requests as fit.

        Returns:
            What each request got; empty if there is nothing to do, or if only parts of prompts were computed.

        Raises:
            LifecycleError: suspended, closed, or the model is in training mode.
            StaleAddressError: weights are not where graphs expect them. No request is lost.

        Other errors pass through; no token is lost: later calls return what was in flight, and repeat what failed.
        """
        return self._step(verifies=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Request]:
        """Run until these requests are finished, and whatever else is in the engine with them.

        Args:
            prompts: tokens of each.
            sampling: for all, or of each.

        Raises:
            RequestError: one of them could never be served; none was taken.
        """
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise InputMismatchError(
                f"{len(prompts)} prompts and {len(each)} settings",
                where="DynamicEngine.generate",
                fix="give one SamplingParams for all, or one a prompt",
            )
        requests: list[Request] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                requests.append(self.add_request(prompt, own))
            verifies = True
            while not all(request.is_finished for request in requests):
                self._step(verifies=verifies)
                verifies = False  # Nobody else has a turn between these steps.
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return requests

    def stream(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> TokenStream:
        """Add a request and return what yields its outputs, computing steps while there is nothing to yield.

        The request takes part in every step from now on, whether its outputs are taken or not.

        Raises:
            RequestError: it could never be served.
        """
        request = self.add_request(prompt, sampling)
        stream = self._streams[request.number] = TokenStream(request, self.step, self._leave)
        return stream

    def suspend(self, mode: CacheMode = CacheMode.PERSIST) -> None:
        """Compute nothing until `resume`, and make room as the mode says. Requests stay, and may be added.

        Raises:
            LifecycleError: it is suspended or closed already.
        """
        self._require_ready("DynamicEngine.suspend")
        self._read_launched()
        if mode is not CacheMode.PERSIST:
            self._runner.drop()
        if mode is CacheMode.OFFLOAD:
            self._cache.offload(self._pool.in_use())
        elif mode is CacheMode.RECOMPUTE:
            self._scheduler.recompute_all()
            self._cache.release()
        self._state = EngineState.SUSPENDED

    def resume(self) -> None:
        """Go on. Memory that was given up is taken again, and its graphs are captured as at the start.

        Raises:
            LifecycleError: it is not suspended; or there are graphs to capture, and the model is in training mode: the
                engine stays suspended.
        """
        where = "DynamicEngine.resume"
        if self._state is not EngineState.SUSPENDED:
            raise LifecycleError(f"the engine is {self._state.value}", where=where, fix="suspend() it first")
        if self.config.captures_at_start and self._runner.lacks_graphs:
            self._require_evaluation(where)
        if not self._cache.is_allocated:
            self._cache.allocate()
        self._state = EngineState.READY
        if self.config.captures_at_start:
            self._capture_all()

    @contextmanager
    def weight_update(self, *, keeps_running: bool = False) -> Iterator[WeightUpdate]:
        """Change the weights in the body, in any way; afterwards nothing that was computed with the old ones is used.

        Known prefixes are forgotten. Running requests compute their keys and values again, unless ``keeps_running``:
        then they go on from those of the old weights. Weights that are not where they were are named in the result,
        and the graphs are captured anew. All of this holds also if the body fails: whatever it wrote by then counts.

        Raises:
            LifecycleError: the engine is closed.
        """
        if self._state is EngineState.CLOSED:
            raise LifecycleError("the engine is closed", where="DynamicEngine.weight_update", fix="make a new one")
        update = WeightUpdate()
        if keeps_running and self._has_states:
            self._read_launched()  # States cannot be taken back.
        else:
            self._discard_launched()
        self._runner.watch()
        try:
            yield update
        finally:
            try:
                self._read_launched()  # The body may have computed steps.
            finally:
                if keeps_running:
                    self._scheduler.forget_cache()
                else:
                    update.num_recomputed = self._scheduler.num_running
                    self._scheduler.recompute_all()
                update.moved = self._runner.changes()
                if update.moved:
                    self._runner.drop()
        if update.moved and self.config.captures_at_start and self._state is EngineState.READY:
            self._capture_all()

    def update_weights(self, weights: Mapping[str, Tensor], *, keeps_running: bool = False) -> WeightUpdate:
        """Copy new values into the model's tensors, which stay where they are.

        Args:
            weights: by the names of the model's ``state_dict``; those that are missing keep their values.
            keeps_running: see `weight_update`.

        Raises:
            InputMismatchError: names that the model does not know, other shapes or whole numbers, all at once. Nothing
                was written.
        """
        own = self.model.state_dict(keep_vars=True)
        wrong = [what for name, new in weights.items() if (what := misfit(name, own.get(name), new)) is not None]
        if wrong:
            raise InputMismatchError(
                "weights that do not fit the model: " + "; ".join(wrong),
                where="DynamicEngine.update_weights",
                fix="give tensors by the names, in the shapes and types of model.state_dict()",
            )
        with self.weight_update(keeps_running=keeps_running) as update, torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        return update

    def coverage(self) -> list[str]:
        """Say in words which steps have graphs."""
        said = list(self._runner.matcher.coverage(self.limits))
        if self._has_states and self._runner.ladder.buckets:
            said[-1] += ": they change recurrent states by their lengths"
        return said

    def report(self) -> CaptureReport:
        """What has been captured and how it was used; the row ``steps`` counts steps with and without graphs."""
        return self._session.report()

    def close(self) -> None:
        """Free graphs, then the cache. Requests that are not finished end as cancelled. May be called twice."""
        if self._state is EngineState.CLOSED:
            return
        for request in self._scheduler.unfinished():
            self.cancel(request)
        self._state = EngineState.CLOSED
        try:
            for launched in self._launched:
                launched.draws.wait()
        finally:
            self._launched.clear()
            self._kept.clear()
            self._session.close()
            self._cache.release()

    def __enter__(self) -> DynamicEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, *, verifies: bool) -> list[Output]:
        self._require_ready("DynamicEngine.step")
        self._require_evaluation("DynamicEngine.step")
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        if not self._launched and not self._launch(verifies=verifies):
            return []
        if self.config.async_scheduling:
            self._launch(verifies=verifies)
        outputs = self._read()
        self._drop_surplus()
        return outputs

    def _launch(self, *, verifies: bool) -> bool:
        """Schedule the next step and start it; False: there is none, or not before the one in flight is read."""
        step = self._scheduler.schedule()
        if step is None:
            return False
        if self._launched and not self._runner.is_ready(step.shape):
            # The capture would overwrite what the step in flight has drawn.
            self._scheduler.abandon(step)
            return False
        try:
            self._launched.append(self._start(step, verifies=verifies))
        except BaseException:
            self._scheduler.abandon(step)
            self._read_launched()  # The failed step may have drawn over the tokens that it was fed from.
            if self._has_states:
                self._scheduler.recompute_all()  # States may have gone on by a token already.
            raise
        return True

    @torch.no_grad()
    def _start(self, step: Step, *, verifies: bool) -> _Launched:
        """Forward, drawing and the copy of what is drawn; nothing is waited for."""
        if self._launched:
            self._launched[-1].draws.keep_order()
        match = self._runner.match(step.shape, verifies=verifies)
        tensors = self._metadata.fill(step, match.bucket or self.limits.eager_shape(step.shape))
        needs = step.needs if any(step.draws) else None
        packed = self._runner.run(tensors, step, match, needs)
        return _Launched(step, self._reader.start(packed, len(step.requests), needs))

    def _read(self) -> list[Output]:
        """Wait for the earliest step in flight and hand out what it gave. The one place where the host waits."""
        launched = self._launched[0]
        try:
            draws = launched.draws.read()
        except BaseException:
            self._discard_launched()
            if self._has_states:
                self._scheduler.recompute_all()
            raise
        self._launched.popleft()
        outputs = self._scheduler.commit(launched.step, *draws)
        if self._streams:
            self._hand_out(outputs)
        return outputs

    def _read_launched(self) -> None:
        """Leave no step in flight; what they gave is returned later."""
        while self._launched:
            self._kept += self._read()

    def _discard_launched(self) -> None:
        """Leave no step in flight, as if the next one had not been launched; wait until the device is done with it."""
        launched = [*self._launched]
        self._launched.clear()
        for each in reversed(launched):
            self._scheduler.abandon(each.step)
        for each in launched:
            each.draws.wait()

    def _drop_surplus(self) -> None:
        """With no request left, forget the step that was launched in advance, once the device is done with it."""
        if self._launched and not self._scheduler.has_work:
            self._discard_launched()

    def _leave(self, request: Request) -> None:
        self._streams.pop(request.number, None)
        self.cancel(request)

    def _hand_out(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request.number)
            if stream is not None:
                stream.put(output)

    def _capture_all(self) -> None:
        if self._runner.lacks_graphs:
            self._require_evaluation("DynamicEngine")
        self._runner.capture_all(show_progress=self.config.show_progress)
        graphs = self._runner.graphs
        if graphs:
            _log.info(
                "graphs: %d shapes in %.1f s, %.3f GB",
                len(graphs),
                sum(each.capture_seconds for each in graphs),
                self._session.engine.pool_bytes / 1e9,
            )

    def _require_ready(self, where: str) -> None:
        if self._state is not EngineState.READY:
            fix = "resume() it first" if self._state is EngineState.SUSPENDED else "make a new one"
            raise LifecycleError(f"the engine is {self._state.value}", where=where, fix=fix)

    def _require_evaluation(self, where: str) -> None:
        if self.model.training:
            raise LifecycleError(
                "the model is in training mode; its routers would add noise and count tokens",
                where=where,
                fix="call model.eval() before, and model.train() to go on with training",
            )
