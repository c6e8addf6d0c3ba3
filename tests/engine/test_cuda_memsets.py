"""Kernels in the place of memsets write the same, at the same point of the order; what cannot be replaced stays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphstep.engine.cuda import CudaEngine
from graphstep.engine.cuda_driver import driver
from graphstep.engine.cuda_memsets import PTX, MemsetKernels, memset_kernels, pattern_of

MEMSET, KERNEL = 2, 0


@pytest.mark.parametrize(
    ("value", "element_size", "pattern"),
    [(0, 1, 0), (0xAB, 1, 0xABABABAB), (0x1FF, 1, 0xFFFFFFFF), (0x1234, 2, 0x12341234), (0xDEADBEEF, 4, 0xDEADBEEF)],
)
def test_pattern(value: int, element_size: int, pattern: int) -> None:
    assert pattern_of(value, element_size) == pattern


# ----- on any machine, against a driver that keeps graphs in dictionaries


class Driver:
    """Graphs of nodes with numbers: kind, parameters, what comes before."""

    def __init__(self) -> None:
        self.nodes: dict[int, dict[str, Any]] = {}
        self.refuses: set[str] = set()
        self.is_loaded = False

    def add(self, kind: int, before: tuple[int, ...] = (), **params: Any) -> int:
        number = 100 + max(self.nodes, default=0)
        self.nodes[number] = {"kind": kind, "before": list(before), **params}
        return number

    def after(self, node: int) -> list[int]:
        return [number for number, each in self.nodes.items() if node in each["before"]]

    def kinds(self) -> list[int]:
        return [each["kind"] for each in self.nodes.values()]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or f"without {name}" in self.refuses:
            raise AttributeError(name)
        return lambda *args: 1 if name in self.refuses else getattr(self, f"_{name}")(*args)

    def _cuModuleLoadData(self, module: Any, text: Any) -> int:
        assert text.value.decode() == PTX
        module._obj.value, self.is_loaded = 7, True
        return 0

    def _cuModuleUnload(self, module: Any) -> int:
        self.is_loaded = False
        return 0

    def _cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = int(name.removeprefix(b"fill"))
        return 0

    def _cuGraphGetNodes(self, graph: Any, found: Any, number: Any) -> int:
        return self._tell(list(self.nodes), found, number)

    def _cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value]["kind"]
        return 0

    def _cuGraphMemsetNodeGetParams(self, node: Any, params: Any) -> int:
        for name in ("start", "pitch", "value", "element_size", "width", "height"):
            setattr(params._obj, name, self.nodes[node.value].get(name, 1))
        return 0

    def _cuGraphNodeGetDependencies(self, node: Any, found: Any, number: Any) -> int:
        return self._tell(self.nodes[node.value]["before"], found, number)

    def _cuGraphNodeGetDependentNodes(self, node: Any, found: Any, number: Any) -> int:
        return self._tell(self.after(node.value), found, number)

    def _cuGraphAddKernelNode(self, made: Any, graph: Any, before: Any, number: Any, params: Any) -> int:
        own = params._obj
        kinds = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        start, pattern, count = (
            ctypes.cast(own.arguments[i], ctypes.POINTER(kind)).contents.value for i, kind in enumerate(kinds)
        )
        made._obj.value = self.add(
            KERNEL,
            tuple(before[i] for i in range(number.value)),
            size=own.function,
            writes=(start, pattern, count),
            threads=own.grid_x * own.block_x,
        )
        return 0

    def _cuGraphAddDependencies(self, graph: Any, sources: Any, targets: Any, number: Any) -> int:
        for i in range(number.value):
            self.nodes[targets[i]]["before"].append(sources[i])
        return 0

    def _cuGraphDestroyNode(self, node: Any) -> int:
        del self.nodes[node.value]
        for each in self.nodes.values():
            each["before"] = [number for number in each["before"] if number != node.value]
        return 0

    @staticmethod
    def _tell(nodes: list[int], found: Any, number: Any) -> int:
        if found is not None:
            found[: len(nodes)] = nodes
        number._obj.value = len(nodes)
        return 0


def diamond(**params: Any) -> tuple[Driver, list[int]]:
    """Two kernels, a memset after both, and two kernels after that."""
    library = Driver()
    first = [library.add(KERNEL), library.add(KERNEL)]
    memset = library.add(MEMSET, tuple(first), **{"height": 1, **params})
    last = [library.add(KERNEL, (memset,)), library.add(KERNEL, (memset, first[0]))]
    return library, [*first, memset, *last]


@pytest.mark.parametrize(
    ("params", "size", "writes"),
    [
        ({"start": 64, "value": 0, "element_size": 1, "width": 4096}, 16, (64, 0, 256)),
        ({"start": 64, "value": 0x7F, "element_size": 1, "width": 20}, 4, (64, 0x7F7F7F7F, 5)),
        ({"start": 65, "value": 3, "element_size": 1, "width": 20}, 1, (65, 0x03030303, 20)),
        ({"start": 66, "value": 0x0102, "element_size": 2, "width": 1}, 2, (66, 0x01020102, 1)),
        ({"start": 66, "value": 0x0102, "element_size": 1, "width": 8}, 2, (66, 0x02020202, 4)),
        ({"start": 64, "value": 0x0102, "element_size": 2, "width": 8}, 16, (64, 0x01020102, 1)),
        ({"start": 4, "value": 9, "element_size": 4, "width": 3}, 4, (4, 9, 3)),
        ({"start": 64, "value": 0, "element_size": 1, "width": 4, "height": 2}, None, ()),
        ({"start": 64, "value": 0, "element_size": 4, "width": 2**26}, None, ()),
    ],
)
def test_a_memset_in_the_middle(params: dict[str, Any], size: int | None, writes: tuple[int, ...]) -> None:
    library, (first, second, memset, third, fourth) = diamond(**params)
    kernels = MemsetKernels(library)
    number = kernels.replace_in(1)
    if size is None:
        assert number == 0
        assert library.nodes[memset]["kind"] == MEMSET
        assert library.after(memset) == [third, fourth]
        return
    assert number == 1
    assert MEMSET not in library.kinds()
    (made,) = (node for node, each in library.nodes.items() if "writes" in each)
    assert (library.nodes[made]["size"], library.nodes[made]["writes"]) == (size, writes)
    assert library.nodes[made]["before"] == [first, second]
    assert sorted(library.after(made)) == [third, fourth]
    assert library.nodes[fourth]["before"] == [first, made]
    assert library.nodes[made]["threads"] >= min(writes[2], 1024 * 256)
    kernels.close()
    assert not library.is_loaded


@pytest.mark.parametrize(
    "refusal",
    [
        *("cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams", "cuGraphNodeGetDependencies"),
        *("cuGraphNodeGetDependentNodes", "cuGraphAddKernelNode", "cuGraphAddDependencies"),
    ],
)
def test_where_the_driver_refuses_the_graph_stays(refusal: str) -> None:
    library, _ = diamond(start=64, value=0, element_size=1, width=64)
    before = {number: {**each, "before": list(each["before"])} for number, each in library.nodes.items()}
    kernels = MemsetKernels(library)
    library.refuses.add(refusal)
    assert kernels.replace_in(1) == 0
    assert library.nodes == before


@pytest.mark.parametrize("refusal", ["cuModuleLoadData", "cuModuleGetFunction", "without cuGraphDestroyNode"])
def test_drivers_without_what_it_takes(refusal: str) -> None:
    library = Driver()
    library.refuses.add(refusal)
    with pytest.raises(OSError, match=r"the driver"):
        MemsetKernels(library)


def test_an_empty_graph() -> None:
    assert MemsetKernels(Driver()).replace_in(1) == 0


# ----- on a GPU


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    made = CudaEngine()
    yield made
    made.close()


def kinds_in(engine: CudaEngine, recording: Any) -> list[int]:
    library, number = driver(), ctypes.c_size_t()
    handle = ctypes.c_void_p(recording._graph.raw_cuda_graph())
    assert library.cuGraphGetNodes(handle, None, ctypes.byref(number)) == 0
    nodes = (ctypes.c_void_p * number.value)()
    assert library.cuGraphGetNodes(handle, nodes, ctypes.byref(number)) == 0
    found = []
    for node in nodes:
        kind = ctypes.c_int()
        assert library.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        found.append(kind.value)
    return found


@pytest.mark.gpu
def test_the_driver_takes_the_kernels() -> None:
    kernels = memset_kernels(torch.device("cuda", 0))
    assert kernels is not None
    kernels.close()


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 15, 16, 17, 64, 4096, 100_003, 2**20, 5 * 2**20 + 4])
def test_bytes_equal_those_of_memsets(engine: CudaEngine, first: int, number: int) -> None:
    """Each value, each size of element, each alignment; nothing beside is touched, and the order is kept."""
    library = driver()
    for size, call in ((1, "cuMemsetD8Async"), (2, "cuMemsetD16Async"), (4, "cuMemsetD32Async")):
        if first % size or number % size:
            continue
        found = torch.zeros(first + number + 32, dtype=torch.uint8, device="cuda")
        expected, value = found.clone(), {1: 0xA5, 2: 0x8001, 4: 0x12345678}[size]

        def fill(into: torch.Tensor, call: str = call, size: int = size, value: int = value) -> torch.Tensor:
            into.fill_(7)
            start = ctypes.c_uint64(into.data_ptr() + first)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            amount = ctypes.c_size_t(number // size)
            assert getattr(library, call)(start, ctypes.c_uint(value), amount, stream) == 0
            return into.add(1)

        recording = engine.capture(lambda fill=fill, found=found: fill(found))
        assert MEMSET not in kinds_in(engine, recording)
        recording.replay()
        after = fill(expected)
        assert torch.equal(found, expected)
        assert torch.equal(recording.result, after)


@pytest.mark.gpu
def test_large_memsets_stay(engine: CudaEngine) -> None:
    tensor, library = torch.ones(2**25, device="cuda"), driver()

    def zero() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        start, amount = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        assert library.cuMemsetD32Async(start, ctypes.c_uint(0), amount, stream) == 0

    recording = engine.capture(zero)
    assert MEMSET in kinds_in(engine, recording)
    recording.replay()
    assert not tensor.any()


@pytest.mark.gpu
def test_reductions_and_attention_have_none_left(engine: CudaEngine) -> None:
    """What torch and cuDNN zero for themselves, forward and backward, on a branch of the graph as well."""
    x = torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def run() -> torch.Tensor:
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        y.square().sum().backward()
        return y.detach().flatten(0, -2).sum(0)

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    recording = engine.capture(run)
    assert MEMSET not in kinds_in(engine, recording)
    x.grad.zero_()
    for _ in range(3):
        recording.replay()
    after = x.grad.clone()
    x.grad.zero_()
    for _ in range(3):
        expected = run()
    torch.testing.assert_close(recording.result, expected)
    torch.testing.assert_close(after, x.grad)
