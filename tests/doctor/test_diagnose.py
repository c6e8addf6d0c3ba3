"""``graphstep.diagnose``: targets, severities, and what is left behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphstep
from graphstep.doctor import Diagnosis, Effect, Severity


def batches() -> list[torch.Tensor]:
    return [torch.randn(8, 4) for _ in range(4)]


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


def here(diagnosis: Diagnosis) -> list[str]:
    """The text of the lines, all of which are in this file."""
    assert {Path(finding.where.file).name for finding in diagnosis.findings} <= {Path(__file__).name}
    return [finding.where.text for finding in diagnosis.findings]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


def test_module_stands_for_forward_and_backward() -> None:
    diagnosis = graphstep.diagnose(Counting(), batches())
    assert codes(diagnosis) == ["GS-Y001"]
    assert here(diagnosis) == ["self.calls += 1"]


def test_class_of_modules_is_built() -> None:
    assert codes(graphstep.diagnose(Counting, batches())) == ["GS-Y001"]


def test_graphed_step_is_looked_through() -> None:
    layer = nn.Linear(4, 4)

    @graphstep.graph_step
    def step(x: torch.Tensor) -> float:
        return layer(x).sum().item()

    diagnosis = graphstep.diagnose(step, batches())
    assert codes(diagnosis) == ["GS-H001"]
    assert step.session.engine.pool_bytes == 0


def test_finding_is_reported_once_with_its_number() -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> list[float]:
        return [layer(x).sum().item() for _ in range(5)]

    (finding,) = graphstep.diagnose(step, batches(), num_runs=2).findings
    assert finding.num_times == 10
    assert (finding.severity, finding.effect, finding.part) == (Severity.error, Effect.capture_fails, "forward")


def test_parts_of_a_step_are_told_apart() -> None:
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda gradient: gradient * gradient.max().item())
    optimizer = torch.optim.AdamW(layer.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(x / x.max().item()).sum().backward()
        optimizer.step()

    found = {(f.code, f.part) for f in graphstep.diagnose(step, batches()).findings}
    assert found == {("GS-H001", "forward"), ("GS-H001", "backward"), ("GS-O001", "optimizer")}


def test_worst_comes_first() -> None:
    layer, scratch = nn.Linear(4, 4), torch.zeros(4)

    def step(x: torch.Tensor) -> float:
        scratch.add_(1)
        print("working")
        return layer(x).sum().item()

    found = graphstep.diagnose(step, batches())
    assert [finding.severity for finding in found.findings] == [Severity.error, Severity.warning, Severity.note]
    assert found.counts() == {Severity.error: 1, Severity.warning: 1, Severity.note: 1}


def test_branch_that_did_not_run_is_a_warning() -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> Any:
        if x.shape[0] > 1000:
            return layer(x).sum().item()
        return None

    (finding,) = graphstep.diagnose(step, batches()).findings
    assert (finding.code, finding.severity, finding.has_run) == ("GS-H001", Severity.warning, False)


def test_method_that_only_looks_like_a_read_is_none() -> None:
    class Box:
        def item(self) -> int:
            return 3

        def cpu(self) -> Box:
            return self

    layer, box = nn.Linear(4, 4), Box()

    def step(x: torch.Tensor) -> None:
        (layer(x) * box.cpu().item()).sum().backward()

    assert codes(graphstep.diagnose(step, batches())) == []


def test_lazy_set_up_in_the_first_call_is_none() -> None:
    layer, made = nn.Linear(4, 4), {}

    def step(x: torch.Tensor) -> None:
        if "scale" not in made:
            made["scale"] = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        (layer(x) * made["scale"]).sum().backward()

    assert [f.code for f in graphstep.diagnose(step, batches()).findings if f.has_run] == []


def test_line_of_a_library_is_told_beside_the_own_one() -> None:
    rich = pytest.importorskip("rich.pretty")
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> str:
        return str(rich.pretty_repr(layer(x)))

    (finding,) = graphstep.diagnose(step, batches()).findings
    assert finding.code == "GS-H003"
    assert finding.where.text == "return str(rich.pretty_repr(layer(x)))"
    assert "in rich/pretty.py:" in finding.detail


def test_written_buffers_are_listed() -> None:
    norm = nn.BatchNorm1d(4)
    diagnosis = graphstep.diagnose(norm, batches())
    assert diagnosis.findings == ()
    assert {name.rpartition(".")[2] for name in diagnosis.written_buffers} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_default_device_is_a_device() -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        (layer(x) + torch.arange(4)).sum().backward()

    assert codes(graphstep.diagnose(step, batches())) == ["GS-T002"]
    torch.set_default_device("cpu")
    try:
        assert codes(graphstep.diagnose(step, batches())) == []
    finally:
        torch.set_default_device(None)


def test_loader_with_whole_batches_is_right() -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        layer(x).sum().backward()

    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, pin_memory=True)
    assert codes(graphstep.diagnose(step, loader)) == []
    loader = DataLoader(TensorDataset(torch.randn(33, 4)), batch_size=8, pin_memory=True)
    (finding,) = graphstep.diagnose(step, loader).findings
    assert (finding.code, finding.part) == ("GS-D002", "data")
    assert "1 of 33" in finding.detail


def test_expandable_segments_matter_with_collectives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    path = Path(__file__).parent / "catalogue" / "right" / "mlp.py"
    from tests.doctor.programs import diagnosis_of

    assert codes(diagnosis_of(path)) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    (finding,) = diagnosis_of(path).findings
    assert (finding.code, finding.where.line) == ("GS-E001", 0)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert codes(diagnosis_of(path)) == []


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(graphstep.ConfigError, match="num_runs is 1"):
        graphstep.diagnose(Counting(), batches(), num_runs=1)


def test_step_that_fails_is_refused_with_its_line() -> None:
    def step(x: torch.Tensor) -> None:
        raise LookupError("nothing there")

    with pytest.raises(graphstep.UserInputError, match="LookupError: nothing there") as caught:
        graphstep.diagnose(step, batches())
    assert 'raise LookupError("nothing there")' in str(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_process_is_left_as_it_was(fails: bool) -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        if fails:
            raise ValueError

    tracer, profiler, capturing = sys.gettrace(), sys.getprofile(), torch.cuda.is_current_stream_capturing
    waits = torch.cuda.synchronize, torch.cuda.Stream
    hooks = [dict(each) for each in global_hooks()]
    try:
        graphstep.diagnose(step, batches())
    except graphstep.UserInputError:
        assert fails
    assert (sys.gettrace(), sys.getprofile()) == (tracer, profiler)
    assert torch.cuda.is_current_stream_capturing is capturing
    assert [dict(each) for each in global_hooks()] == hooks
    assert (torch.cuda.synchronize, torch.cuda.Stream) == waits
    assert not torch.is_anomaly_enabled()
    assert torch.autograd.is_multithreading_enabled() if hasattr(torch.autograd, "is_multithreading_enabled") else True


def global_hooks() -> tuple[Any, ...]:
    from graphstep.engine import torch_private

    return torch_private.global_module_hooks()


def test_two_looks_do_not_notice_each_other() -> None:
    def look(step: Callable[..., Any]) -> list[str]:
        return codes(graphstep.diagnose(step, batches()))

    layer = nn.Linear(4, 4)

    def inner(x: torch.Tensor) -> None:
        layer(x).sum().backward()

    def reads(x: torch.Tensor) -> float:
        return layer(x).sum().item()

    assert look(reads) == ["GS-H001"]
    assert look(inner) == []
    assert look(reads) == ["GS-H001"]


def test_memory_of_the_runs_is_given_back() -> None:
    layer = nn.Linear(4, 4)
    kept: list[Any] = []

    def step(x: torch.Tensor) -> None:
        y = layer(x)
        y.sum().backward()
        kept[:] = [__import__("weakref").ref(y)]

    graphstep.diagnose(step, batches())
    gc.collect()
    assert kept[0]() is None


def test_libraries_are_told_that_this_is_a_capture_but_optimizers_are_not() -> None:
    layer, told = nn.Linear(4, 4), dict[str, bool]()

    def is_told() -> bool:
        asked: Any = torch.cuda.is_current_stream_capturing
        return hasattr(asked, "is_inside") and asked.is_inside()

    class Asking(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            told["step"] = is_told()

    optimizer = Asking(layer.parameters(), {})

    def step(x: torch.Tensor) -> None:
        told["forward"] = is_told()
        layer(x).sum().backward()
        optimizer.step()

    graphstep.diagnose(step, batches())
    assert told == {"forward": True, "step": False}


class Settling(nn.Module):
    """Changes once more after its first call, as DistributedDataParallel does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_seen = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_seen = min(self.num_seen + 1, 2)
        return self.layer(x)


def test_what_settles_is_none() -> None:
    assert codes(graphstep.diagnose(Settling(), batches())) == []


def test_data_parallel_training(tmp_path: Path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))

        def step(x: torch.Tensor) -> None:
            model(x).sum().backward()

        def waits(x: torch.Tensor) -> None:
            model(x).sum().backward()
            dist.barrier()

        assert codes(graphstep.diagnose(step, batches())) == []
        (finding,) = graphstep.diagnose(waits, batches()).findings
        assert (finding.code, finding.where.text) == ("GS-H010", "dist.barrier()")
    finally:
        dist.destroy_process_group()
