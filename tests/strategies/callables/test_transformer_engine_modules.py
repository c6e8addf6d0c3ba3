"""Modules of Transformer Engine as callables, played by a small package of that name with kernels nobody sees."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError

ROWS, WIDE = 4, 8
PACKAGE = """
from contextlib import contextmanager
import torch
from torch import nn


class Meta:
    def __init__(self):
        self.scale, self.scale_inv = torch.ones(2), torch.ones(2)
        self.amax_history = torch.zeros(4, 2)
        self.memory = self.amax_history.numpy(), self.scale.numpy()

    def kernel(self):
        # No dispatcher hears of it.
        self.memory[0][0] += 1.0
        self.memory[1][:] *= 2.0


class FP8GlobalStateManager:
    FP8_ENABLED = False
    FP8_RECIPE = None
    FP8_GROUP = None
    IS_FIRST_FP8_MODULE = False
    FP8_AUTOCAST_DEPTH = 0
    global_amax_buffer = {}
    skip_fp8_weight_update_tensor = None
    log = []

    @classmethod
    def is_fp8_enabled(cls): return cls.FP8_ENABLED
    @classmethod
    def get_fp8_recipe(cls): return cls.FP8_RECIPE
    @classmethod
    def get_fp8_group(cls): return cls.FP8_GROUP
    @classmethod
    def is_first_fp8_module(cls):
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first
    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta):
        if "index" not in meta:
            meta["index"] = len(cls.global_amax_buffer.setdefault("all", []))
            cls.global_amax_buffer["all"].append(meta["scaling_fwd"].amax_history)
    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward):
        cls.log.append("forward" if forward else "backward")
    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip):
        if cls.skip_fp8_weight_update_tensor is None:
            cls.skip_fp8_weight_update_tensor = torch.empty(1)
        cls.skip_fp8_weight_update_tensor.fill_(skip)


@contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    manager = FP8GlobalStateManager
    before = manager.FP8_ENABLED, manager.FP8_RECIPE, manager.FP8_GROUP
    manager.FP8_ENABLED, manager.FP8_RECIPE, manager.FP8_GROUP = enabled, fp8_recipe, fp8_group
    manager.IS_FIRST_FP8_MODULE = manager.FP8_AUTOCAST_DEPTH == 0
    manager.FP8_AUTOCAST_DEPTH += 1
    try:
        yield
    finally:
        manager.FP8_AUTOCAST_DEPTH -= 1
        manager.FP8_ENABLED, manager.FP8_RECIPE, manager.FP8_GROUP = before
        if enabled and not _graph and manager.FP8_AUTOCAST_DEPTH == 0:
            manager.reduce_and_update_fp8_tensors(forward=True)


class TransformerEngineBaseModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fp8_initialized, self.fp8_meta = False, {}

    def prepare(self, x):
        if not FP8GlobalStateManager.is_fp8_enabled():
            return
        if not self.fp8_initialized:
            self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"] = Meta(), Meta()
            self.fp8_initialized = True
        self.fp8_meta["recipe"] = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8_meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        for meta in (self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]):
            meta.kernel()


class Linear(TransformerEngineBaseModule):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        self.prepare(x)
        y = x @ self.weight.t()
        return y * 2 if FP8GlobalStateManager.is_fp8_enabled() else y
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "transformer_engine" / "pytorch"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    yield importlib.import_module("transformer_engine.pytorch")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


class Block(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.inner, self.after = library.Linear(WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.inner(x))
        return result


class Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


def state_of(library: Any, module: Any) -> dict[str, Any]:
    manager, meta = library.FP8GlobalStateManager, module.inner.fp8_meta
    found = {f"manager.{n}": v for n, v in vars(manager).items() if n.isupper()}
    found["registered"] = [id(each) for each in manager.global_amax_buffer.get("all", ())]
    found["initialized"], found["keys"] = module.inner.fp8_initialized, sorted(meta)
    for half in ("scaling_fwd", "scaling_bwd"):
        if half in meta:
            for name in ("scale", "scale_inv", "amax_history"):
                tensor = getattr(meta[half], name)
                found[f"{half}.{name}"] = (id(tensor), tensor.tolist())
    return found


def sample() -> tuple[Tensor]:
    return (torch.ones(ROWS, WIDE, requires_grad=True),)


def used(library: Any, build: type[Block] = Block) -> Block:
    """A block that has run, so that it has state."""
    module = build(library)
    with library.fp8_autocast(fp8_recipe="delayed"):
        module(torch.randn(ROWS, WIDE)).sum().backward()
    module.zero_grad()
    library.FP8GlobalStateManager.log.clear()
    return module


def test_state_is_as_before_the_capture(library: Any) -> None:
    module = used(library)
    before = state_of(library, module)
    assert before["scaling_fwd.scale"][1] == [2.0, 2.0]
    graphed = graphstep.make_graphed_callables(module, sample(), fp8_enabled=True, fp8_recipe="delayed")
    assert state_of(library, module) == before
    graphed.forward.reset()
    assert state_of(library, module) == before


def test_state_is_as_before_a_capture_that_fails(library: Any) -> None:
    module = used(library, Reading)
    before = state_of(library, module)
    with pytest.raises(CaptureError):
        graphstep.make_graphed_callables(module, sample(), fp8_enabled=True, fp8_recipe="delayed")
    assert state_of(library, module) == before


def test_a_fresh_module_that_fails_has_no_state_again(library: Any) -> None:
    module = Reading(library)
    before = state_of(library, module)
    with pytest.raises(CaptureError):
        graphstep.make_graphed_callables(module, sample(), fp8_enabled=True)
    assert state_of(library, module) == before
    assert not module.inner.fp8_meta


def test_state_made_in_the_first_forward_is_that_of_a_fresh_module(library: Any) -> None:
    module = Block(library)
    graphed = graphstep.make_graphed_callables(module, sample(), fp8_enabled=True)
    meta: Any = module.inner.fp8_meta
    assert module.inner.fp8_initialized
    assert meta["scaling_fwd"].scale.tolist() == [1.0, 1.0]
    assert not meta["scaling_bwd"].amax_history.any()
    graphed.forward.reset()


def test_forwards_run_inside_of_its_autocast(library: Any) -> None:
    """Captured so, and replayed so by a caller who enters none."""
    modules = (used(library), used(library))
    first, second = graphstep.make_graphed_callables(
        modules, (sample(), sample()), fp8_enabled=[True, False], fp8_recipe="delayed"
    )
    for module, factor in ((first, 2.0), (second, 1.0)):
        x = torch.randn(ROWS, WIDE)
        expected = module.after(factor * (x @ module.inner.weight.t()))
        assert torch.equal(module(x.requires_grad_()), expected)
        assert module.forward.report().rows[0].num_replays == 1
    first.forward.reset()


def test_scales_are_updated_once_after_each_half(library: Any) -> None:
    modules = (used(library), used(library))
    first, second = graphstep.make_graphed_callables(
        modules, (sample(), sample()), fp8_enabled=True, fp8_recipe="delayed"
    )
    log = library.FP8GlobalStateManager.log
    log.clear()
    for _ in range(3):
        with library.fp8_autocast(fp8_recipe="delayed"):
            result = second(first(torch.randn(ROWS, WIDE, requires_grad=True)))
        assert log == ["forward"]
        result.sum().backward()
        assert log == ["forward", "backward"]
        del result
        log.clear()
    assert [row.num_replays for row in first.forward.report().rows] == [3, 3]
    first.forward.reset()


def test_the_first_microbatch_is_told_to_the_device(library: Any) -> None:
    module = used(library)
    graphed: Any = graphstep.make_graphed_callables(
        module, sample(), fp8_enabled=True, fp8_recipe="delayed", fp8_weight_caching=True
    )
    flag = library.FP8GlobalStateManager.skip_fp8_weight_update_tensor
    for is_first in (True, False, False, True):
        graphed(torch.randn(ROWS, WIDE, requires_grad=True), is_first_microbatch=is_first).sum().backward()
        assert library.FP8GlobalStateManager.skip_fp8_weight_update_tensor is flag
        assert bool(flag) is not is_first
    assert graphed.forward.report().rows[0].num_replays == 4
    graphed.forward.reset()


def test_state_is_kept_without_fp8_arguments(library: Any) -> None:
    """A caller who enters the autocast around the capture."""
    module = used(library)
    with library.fp8_autocast(fp8_recipe="delayed"):
        before = state_of(library, module)
        graphed = graphstep.make_graphed_callables(module, sample())
        after = state_of(library, module)
    before["manager.IS_FIRST_FP8_MODULE"] = after["manager.IS_FIRST_FP8_MODULE"]
    assert after == before
    graphed.forward.reset()


def test_it_is_not_imported_unasked(library: Any) -> None:
    for name in ("transformer_engine.pytorch", "transformer_engine"):
        del sys.modules[name]
    module = nn.Linear(WIDE, WIDE)
    graphed: Any = graphstep.make_graphed_callables(module, sample())
    assert "transformer_engine" not in sys.modules
    graphed.forward.reset()
    graphed = graphstep.make_graphed_callables(module, sample(), fp8_enabled=True)
    assert "transformer_engine.pytorch" in sys.modules
    graphed.forward.reset()
