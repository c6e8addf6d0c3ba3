"""The GPU engine: CUDA graphs captured on a stream of its own, into private memory pools, one a lane.

What keeps what alive: the engine holds the pool and the capture stream; each recording holds its executable graph.
Recordings go first, the pool last. The libraries' workspaces lie in a pool of their own, which torch keeps for good.
"""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphstep.engine import compiled_part, cuda_memory, cuda_workspaces, kernel_switches, torch_private
from graphstep.engine.ambient import casts_forgotten, collection_held
from graphstep.engine.branch import StreamBranch
from graphstep.engine.cuda_driver import capturing_node_count, restart_capture
from graphstep.engine.cuda_memory import pool_segments
from graphstep.engine.cuda_memsets import memset_kernels
from graphstep.engine.user_frame import user_line_of
from graphstep.errors import CaptureError, ConfigError, GraphstepError, LifecycleError, Problem

T = TypeVar("T")

_BRANCHES = 3
"""Streams beside that of a capture, for functions that want them."""


class CudaRecording:
    """An executable CUDA graph and what its function returned. Owned by the engine that made it until it is closed."""

    def __init__(
        self, engine: CudaEngine, graph: torch.cuda.CUDAGraph, result: Any, num_nodes: int | None, nbytes: int
    ) -> None:
        self._engine = engine
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._result = result
        self._num_nodes = num_nodes
        self._nbytes = nbytes

    @property
    def result(self) -> Any:
        """What the function returned; every replay overwrites the tensors in it."""
        return self._result

    @property
    def num_operations(self) -> int | None:
        """Nodes of the graph, where the driver tells."""
        return self._num_nodes

    @property
    def nbytes(self) -> int:
        """Bytes by which the capture grew the memory reserved from the driver."""
        return self._nbytes if self._graph is not None else 0

    @property
    def is_closed(self) -> bool:
        """True once closed."""
        return self._graph is None

    def replay(self) -> None:
        """Launch the graph on the caller's current stream. One launch; the host does not wait.

        Raises:
            LifecycleError: the recording is closed, or a capture is under way in this thread.
        """
        if self._graph is None:
            raise LifecycleError("the recording is closed", fix="capture again before replaying")
        if torch.cuda.is_current_stream_capturing():  # By any engine: the stream is the thread's own.
            raise LifecycleError(
                "a recording cannot be replayed inside a capture", fix="replay it before or after the captured function"
            )
        self._graph.replay()

    def launcher(self) -> Callable[[], object]:
        """The replay itself, without a look at whether it may run; see the protocol."""
        return self.replay if self._graph is None else compiled_part.graph_launcher(self._graph)

    def release_result(self) -> None:
        """Forget what the function returned, so that later captures into the pool may use its memory."""
        self._result = None

    def close(self) -> None:
        """Destroy the graph. Work already launched still completes."""
        graph, self._graph = self._graph, None
        self._result = None
        if graph is not None:
            graph.reset()


@dataclass(frozen=True, slots=True)
class _Lane:
    """One memory pool, and the graph that keeps it in use."""

    pool: Any
    anchor: torch.cuda.CUDAGraph


class CudaEngine:
    """Captures on one GPU. See :class:`graphstep.engine.protocol.Engine` for the contract.

    Args:
        device: a CUDA device; the current one by default.

    Raises:
        ConfigError: torch sees no such device.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                Problem(
                    code="no-cuda-device",
                    what="torch sees no CUDA device",
                    where="CudaEngine",
                    fix="use a machine with a GPU and a CUDA build of torch, or the tape engine on the CPU",
                )
            )
        wanted = torch.device(device if device is not None else "cuda")
        index = wanted.index if wanted.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._token = torch.zeros(1, device=self._device)
        self._lanes: dict[Hashable, _Lane] = {}
        self._spoilt: list[_Lane] = []
        """Lanes whose pool cannot be captured into any more; their recordings live on."""
        self._recordings: weakref.WeakKeyDictionary[CudaRecording, _Lane] = weakref.WeakKeyDictionary()
        self._lends_pools = cuda_memory.can_allocate_in()
        self._capturing_thread: int | None = None
        self.workspace_pool: Any = None
        """Name of the pool of the libraries' workspaces, once there is one. It stays when the engine is closed."""
        self._workspace_bytes = 0
        self._marks: list[Tensor] = []
        """In the pools of the workspaces, which are for other engines when these are gone."""
        self._branch_stream: torch.cuda.Stream | None = None
        self._other_streams: tuple[torch.cuda.Stream, ...] = ()
        self._memset_kernels = memset_kernels(self._device)
        self._is_closed = False
        if not torch.cuda.is_current_stream_capturing():
            kernel_switches.settle_attention_order(self._device)

    @property
    def name(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def device(self) -> torch.device:
        """The GPU, with its index."""
        return self._device

    @property
    def is_capturing(self) -> bool:
        """True in the thread whose work is being captured."""
        return self._capturing_thread == threading.get_ident()

    @property
    def pool_bytes(self) -> int:
        """Bytes that the private pool has reserved from the driver. Walks the allocator's segments: slow."""
        return sum(self.lane_bytes.values())

    @property
    def lane_bytes(self) -> Mapping[Hashable, int]:
        """The same by lane, and as slow; those that a failed capture has spoilt together."""
        if self._is_closed:
            return {}
        sizes = pool_segments(self.pools())
        found = dict(zip(self._lanes, sizes, strict=False))
        return found | ({"spoilt": sum(sizes[len(found) :])} if self._spoilt else {})

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the pool that the math libraries have their workspaces in.

        0 where those of an earlier engine serve: torch gives its streams out again and keeps the workspaces of each.
        """
        return self._workspace_bytes

    def pools(self) -> list[Any]:
        """Names of the memory pools, one a lane."""
        return [lane.pool for lane in (*self._lanes.values(), *self._spoilt)]

    def capture(
        self,
        function: Callable[[], Any],
        *,
        generators: Sequence[torch.Generator] = (),
        lane: Hashable = 0,
        collect_first: bool = True,
    ) -> CudaRecording:
        """Run ``function`` once under stream capture, into the pool of ``lane``. Computes nothing.

        Raises:
            CaptureError: an operation cannot be captured. The pool, the generators and the stream are as before.
            LifecycleError: the engine is closed, or a capture is under way: in this engine, or in this thread.
        """
        if self._is_closed:
            raise LifecycleError("the engine is closed", fix="use a new session")
        if self._capturing_thread is not None or torch.cuda.is_current_stream_capturing():
            raise LifecycleError("a capture is already under way", fix="capture one function at a time")
        with collection_held(collect_first=collect_first):
            # Somebody may have had torch free the workspaces; within captures in a row nobody has.
            if collect_first or self.workspace_pool is None:
                self._prime()
            if lane not in self._lanes:
                self._lanes[lane] = self._open_lane()
            return self._capture(function, generators, lane)

    def _capture(
        self, function: Callable[[], Any], generators: Sequence[torch.Generator], lane: Hashable
    ) -> CudaRecording:
        named = [generator for generator in generators if generator.device.type == "cuda"]
        rollback = [(g, g.clone_state()) for g in (torch.cuda.default_generators[self._device.index], *named)]
        # Kept by torch until it is instantiated, so that it can be changed before.
        graph = torch.cuda.CUDAGraph(keep_graph=True) if self._memset_kernels is not None else torch.cuda.CUDAGraph()
        for generator in named:
            graph.register_generator_state(generator)
        self._capturing_thread = threading.get_ident()
        try:
            # Outstanding work is drained first: a watchdog that polls an older event would break the capture.
            torch.cuda.synchronize(self._device)
            # What eager steps left in the cache would stand beside the pool, which cannot use it.
            torch.cuda.empty_cache()
            reserved_before = torch.cuda.memory_reserved(self._device)
            with casts_forgotten(), torch_private.stale_streams_overridden(), self.capture_stream():
                result, num_nodes = self._capture_on_stream(graph, function, lane)
        except BaseException:
            for generator, state in rollback:
                # A failed capture leaves the old state marked as capturing; a fresh state is not.
                generator.graphsafe_set_state(state)
            raise
        finally:
            self._capturing_thread = None
        nbytes = max(0, torch.cuda.memory_reserved(self._device) - reserved_before)
        recording = CudaRecording(self, graph, result, num_nodes, nbytes)
        self._recordings[recording] = self._lanes[lane]
        return recording

    def _capture_on_stream(
        self, graph: torch.cuda.CUDAGraph, function: Callable[[], Any], lane: Hashable
    ) -> tuple[Any, int | None]:
        # Thread-local mode: what other threads do (data loading, checkpoint writing) cannot break the capture.
        graph.capture_begin(pool=self._lanes[lane].pool, capture_error_mode="thread_local")
        try:
            result = function()
            num_nodes = capturing_node_count(self._stream)
        except BaseException as error:
            self._abandon(graph, lane)
            if isinstance(error, GraphstepError) or not isinstance(error, RuntimeError):
                raise  # The function's own error, or one that already says all.
            raise _explain(error) from error
        try:
            graph.capture_end()
        except RuntimeError as error:
            del result
            self._abandon(graph, lane, has_ended=True)
            raise _explain(error) from error
        if self._memset_kernels is not None:
            try:
                self._memset_kernels.replace_in(graph.raw_cuda_graph())
                graph.instantiate()
            except RuntimeError as error:
                del result
                graph.reset()
                raise _explain(error) from error
        return result, num_nodes

    def _abandon(self, graph: torch.cuda.CUDAGraph, lane: Hashable, *, has_ended: bool = False) -> None:
        """Take the stream and the allocators out of a capture that failed. Runs on the capture stream.

        Args:
            graph: whose ``capture_begin`` has run.
            lane: of the capture.
            has_ended: ``capture_end`` was tried and failed.
        """
        try:
            if not has_ended:
                self._token.zero_()  # torch warns of an empty graph.
                graph.capture_end()
        except RuntimeError:
            has_ended = True
        if has_ended:
            try:
                is_capturing = restart_capture(self._stream)
                if is_capturing:
                    self._token.zero_()
                    graph.capture_end()
            except RuntimeError:
                is_capturing = False
            if not is_capturing:
                # The allocators still take the pool for one being captured into: its name cannot be used again.
                self._spoilt.append(self._lanes.pop(lane))
        graph.reset()

    def _prime(self) -> None:
        """Before captures: have the math libraries allocate their workspaces, which graphs of the stream write.

        A workspace belongs to a handle and a stream and is kept by torch. It gets a pool that nothing else uses: torch
        frees all workspaces of the process when somebody asks for it (the graphs of `torch.compile` do), and the graphs
        write there still. Allocated inside a capture it would lie among what other graphs keep. The backward pass runs
        in a thread with handles of its own.
        """
        if self.workspace_pool is not None:
            self._take_workspaces()
            return
        self._stream = cuda_workspaces.stream_for_captures(self._stream)
        self.workspace_pool = cuda_workspaces.pool_of(self._stream)
        # An earlier engine with this stream may have left its workspaces in the pool.
        (before,) = pool_segments([self.workspace_pool])
        self._take_workspaces()
        (after,) = pool_segments([self.workspace_pool])
        self._workspace_bytes = after - before

    def _take_workspaces(self) -> None:
        with torch.inference_mode(False), torch.autocast("cuda", enabled=False), self.capture_stream():
            self._marks = [cuda_workspaces.take(self.workspace_pool, self._device)]
            stream = self._branch_stream
            if stream is not None:
                with torch.cuda.stream(stream):
                    pool = cuda_workspaces.pool_of(stream)
                    self._marks.append(cuda_workspaces.take(pool, self._device, only_backward=True))
        torch.cuda.synchronize(self._device)

    def branch(self) -> StreamBranch:
        """Before a capture: a stream beside that of the capture. Its workspaces are kept as those of the other."""
        if self._branch_stream is None:
            if self.workspace_pool is None:
                self._prime()
            streams = [torch.cuda.Stream(self._device) for _ in range(_BRANCHES + 2)]
            first = next(stream for stream in streams if stream != self._stream)
            branch = self._branch_stream = cuda_workspaces.stream_for_captures(first)
            others = [stream for stream in streams if stream not in (self._stream, branch)]
            self._other_streams = tuple(others[: _BRANCHES - 1])
            pool = [cuda_workspaces.pool_of(branch)]
            (before,) = pool_segments(pool)
            self._take_workspaces()
            (after,) = pool_segments(pool)
            self._workspace_bytes += after - before
        return StreamBranch(self._branch_stream, self._stream, self._other_streams)

    def _open_lane(self) -> _Lane:
        """A new pool, and a graph in it: the allocator gives up a pool that no graph uses, and refuses its name."""
        pool, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with self.capture_stream():
            anchor.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._token.zero_()
            anchor.capture_end()
        return _Lane(pool, anchor)

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Run the body on the capture stream, after the caller's stream; the caller's stream continues after it."""
        if self.workspace_pool is None:
            self._prime()  # What runs here would have torch put workspaces where other memory is.
        outside = torch.cuda.current_stream(self._device)
        if outside == self._stream:
            yield
            return
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def run_on_pool(self, function: Callable[[], T], *, lane: Hashable, copied: Callable[[T], T]) -> T:
        """Run ``function`` on the capture stream and on the memory of a lane's pool. See the protocol."""
        found = self._lanes.get(lane) if self._lends_pools else None
        if found is None:
            with self.capture_stream():
                return function()
        before = cuda_memory.blocks_in_use(found.pool)
        try:
            with self.capture_stream():
                with cuda_memory.allocating_in(found.pool, self._device):
                    try:
                        result = function()
                    finally:  # What other streams use of the pool counts as used no more when the body ends.
                        torch.cuda.synchronize(self._device)
                kept = copied(result)
                del result
            return kept
        finally:
            self._take_back(lane, found, before)

    def _take_back(self, lane: Hashable, found: _Lane, before: frozenset[int]) -> None:
        """After eager work on a pool: give the pool up if something is left in it, which replays would overwrite."""
        if cuda_memory.blocks_in_use(found.pool) <= before:
            return
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.empty(1, device=self._device)  # Has the allocator look at what other streams have used.
        if cuda_memory.blocks_in_use(found.pool) <= before:
            return
        self._lends_pools = False
        for recording, own in list(self._recordings.items()):
            if own is found:
                recording.close()
        self._lanes.pop(lane)
        found.anchor.reset()  # What is left keeps its memory; the rest of the pool is free now.
        torch.cuda.empty_cache()

    def borrowed_view(self, tensor: Tensor) -> Tensor:
        """A detached tensor over the same memory that does not keep it from the pool."""
        return torch_private.borrowed_cuda_view(tensor)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait for launched work, close all recordings, then let go of the pool.

        Raises:
            LifecycleError: a capture is under way.
        """
        if self._capturing_thread is not None:
            raise LifecycleError("the engine is capturing", fix="close it after the capture")
        if self._is_closed:
            return
        self._is_closed = True
        torch.cuda.synchronize(self._device)
        for recording in list(self._recordings):
            recording.close()
        for lane in (*self._lanes.values(), *self._spoilt):
            lane.anchor.reset()
        self._lanes.clear()
        self._spoilt.clear()
        if self._memset_kernels is not None:
            self._memset_kernels.close()
        self._marks.clear()


def _explain(error: Exception) -> CaptureError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    frame = user_line_of(error)
    last = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
    fix = "keep values on the device (no .item(), .cpu(), printing or data-dependent shapes) and create tensors on it"
    if "generator" in text.lower() or "offset increment" in text.lower():
        fix = "pass the generator to the capture (generators=...), and seed before the captured call"
    elif frame is None:
        fix = (
            "look for work on other streams that does not join the capture stream, or an event from before the capture"
        )
    where = str(frame) if frame else (f"{last[0].filename}:{last[0].lineno}" if last else "")
    return CaptureError(f"the GPU refused to capture this: {text}", where=where, fix=fix)
