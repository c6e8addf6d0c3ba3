"""Runs the forward of each step: as one graph, as a graph a layer, or operation by operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.capture import GraphSession, RegionStats
from graphstep.capture.manifest import Watched, verify
from graphstep.capture.observe import Observation
from graphstep.capture.progress import CaptureProgress
from graphstep.config import InferenceCudaGraphScope
from graphstep.engine import Recording
from graphstep.errors import CaptureError
from graphstep.inference.draws import CAPTURED_NEEDS, GREEDY, Draws
from graphstep.inference.ladder import Ladder
from graphstep.inference.matching import GraphMatcher, Match, NoBucket
from graphstep.inference.metadata import StepMetadata, StepTensors
from graphstep.inference.model_steps import ModelSteps, Residual, StepContext
from graphstep.inference.requests import DrawNeeds
from graphstep.inference.shapes import BatchLimits, BatchShape
from graphstep.inference.step import Step, dummy_step

_FORWARD_LANE: Final = "forward"
_DRAW_NAMES: Final = ("draw at random", "draw from a part")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrawGraph:
    """Draws from the logits of a bucket in one way."""

    recording: Recording
    stats: RegionStats
    packed: Tensor
    """What it leaves for the host; see `BucketGraphs.logits`."""


@dataclass(frozen=True, slots=True)
class BucketGraphs:
    """The graphs of one bucket, in the order of their replay."""

    bucket: BatchShape
    recordings: tuple[Recording, ...]
    """The last one takes the most likely tokens, too."""
    stats: tuple[RegionStats, ...]
    """Of each recording's region."""
    logits: Tensor
    """Where the last recording leaves them. The memory is the pool's: read it before another bucket is replayed."""
    packed: Tensor
    """The most likely tokens, as `draws.Draws` returns them; memory of the pool as well."""
    draws: Mapping[DrawNeeds, DrawGraph]
    """For steps that want others."""
    capture_seconds: float
    pool_bytes: int
    """What it added to the pool."""


class StepRunner:
    """Owns the graphs of an engine.

    Those of the forward are captured into one lane of a session, and those that draw at random into another. So they
    share memory: what one step has drawn has to be copied, in stream order, before the next one runs. Graphs read the
    step's metadata and the cache where they lie; who moves those, drops the graphs first.

    Args:
        steps: the forward.
        metadata: of the engine. A capture fills it with a step that harms nobody.
        session: owns engine, pool and counts; the model may be watched by it more than once.
        scope: what one graph covers.
        ladder: the buckets.
        limits: of the engine.
        vocabulary: tokens that may be drawn; ``None``: all that there are logits for.
        num_warmup_runs: eager forwards before the capture of a bucket, at least one.
        is_required: what cannot be captured is an error; otherwise it runs eagerly, with a warning.
    """

    def __init__(
        self,
        steps: ModelSteps,
        metadata: StepMetadata,
        session: GraphSession,
        *,
        scope: InferenceCudaGraphScope,
        ladder: Ladder,
        limits: BatchLimits,
        vocabulary: int | None = None,
        num_warmup_runs: int = 1,
        is_required: bool = False,
    ) -> None:
        self.steps = steps
        self.limits = limits
        self.ladder = ladder if scope is not InferenceCudaGraphScope.none else Ladder((), ())
        self.matcher = GraphMatcher(self.ladder)
        self._metadata = metadata
        self._session = session
        self._scope = scope
        self._vocabulary = vocabulary
        self._draws = Draws(session.device)
        self._num_warmup_runs = max(1, num_warmup_runs)
        self._is_required = is_required
        self._graphs: dict[BatchShape, BucketGraphs] = {}
        self._failed: set[BatchShape] = set()
        self._eager_needs: set[DrawNeeds] = set()
        self._watched: Watched | None = None
        self._step_stats = session.stats("steps", scope.value)
        self.num_decode_steps = 0
        """Steps without prompts that were computed."""
        self.num_decode_replays = 0
        """Of them, those that were graphs."""

    @property
    def graphs(self) -> tuple[BucketGraphs, ...]:
        """What has been captured, in that order."""
        return tuple(self._graphs.values())

    @property
    def lacks_graphs(self) -> bool:
        """True if ``capture_all`` has something to capture; what has failed is not tried again."""
        return any(bucket not in self._graphs and bucket not in self._failed for bucket in self.ladder.buckets)

    @property
    def step_stats(self) -> RegionStats:
        """Steps that were replays, and the others with their reasons."""
        return self._step_stats

    def match(self, shape: BatchShape, *, verifies: bool = True) -> Match:
        """Find the bucket of a step; it is captured now if it was not before.

        Args:
            shape: of the step.
            verifies: compare the addresses of the weights first. Needless only where nobody else had a turn since.

        Raises:
            StaleAddressError: weights moved since the capture; named.
            CaptureError: it cannot be captured, and has to be.
        """
        match = self.matcher.match(shape)
        if match.bucket is None:
            return match
        if match.bucket not in self._graphs:
            with self._session.captures_in_a_row():
                is_captured = self._try_capture(match.bucket)
            if not is_captured:
                return Match(None, NoBucket.NOT_CAPTURED)
        if verifies and self._watched is not None:
            verify(self._watched, "inference graphs", instead="drop the graphs (engine.weight_update() does)")
        return match

    def is_ready(self, shape: BatchShape) -> bool:
        """Would `match` capture nothing for a step of this shape? A capture overwrites what the last step has drawn."""
        bucket = self.matcher.match(shape).bucket
        return bucket is None or bucket in self._graphs or bucket in self._failed

    def run(self, tensors: StepTensors, step: Step, match: Match, needs: DrawNeeds | None) -> Tensor | None:
        """Compute the step that ``tensors`` describe, and draw the tokens that follow.

        Args:
            tensors: of the bucket, or of the step where there is none.
            step: the same for the host.
            match: of its shape.
            needs: what the requests of the step want; ``None``: no token is drawn.

        Returns:
            What has been drawn, see `draws.Draws`, valid until the next call.

        Cost where there are graphs: a launch for each; nothing is waited for.
        """
        graphs = self._graphs.get(match.bucket) if match.bucket is not None else None
        if step.num_prefill == 0:
            self.num_decode_steps += 1
            self.num_decode_replays += graphs is not None
        if graphs is None:
            self._step_stats.eager_calls[match.reason.value if match.reason is not None else "no graphs"] += 1
            logits = self.steps.forward(tensors, step)
            return None if needs is None else self._draw(logits, tensors, needs)
        for recording in graphs.recordings:
            recording.replay()
        for stats in graphs.stats:
            stats.num_replays += 1
        if self._scope is not InferenceCudaGraphScope.block:
            self._step_stats.num_replays += 1
        if needs is None or needs == GREEDY:
            return graphs.packed
        drawing = graphs.draws.get(needs)
        if drawing is None:
            return self._draw(graphs.logits, tensors, needs)
        drawing.recording.replay()
        drawing.stats.num_replays += 1
        return drawing.packed

    def capture_all(self, *, show_progress: bool | None = None) -> None:
        """Capture every bucket, the largest first, so that the others find their memory in the pool.

        Args:
            show_progress: as for `CaptureProgress`.

        Raises:
            CaptureError: a bucket cannot be captured, and has to be.
        """
        missing = [b for b in self.ladder.capture_order() if b not in self._graphs and b not in self._failed]
        with self._session.captures_in_a_row(), CaptureProgress(len(missing), enabled=show_progress) as progress:
            for bucket in missing:
                self._try_capture(bucket)
                progress.advance(str(bucket), self._allocated_bytes())

    def drop(self) -> None:
        """Free all graphs; the next step or `capture_all` makes them anew."""
        for graphs in self._graphs.values():
            each = [(drawing.recording, drawing.stats) for drawing in graphs.draws.values()]
            for recording, stats in (*zip(graphs.recordings, graphs.stats, strict=True), *each):
                self._session.release([recording], stats)
                stats.num_signatures = 0
            self._step_stats.num_signatures = 0
        self._graphs.clear()
        self._failed.clear()
        self._watched = None

    def watch(self) -> None:
        """Note where the weights are, unless that is known: graphs are made for these addresses."""
        if self._watched is None:
            self._watched = self._session.watch([("", self.steps.model)], may_be_frozen=True)

    def changes(self) -> list[str]:
        """Weights that are not where they were when `watch` noted them, in words."""
        return self._watched.changes() if self._watched is not None and not self._watched.is_unchanged() else []

    def _try_capture(self, bucket: BatchShape) -> bool:
        if bucket in self._failed:
            return False
        self.watch()
        try:
            self._graphs[bucket] = self._capture(bucket)
        except CaptureError as error:
            if self._is_required:
                raise
            self._failed.add(bucket)
            self._step_stats.why_not_captured = str(error)
            _log.warning("steps of %s run without graphs: %s", bucket, error)
            return False
        return True

    @torch.no_grad()
    def _capture(self, bucket: BatchShape) -> BucketGraphs:
        session, engine = self._session, self._session.engine
        tensors = self._metadata.fill(dummy_step(bucket, self.limits.max_sequence_length), bucket)
        with engine.capture_stream():
            for _ in range(self._num_warmup_runs):
                logits = self.steps.forward(tensors, None)
                for needs in (GREEDY, *CAPTURED_NEEDS):
                    self._draw(logits, tensors, needs)
            del logits
        recordings: list[Recording] = []
        regions: list[RegionStats] = []
        total = self._step_stats
        seconds, pool_bytes = total.capture_seconds, 0

        def captured(stats: RegionStats, function: Callable[[], Any], lane: str = _FORWARD_LANE) -> Any:
            nonlocal pool_bytes
            recording = session.capture(stats, function, observation=self._kept_alive(), lane=lane)
            recordings.append(recording)
            regions.append(stats)
            pool_bytes += recording.nbytes
            result = recording.result
            # What later graphs of the bucket need is held here until they are captured; then its memory is free.
            recording.release_result()
            return result

        try:
            with session.timed(total):
                if self._scope is InferenceCudaGraphScope.block:
                    logits, packed = captured(
                        total, lambda: self._with_draw(self.steps.forward(tensors, None), tensors)
                    )
                else:
                    logits, packed = self._capture_layers(tensors, captured)
                num_forward = len(recordings)
                views = {
                    needs: engine.borrowed_view(packed_too)
                    for needs, packed_too in self._capture_draws(logits, tensors, captured)
                }
                logits, packed = engine.borrowed_view(logits), engine.borrowed_view(packed)
        except BaseException:
            for recording, stats in zip(recordings, regions, strict=True):
                session.release([recording], stats)
            raise
        for stats in {id(region): region for region in (*regions, total)}.values():
            stats.num_signatures += 1
        graphs_of_draws = zip(views, recordings[num_forward:], regions[num_forward:], strict=True)
        return BucketGraphs(
            bucket=bucket,
            recordings=tuple(recordings[:num_forward]),
            stats=tuple(regions[:num_forward]),
            logits=logits,
            packed=packed,
            draws={needs: DrawGraph(recording, stats, views[needs]) for needs, recording, stats in graphs_of_draws},
            capture_seconds=total.capture_seconds - seconds,
            pool_bytes=pool_bytes,
        )

    def _capture_draws(
        self, logits: Tensor, tensors: StepTensors, captured: Callable[..., Any]
    ) -> Iterator[tuple[DrawNeeds, Tensor]]:
        for name, needs in zip(_DRAW_NAMES, CAPTURED_NEEDS, strict=True):
            if needs in self._eager_needs:
                continue
            try:
                # In a lane of their own: if one fails, the forward's can still be captured into.
                drawn = captured(self._session.stats(name, "draw"), partial(self._draw, logits, tensors, needs), "draw")
            except CaptureError as error:
                self._eager_needs.add(needs)
                _log.warning("steps %s without a graph: %s", name, error)
            else:
                yield needs, drawn

    def _capture_layers(
        self, tensors: StepTensors, captured: Callable[[RegionStats, Callable[[], Any]], Any]
    ) -> tuple[Tensor, Tensor]:
        steps, stats = self.steps, self._session.stats
        hidden, rotary = captured(stats("front", "front"), lambda: steps.front(tensors))
        context = StepContext(tensors, rotary, None)
        residual: Residual = (hidden, None)
        for number in range(steps.num_layers):
            residual = captured(
                stats(f"layers.{number}", "layer"),
                partial(steps.layer, number, residual, context),
            )
        found: tuple[Tensor, Tensor] = captured(
            stats("head", "head"), lambda: self._with_draw(steps.head(residual, tensors), tensors)
        )
        return found

    def _with_draw(self, logits: Tensor, tensors: StepTensors) -> tuple[Tensor, Tensor]:
        return logits, self._draw(logits, tensors, GREEDY)

    def _draw(self, logits: Tensor, tensors: StepTensors, needs: DrawNeeds) -> Tensor:
        return self._draws.draw(logits[:, : self._vocabulary], tensors, needs)

    def _kept_alive(self) -> Observation:
        cache = self.steps.cache
        states = [state for pair in cache.states for state in pair]
        return Observation(externals=[cache.pages, *states])

    def _allocated_bytes(self) -> int | None:
        device = self._session.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else None
