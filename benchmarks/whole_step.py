"""How long does a whole training step take, with clipping and AdamW: eager, compiled, or as one graph?

One step is zeroing, forward, backward, clipping to a norm of 1 and fused AdamW on the parameters as they are, written
as anyone would write it. All arms run in this process, one after another, twice, the second time in the opposite order,
with the same weights and data:

- ``eager``                      the step as it is
- ``compile_reduce_overhead``    the model under ``torch.compile(mode="reduce-overhead")``; the rest is eager
- ``graph_step``                 ``graphstep.graph_step`` around the step: one graph
- ``graph_step_parallel``        the same with ``parallel_gradients=True``: branches for gradients and AdamW
- ``graph_step_compile``         the latter around a step whose model is under ``torch.compile``

What is reported: time of a step issued back to back, of one with an idle device before it, and the host's part of it;
peak memory from before the arm is built; launches, and the sum of the step's own kernels, from the profiler; whether
100 steps ran without waiting for the device once (``torch.cuda.set_sync_debug_mode("error")``); and the losses of the
first steps beside eager's.

    PYTHONPATH=src python benchmarks/whole_step.py [options]
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import torch
from common.case import Case, StepBatches
from common.clocks import MemoryMeter, Spread, StepTimes, free_memory, measure_steps, seconds_of, synchronize
from common.device_time import profile_steps, start_profiler
from common.environment import gpu_state, provenance
from common.options import MODELS, add_model_option, common_parser, count, output_folder, read_model
from common.record import failure, rounded, write_results
from common.table import wide_console
from rich.table import Table
from torch import Tensor, nn

import graphstep
from graphstep.cli.problems import print_error, print_notices
from graphstep.errors import UserInputError
from graphstep.training.setup import preflight

NUM_COMPARED: Final = 8
NUM_WITHOUT_WAITING: Final = 100
MAX_NORM: Final = 1.0


class Job:
    """The step, as it is. Subclasses compile or capture it."""

    name = "eager"
    mode: str | None = None
    """Of ``torch.compile`` around the model."""
    is_captured = False
    is_parallel = False

    def __init__(self, case: Case) -> None:
        self.model = case.new_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        self.forward: Any = self.model if self.mode is None else torch.compile(self.model, mode=self.mode)
        self.run: Any = self._step
        if self.is_captured:
            self.run = graphstep.graph_step(self._step, modules=[self.model], parallel_gradients=self.is_parallel)

    def step(self, batches: StepBatches) -> Tensor:
        """One step; returns losses [num_microbatches]."""
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        losses: Tensor = self.run(batches)
        return losses

    def close(self) -> None:
        """Free everything."""
        if self.is_captured:
            self.run.close()
        if self.mode is not None:
            torch.compiler.reset()

    def _step(self, batches: StepBatches) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            loss = self.forward(batch["tokens"], batch["labels"])
            (loss / len(batches)).backward()
            losses.append(loss.detach().float())
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return torch.stack(losses)


class CompileReduceOverheadJob(Job):
    """The peer: forward and backward in Inductor's own CUDA graphs."""

    name = "compile_reduce_overhead"
    mode = "reduce-overhead"


class GraphStepJob(Job):
    """One graph."""

    name = "graph_step"
    is_captured = True


class GraphStepParallelJob(GraphStepJob):
    """One graph with branches."""

    name = "graph_step_parallel"
    is_parallel = True


class GraphStepCompileJob(GraphStepParallelJob):
    """One graph of compiled kernels, with branches for the optimizer."""

    name = "graph_step_compile"
    mode = "default"


JOBS: Final[Mapping[str, type[Job]]] = MappingProxyType(
    {job.name: job for job in (Job, GraphStepJob, GraphStepParallelJob, GraphStepCompileJob, CompileReduceOverheadJob)}
)
_NEEDS_GPU: Final = ("graph_step_compile", "compile_reduce_overhead")


def measure(job_class: Callable[[Case], Job], case: Case, given: Any, *, is_profiled: bool) -> dict[str, Any]:
    """Build one arm, compare it, time it, and free it."""
    free_memory(case.device)
    meter = MemoryMeter(case.device)
    found = _measure(job_class, case, given, meter, is_profiled=is_profiled)
    meter.closed()
    return {**found, "memory": asdict(meter.use)}


def _measure(
    job_class: Callable[[Case], Job], case: Case, given: Any, meter: MemoryMeter, *, is_profiled: bool
) -> dict[str, Any]:
    """The same, without the memory. What it made is gone when it returns."""
    device = case.device
    found: dict[str, Any] = {}
    jobs: list[Job] = []

    def run(index: int) -> Tensor:
        return jobs[0].step(case.batches(index))

    def build() -> None:
        jobs.append(job_class(case))
        found["losses"] = [run(index).tolist() for index in range(NUM_COMPARED)]

    try:
        found["ready_seconds"] = seconds_of(build, device)
        meter.built()
        for index in range(given.num_warmup_steps):
            run(index)
        synchronize(device)
        if is_profiled:
            device_time = profile_steps(run, device, num_steps=10)
            return {"device_time": None if device_time is None else asdict(device_time)}
        found["times"] = measure_steps(run, device, num_steps=given.num_steps, enough_ms=1000.0)
        meter.end()
        if jobs[0].is_captured:
            found["waits_in_100_steps"] = _waits(run, device)
            found["report"] = jobs[0].run.report().to_json()
        return found
    finally:
        while jobs:
            jobs.pop().close()


def _waits(run: Callable[[int], object], device: torch.device) -> str:
    """``none``, or what waited for the device."""
    if device.type != "cuda":
        return "not measured"
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(NUM_WITHOUT_WAITING):
            run(index)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return "none"


def collect(case: Case, names: Sequence[str], given: Any) -> list[dict[str, Any]]:
    """Run all arms in both orders, then under the profiler."""
    arms: dict[str, dict[str, Any]] = {name: {"name": name, "status": "ok", "passes": []} for name in names}
    began = time.monotonic()

    def each(order: Sequence[str], title: str, is_profiled: bool) -> None:
        for name in order:
            arm = arms[name]
            if arm["status"] != "ok":
                continue
            print(f"{time.monotonic() - began:5.0f} s  {title}: {name}", file=sys.stderr, flush=True)
            try:
                result = measure(JOBS[name], case, given, is_profiled=is_profiled)
            except Exception as error:  # whatever an arm does, the others are to go on
                traceback.print_exc()
                arm["status"], arm["reason"] = "failed", failure(title, error)
                continue
            if is_profiled:
                arm["device_time"] = result["device_time"]
            else:
                arm["passes"].append(result)

    for name in names:
        if name in _NEEDS_GPU and case.device.type != "cuda":
            arms[name].update(status="unavailable", reason="needs a CUDA device")
    each(names, "timing", False)
    each(names[::-1], "timing again", False)
    if case.device.type == "cuda":
        start_profiler(case.device)
        each(names, "profile", True)
    return [_summed(arm) for arm in arms.values()]


def _summed(arm: dict[str, Any]) -> dict[str, Any]:
    """The arm with both passes put together."""
    passes = arm.pop("passes")
    if arm["status"] != "ok":
        return arm
    times: list[StepTimes] = [each.pop("times") for each in passes]
    for kind in ("step", "launch", "back_to_back"):
        arm[f"{kind}_ms"] = asdict(Spread.of([value for each in times for value in getattr(each, kind)]))
    arm["losses"] = passes[0]["losses"]
    arm["passes"] = [{key: value for key, value in each.items() if key != "losses"} for each in passes]
    return arm


def render(arms: Sequence[dict[str, Any]], title: str) -> Table:
    """A table for a terminal."""
    table = Table(title=title)
    for column in (
        "arm",
        "back to back ms",
        "one step ms",
        "host ms",
        "own kernels ms",
        "launches",
        "peak MiB",
        "loss",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in arms:
        if arm["status"] != "ok":
            table.add_row(arm["name"], arm["status"], *[""] * 6)
            continue
        device_time = arm.get("device_time") or {}
        table.add_row(
            arm["name"],
            *(f"{arm[f'{kind}_ms']['median']:.3f}" for kind in ("back_to_back", "step", "launch")),
            f"{device_time['sum_ms']:.3f}" if device_time else "",
            f"{device_time['num_launches'] + device_time['num_transfers']:.0f}" if device_time else "",
            _mebibytes(arm["passes"][0]["memory"]["peak_allocated"]),
            f"{arm['losses'][-1][0]:.6f}",
        )
    return table


def _mebibytes(number: int | None) -> str:
    return "" if number is None else f"{number / 2**20:.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = common_parser("whole_step", "Times a whole training step of a GPT: with clipping and AdamW.")
    add_model_option(parser, default="10m")
    parser.add_argument("--arms", nargs="+", choices=tuple(JOBS), default=tuple(JOBS), metavar="ARM")
    parser.add_argument("--num-microbatches", type=count, default=1, metavar="N", help="of a step (default: 1)")
    given, rest = parser.parse_known_args(words)
    given.num_steps, given.num_warmup_steps = (5, 2) if given.quick else (200, 20)
    try:
        config = read_model(rest, given, MODELS[given.model], num_microbatches=given.num_microbatches)
        device, _ = preflight(config.training)
    except UserInputError as error:
        print_error(error)
        return 2
    print_notices(config.notices)
    started, gpu_before = datetime.now(UTC), gpu_state(device)
    case = Case.make(config, device=device, has_main_grads=False)
    names = tuple(name for name in JOBS if name in given.arms)
    arms = collect(case, names, given)
    results = rounded(
        {
            **provenance("whole_step", words, device, started=started, gpu_before=gpu_before),
            "config": {
                "model": config.to_json()["model"],
                "num_parameters": case.origin.num_parameters(),
                "micro_batch_size": config.training.micro_batch_size,
                "num_microbatches": config.training.num_microbatches,
                "parameters": "bf16" if config.training.bf16 else "fp32",
                "max_norm": MAX_NORM,
            },
            "arms": arms,
        }
    )
    title = f"one whole training step of a GPT of {case.origin.num_parameters():,} parameters on {device}"
    wide_console(150).print(render(arms, title))
    folder = output_folder(given)
    if folder is not None:
        print(f"results: {write_results(results, folder, now=started)}", file=sys.stderr)
    return 1 if any(arm["status"] == "failed" and arm["name"].startswith("graph_step") for arm in arms) else 0


if __name__ == "__main__":
    sys.exit(main())
