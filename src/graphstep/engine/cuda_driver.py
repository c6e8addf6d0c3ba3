"""Questions and orders to the CUDA driver that torch does not pass on: the state of a stream's capture."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``."""


def driver() -> Any:
    """The library of the driver, or ``None``."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def capturing_node_count(stream: torch.cuda.Stream) -> int | None:
    """Nodes captured so far on a capturing stream, or ``None`` where the driver does not tell."""
    library = driver()
    capture_info = getattr(library, "cuStreamGetCaptureInfo_v2", None)
    graph_nodes = getattr(library, "cuGraphGetNodes", None)
    if capture_info is None or graph_nodes is None:
        return None
    status, capture_id, graph, num_nodes = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
    handle = ctypes.c_void_p(stream.cuda_stream)
    failed = capture_info(handle, ctypes.byref(status), ctypes.byref(capture_id), ctypes.byref(graph), None, None)
    if failed or not graph.value or graph_nodes(graph, None, ctypes.byref(num_nodes)):
        return None
    return int(num_nodes.value)


def restart_capture(stream: torch.cuda.Stream) -> bool:
    """End the capture of a stream, broken or not, and begin an empty one in its place.

    ``CUDAGraph.capture_end`` asks the driver first and fails on a broken capture before it has undone what
    ``capture_begin`` set up in the allocators; given an empty capture instead, it can. Returns whether that worked.
    """
    library = driver()
    end, begin = getattr(library, "cuStreamEndCapture", None), getattr(library, "cuStreamBeginCapture_v2", None)
    if end is None or begin is None:
        return False
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    end(handle, ctypes.byref(graph))  # Fails on a broken capture, and ends it all the same.
    if graph.value:
        library.cuGraphDestroy(graph)
    return bool(begin(handle, _THREAD_LOCAL) == 0)
