"""How long does a training step of a model of transformers take: eager, attached, as one graph?

One step is zeroing, forward with labels, and backward, written as anyone would write it; the model is one of
transformers' own classes with random weights in bf16, attention by scaled dot-product attention, experts by its
``grouped_mm`` path. All arms run in this process, one after another, with the same weights and data:

- ``eager``           the step as it is
- ``attach``          ``graphstep.attach(model)``: layers; those with experts up to the experts, and after them
- ``attach_merged``   the same with ``merge_layers=0``: neighbouring layers are launched as one graph
- ``attach_whole``    layers with experts as a whole, also merged
- ``attach_model``    ``attach(model, regions={"": "model"})``: the whole forward, after ``use_causal_attention(model)``
- ``graph_step``      ``graphstep.graph_step`` around the step: one graph
- ``graph_step_causal``  the same after ``use_causal_attention(model)``: without it, a capture makes a mask
- ``graph_step_parallel``  the same with ``parallel_gradients=True``: a branch in the graph for gradients
- ``eager_causal``    the step as it is, after the same; losses and gradients equal those of ``eager``
- ``eager_zero_grad``  the step with ``model.zero_grad()``: gradients are made anew, as in most loops; all others zero
  them in place
- ``graph_step_zero_grad``  the same as one graph, after ``use_causal_attention(model)``
- ``graph_step_compile``  ``graph_step_causal`` with the model under ``torch.compile``, on a GPU

What is reported: time of a step issued back to back, of one with an idle device before it, and the host's part of it;
launches, and the sum of the step's own kernels, from the profiler; peak memory; and whether losses and gradients of the
first steps equal those of eager bit for bit (both with deterministic kernels where there are some).

    PYTHONPATH=src python benchmarks/hugging_face.py --model qwen3-moe
    PYTHONPATH=src python benchmarks/hugging_face.py --model llama
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from common.case import FlatGradients
from common.check import deterministic_kernels
from common.clocks import MemoryMeter, Spread, StepTimes, free_memory, measure_steps, seconds_of, synchronize
from common.device_time import profile_steps, start_profiler
from common.environment import gpu_state, provenance
from common.options import output_folder
from common.record import failure, rounded, write_results
from common.table import wide_console
from rich.table import Table
from torch import Tensor

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.hugging_face import use_causal_attention

NUM_COMPARED: Final = 6
NUM_BATCHES: Final = 8
LLAMA: Final = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
QWEN3_MOE: Final = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "experts_implementation": "grouped_mm",
}
TINY: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "llama": ("llama", LLAMA),
        "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
        "tiny-llama": ("llama", {**TINY, "intermediate_size": 48}),
        "tiny-qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, **TINY, "num_experts": 4, "moe_intermediate_size": 16}),
    }
)


class Case:
    """The model, and different data for successive steps."""

    def __init__(self, given: Any, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        name, sizes = MODELS[given.model]
        torch.manual_seed(1234)
        config = AutoConfig.for_model(name, use_cache=False, attn_implementation="sdpa", **sizes)
        dtype = torch.float32 if given.fp32 else torch.bfloat16
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
        self.origin: Any = model.to(device, dtype).train()
        self.device = device
        self.has_experts = "num_experts" in sizes
        self.sizes = dict(sizes)
        generator = torch.Generator().manual_seed(4321)
        shape = (given.micro_batch_size, given.seq_length)
        self._batches = [
            torch.randint(config.vocab_size, shape, generator=generator).to(device) for _ in range(NUM_BATCHES)
        ]

    def new_model(self) -> Any:
        """A copy on the device."""
        return copy.deepcopy(self.origin)

    def batch(self, index: int) -> Tensor:
        """Tokens of a step, counted from 0."""
        return self._batches[index % NUM_BATCHES]


class Job:
    """The step, as it is. Subclasses capture it."""

    name = "eager"
    is_causal = False
    makes_gradients_anew = False

    def __init__(self, case: Case) -> None:
        self.model = case.new_model()
        if self.is_causal:
            use_causal_attention(self.model)
        self.gradients = None if self.makes_gradients_anew else FlatGradients(self.model)
        self.manager: Any = None
        self.forward: Any = self.model
        """What is called."""

    def step(self, tokens: Tensor) -> Tensor:
        """One step; returns the loss."""
        loss = self._step(tokens)
        if self.manager is not None:
            self.manager.end_step()
        return loss

    def report(self) -> Any:
        """What was captured."""
        return self.manager.report() if self.manager is not None else None

    def close(self) -> None:
        """Free everything."""
        if self.manager is not None:
            self.manager.close()
        if self.gradients is not None:
            self.gradients.close()

    def _step(self, tokens: Tensor) -> Tensor:
        if self.gradients is None:
            self.model.zero_grad()
        else:
            self.gradients.zero()
        loss: Tensor = self.forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()


class AttachJob(Job):
    """Layers."""

    name = "attach"
    options: Mapping[str, Any] = MappingProxyType({})
    regions: Mapping[str, str] | None = None

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        config = CudaGraphConfig(impl="local", **self.options)
        self.manager = graphstep.attach(self.model, config, regions=self.regions)


class AttachMergedJob(AttachJob):
    """Neighbouring layers together."""

    name = "attach_merged"
    options = MappingProxyType({"merge_layers": 0})


class AttachWholeJob(AttachJob):
    """Experts inside."""

    name = "attach_whole"
    options = MappingProxyType({"merge_layers": 0, "modules": ("attn", "moe")})


class AttachModelJob(AttachJob):
    """The whole forward of the model."""

    name = "attach_model"
    is_causal = True
    regions = MappingProxyType({"": "model"})


class GraphStepJob(Job):
    """One graph."""

    name = "graph_step"
    is_parallel = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._graphed = graphstep.graph_step(self._step, modules=[self.model], parallel_gradients=self.is_parallel)

    def step(self, tokens: Tensor) -> Tensor:
        """One launch."""
        loss: Tensor = self._graphed(tokens)
        return loss

    def report(self) -> Any:
        """What was captured."""
        return self._graphed.report()

    def close(self) -> None:
        """Free everything."""
        self._graphed.close()
        super().close()


class GraphStepCausalJob(GraphStepJob):
    """One graph, attention without a mask."""

    name = "graph_step_causal"
    is_causal = True


class GraphStepParallelJob(GraphStepCausalJob):
    """One graph, with a branch for gradients."""

    name = "graph_step_parallel"
    is_parallel = True


class EagerCausalJob(Job):
    """No graph, attention without a mask."""

    name = "eager_causal"
    is_causal = True


class EagerZeroGradJob(Job):
    """No graph, gradients made anew."""

    name = "eager_zero_grad"
    makes_gradients_anew = True


class GraphStepZeroGradJob(GraphStepCausalJob):
    """One graph, gradients made anew."""

    name = "graph_step_zero_grad"
    makes_gradients_anew = True


class GraphStepCompileJob(GraphStepCausalJob):
    """One graph of compiled kernels."""

    name = "graph_step_compile"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.forward = torch.compile(self.model)


_JOBS: Final[tuple[type[Job], ...]] = (
    *(Job, EagerCausalJob, AttachJob, AttachMergedJob, AttachWholeJob, AttachModelJob),
    *(
        GraphStepJob,
        GraphStepCausalJob,
        GraphStepParallelJob,
        EagerZeroGradJob,
        GraphStepZeroGradJob,
        GraphStepCompileJob,
    ),
)
JOBS: Final[Mapping[str, type[Job]]] = MappingProxyType({job.name: job for job in _JOBS})


def measure(job_class: type[Job], case: Case, given: Any, *, is_profiled: bool) -> dict[str, Any]:
    """Build one arm, time it, and free it."""
    free_memory(case.device)
    meter = MemoryMeter(case.device)
    found = _measure(job_class, case, given, meter, is_profiled=is_profiled)
    meter.closed()
    return {**found, "memory": asdict(meter.use)}


def _measure(job_class: type[Job], case: Case, given: Any, meter: MemoryMeter, *, is_profiled: bool) -> dict[str, Any]:
    """The same, without the memory. What it made is gone when it returns."""
    device = case.device
    jobs: list[Job] = []

    def run(index: int) -> Tensor:
        return jobs[0].step(case.batch(index))

    def build() -> None:
        jobs.append(job_class(case))
        for index in range(NUM_COMPARED):
            run(index)

    try:
        ready_seconds = seconds_of(build, device)
        meter.built()
        for index in range(given.num_warmup_steps):
            run(index)
        synchronize(device)
        if is_profiled:
            device_time = profile_steps(run, device, num_steps=10)
            return {"device_time": None if device_time is None else asdict(device_time)}
        times = measure_steps(run, device, num_steps=given.num_steps, enough_ms=300.0, num_rounds=3)
        meter.end()
        report = jobs[0].report()
        return {"ready_seconds": ready_seconds, "times": times, "report": None if report is None else report.to_json()}
    finally:
        while jobs:
            jobs.pop().close()


def compare(job_class: type[Job], case: Case, expected: list[list[Tensor]]) -> list[bool]:
    """Do loss and gradients of the first steps equal those of eager? Its own are kept."""
    job = job_class(case)
    found: list[bool] = []
    try:
        for index in range(NUM_COMPARED):
            loss = job.step(case.batch(index))
            mine = [loss, *(parameter.grad for parameter in job.model.parameters())]
            if len(expected) <= index:
                expected.append([tensor.detach().clone() for tensor in mine])
            found.append(all(map(torch.equal, mine, expected[index])))
        return found
    finally:
        job.close()


def collect(case: Case, names: Sequence[str], given: Any) -> list[dict[str, Any]]:
    """Run all arms in both orders, then under the profiler, then compare them with eager."""
    arms: dict[str, dict[str, Any]] = {name: {"name": name, "status": "ok", "passes": []} for name in names}
    began = time.monotonic()
    expected: list[list[Tensor]] = []

    def each(order: Sequence[str], title: str) -> None:
        for name in order:
            arm = arms[name]
            if arm["status"] != "ok":
                continue
            print(f"{time.monotonic() - began:5.0f} s  {title}: {name}", file=sys.stderr, flush=True)
            try:
                if title == "compare":
                    arm["equals_eager"] = compare(JOBS[name], case, expected)
                    continue
                result = measure(JOBS[name], case, given, is_profiled=title == "profile")
            except Exception as error:  # whatever an arm does, the others are to go on
                traceback.print_exc()
                arm["status"], arm["reason"] = "failed", failure(title, error)
                continue
            if title == "profile":
                arm["device_time"] = result["device_time"]
                told = result["device_time"]["sum_ms"] if result["device_time"] else 0.0
            else:
                arm["passes"].append(result)
                told = Spread.of(result["times"].back_to_back).median
            print(f"        {told:.3f} ms", file=sys.stderr, flush=True)

    if "attach_whole" in arms and not case.has_experts:
        arms["attach_whole"].update(status="unavailable", reason="the model has no experts")
    if "graph_step_compile" in arms and case.device.type != "cuda":
        arms["graph_step_compile"].update(status="unavailable", reason="needs a CUDA device")
    with deterministic_kernels() as without:
        each(names, "compare")
    expected.clear()
    free_memory(case.device)
    each(names, "timing")
    if case.device.type == "cuda":
        start_profiler(case.device)
        each(names, "profile")
    if given.passes > 1:
        each(names[::-1], "timing again")
    return [_summed(arm, list(without)) for arm in arms.values()]


def _summed(arm: dict[str, Any], without: list[str]) -> dict[str, Any]:
    """The arm with both passes put together."""
    passes = arm.pop("passes")
    if arm["status"] != "ok":
        return arm
    times: list[StepTimes] = [each.pop("times") for each in passes]
    for kind in ("step", "launch", "back_to_back"):
        arm[f"{kind}_ms"] = asdict(Spread.of([value for each in times for value in getattr(each, kind)]))
    arm["passes"] = passes
    arm["kernels_without_deterministic_variant"] = without
    return arm


def render(arms: Sequence[dict[str, Any]], title: str) -> Table:
    """A table for a terminal."""
    table = Table(title=title)
    columns = ("arm", "back to back ms", "of eager", "one step ms", "host ms", "own kernels ms", "times kernels")
    for column in (*columns, "launches", "peak MiB", "equals eager"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    eager = next((a["back_to_back_ms"]["median"] for a in arms if a["name"] == "eager" and a["status"] == "ok"), None)
    for arm in arms:
        if arm["status"] != "ok":
            table.add_row(arm["name"], arm["status"], arm.get("reason", "")[:40], *[""] * 7)
            continue
        device_time = arm.get("device_time") or {}
        kernels, median = device_time.get("sum_ms"), arm["back_to_back_ms"]["median"]
        peak = arm["passes"][0]["memory"]["peak_allocated"]
        table.add_row(
            arm["name"],
            f"{median:.3f}",
            f"{median / eager:.3f}" if eager else "",
            f"{arm['step_ms']['median']:.3f}",
            f"{arm['launch_ms']['median']:.3f}",
            f"{kernels:.3f}" if kernels else "",
            f"{median / kernels:.3f}" if kernels else "",
            f"{device_time['num_launches'] + device_time['num_transfers']:.0f}" if device_time else "",
            "" if peak is None else f"{peak / 2**20:.0f}",
            f"{sum(arm['equals_eager'])} of {len(arm['equals_eager'])}" if "equals_eager" in arm else "",
        )
    return table


def read_options(words: Sequence[str]) -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/hugging_face.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-moe")
    parser.add_argument("--arms", nargs="+", choices=tuple(JOBS), default=tuple(JOBS), metavar="ARM")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--fp32", action="store_true", help="fp32 parameters and gradients (default: bf16)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--passes", type=int, choices=(1, 2), default=1, help="2: time all again, in the other order")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few repeats, no file unless --output")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for the file of results")
    given = parser.parse_args(words)
    given.num_steps, given.num_warmup_steps = (3, 1) if given.quick else (100, 10)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    import transformers

    words = list(sys.argv[1:] if argv is None else argv)
    given = read_options(words)
    kind = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    started, gpu_before = datetime.now(UTC), gpu_state(device)
    case = Case(given, device)
    arms = collect(case, tuple(name for name in JOBS if name in given.arms), given)
    results = rounded(
        {
            **provenance("hugging_face", words, device, started=started, gpu_before=gpu_before),
            "config": {
                "model": given.model,
                "sizes": case.sizes,
                "num_parameters": sum(p.numel() for p in case.origin.parameters()),
                "micro_batch_size": given.micro_batch_size,
                "seq_length": given.seq_length,
                "parameters": "fp32" if given.fp32 else "bf16",
                "transformers": transformers.__version__,
            },
            "arms": arms,
        }
    )
    title = f"one training step of {given.model} of transformers {transformers.__version__} on {device}"
    wide_console(170).print(render(arms, title))
    folder = output_folder(given)
    if folder is not None:
        print(f"results: {write_results(results, folder, now=started)}", file=sys.stderr)
    return 1 if any(arm["status"] == "failed" for arm in arms) else 0


if __name__ == "__main__":
    sys.exit(main())
