"""Memsets of a captured graph, made by a kernel: the GPU waits some microseconds before and after a memset node.

Libraries zero counters and accumulators with memsets: cuDNN's attention does, and so do torch's large reductions.
Between kernels of a graph they cost 5 to 8 microseconds each on an H200, where a kernel that writes the same costs 2.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from graphstep.engine.cuda_driver import driver

_MEMSET_NODE: Final = 2
"""``CU_GRAPH_NODE_TYPE_MEMSET``."""
_MOST_BYTES: Final = 64 * 2**20
"""Larger ones take so long that the wait does not count."""
_THREADS: Final = 256
_MOST_BLOCKS: Final = 1024

_ENTRY: Final = """
.visible .entry fill{size}(.param .u64 start, .param .u32 pattern, .param .u64 count)
{{
    .reg .pred %last;
    .reg .b32 %v, %block, %threads, %thread, %blocks;
    .reg .b16 %half;
    .reg .b64 %to, %n, %i, %first, %step;
    ld.param.u64 %to, [start];
    ld.param.u32 %v, [pattern];
    ld.param.u64 %n, [count];
    cvta.to.global.u64 %to, %to;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    cvt.u64.u32 %first, %thread;
    mad.wide.u32 %i, %block, %threads, %first;
    mul.wide.u32 %step, %blocks, %threads;
NEXT:
    setp.ge.u64 %last, %i, %n;
    @%last bra DONE;
    mad.lo.u64 %first, %i, {size}, %to;
    {store}
    add.u64 %i, %i, %step;
    bra NEXT;
DONE:
    ret;
}}
"""
_STORES: Final = {
    16: "st.global.v4.u32 [%first], {%v, %v, %v, %v};",
    4: "st.global.u32 [%first], %v;",
    2: "cvt.u16.u32 %half, %v; st.global.u16 [%first], %half;",
    1: "st.global.u8 [%first], %v;",
}
PTX: Final = ".version 6.0\n.target sm_50\n.address_size 64\n" + "".join(
    _ENTRY.format(size=size, store=store) for size, store in _STORES.items()
)
"""One kernel a size of store: the driver compiles it for the GPU that it finds."""


class _MemsetParams(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _KernelParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS`` of the first version."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((f"{kind}_{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
    )


_NEEDED: Final = (
    *("cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuGraphGetNodes", "cuGraphNodeGetType"),
    *("cuGraphMemsetNodeGetParams", "cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes"),
    *("cuGraphAddKernelNode", "cuGraphAddDependencies", "cuGraphDestroyNode"),
)


class MemsetKernels:
    """Kernels that write what memsets write, on the current device; and what puts them into graphs.

    Args:
        library: the driver's.

    Raises:
        OSError: the driver lacks something, or does not take the kernels.
    """

    def __init__(self, library: Any) -> None:
        missing = [name for name in _NEEDED if getattr(library, name, None) is None]
        if missing:
            raise OSError(f"the driver lacks {', '.join(missing)}")
        self._driver = library
        self._module = ctypes.c_void_p()
        if library.cuModuleLoadData(ctypes.byref(self._module), ctypes.c_char_p(PTX.encode())):
            raise OSError("the driver does not take the kernels")
        self._functions: dict[int, ctypes.c_void_p] = {}
        for size in _STORES:
            function = ctypes.c_void_p()
            if library.cuModuleGetFunction(ctypes.byref(function), self._module, f"fill{size}".encode()):
                raise OSError(f"the driver does not find fill{size}")
            self._functions[size] = function

    def close(self) -> None:
        """Unload them. Graphs that launch them are gone by then."""
        self._driver.cuModuleUnload(self._module)

    def replace_in(self, graph: int) -> int:
        """Put kernels in the place of memsets: same memory, same values, same order.

        A node that cannot be replaced stays: one of two dimensions, or where the driver refuses.

        Args:
            graph: handle of one that is captured and not yet instantiated.

        Returns:
            How many were replaced.
        """
        number = ctypes.c_size_t()
        handle = ctypes.c_void_p(graph)
        if self._driver.cuGraphGetNodes(handle, None, ctypes.byref(number)) or not number.value:
            return 0
        nodes = (ctypes.c_void_p * number.value)()
        if self._driver.cuGraphGetNodes(handle, nodes, ctypes.byref(number)):
            return 0
        memsets = [node for node in nodes if node is not None and self._kind_of(node) == _MEMSET_NODE]
        return sum(self._replace(handle, ctypes.c_void_p(node)) for node in memsets)

    def _kind_of(self, node: int) -> int:
        kind = ctypes.c_int(-1)
        failed = self._driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        return -1 if failed else int(kind.value)

    def _replace(self, graph: ctypes.c_void_p, node: ctypes.c_void_p) -> bool:
        memset = _MemsetParams()
        if self._driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(memset)) or memset.height != 1:
            return False
        before = self._neighbours(self._driver.cuGraphNodeGetDependencies, node)
        after = self._neighbours(self._driver.cuGraphNodeGetDependentNodes, node)
        num_bytes = memset.width * memset.element_size
        if before is None or after is None or memset.element_size not in (1, 2, 4) or not 0 < num_bytes <= _MOST_BYTES:
            return False
        size = next(size for size in _STORES if memset.start % size == 0 and num_bytes % size == 0)
        made = self._add(graph, before, size, num_bytes // size, memset)
        if made is None:
            return False
        sources = (ctypes.c_void_p * len(after))(*[made.value] * len(after))
        if after and self._driver.cuGraphAddDependencies(graph, sources, after, ctypes.c_size_t(len(after))):
            self._driver.cuGraphDestroyNode(made)
            return False
        self._driver.cuGraphDestroyNode(node)
        return True

    def _neighbours(self, ask: Any, node: ctypes.c_void_p) -> Any:
        """An array of nodes; ``None`` where the driver does not tell, as for edges that are more than an order."""
        number = ctypes.c_size_t()
        if ask(node, None, ctypes.byref(number)):
            return None
        found = (ctypes.c_void_p * number.value)()
        return None if number.value and ask(node, found, ctypes.byref(number)) else found

    def _add(
        self, graph: ctypes.c_void_p, before: Any, size: int, count: int, memset: _MemsetParams
    ) -> ctypes.c_void_p | None:
        start, number = ctypes.c_uint64(memset.start), ctypes.c_uint64(count)
        pattern = ctypes.c_uint32(pattern_of(memset.value, memset.element_size))
        arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in (start, pattern, number)))
        blocks = min(-(-count // _THREADS), _MOST_BLOCKS)
        params = _KernelParams(self._functions[size], blocks, 1, 1, _THREADS, 1, 1, 0, arguments, None)
        made = ctypes.c_void_p()
        failed = self._driver.cuGraphAddKernelNode(
            ctypes.byref(made), graph, before, ctypes.c_size_t(len(before)), ctypes.byref(params)
        )
        return None if failed else made


def memset_kernels(device: torch.device) -> MemsetKernels | None:
    """The kernels for a device; ``None`` where the driver does not take them, or torch keeps graphs to itself."""
    library = driver()
    if library is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return None
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # The first call to a device makes the context that modules are loaded into.
        try:
            return MemsetKernels(library)
        except OSError:
            return None


def pattern_of(value: int, element_size: int) -> int:
    """Four bytes of what a memset writes with elements of 1, 2 or 4 bytes."""
    repeated = {1: 0x01010101, 2: 0x00010001, 4: 1}[element_size]
    mask: int = (1 << 8 * element_size) - 1
    return (value & mask) * repeated
