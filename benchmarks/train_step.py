"""How long does one training step take: eager, captured by this project, captured or compiled by PyTorch?

One step is zero grads + forward + backward of a GPT. All arms run in this process, one after another, with the same
weights and the same data. README.md beside this file says what is measured, in which unit, and what is not.

    PYTHONPATH=src python benchmarks/train_step.py [options]
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch
from common import check, table
from common.arms import ARMS, Arm
from common.case import Case
from common.clocks import MemoryMeter, free_memory, measure_steps, seconds_of, synchronize
from common.device_time import profile_steps, start_profiler
from common.environment import gpu_state, provenance
from common.options import Options, read_options
from common.record import ArmRecord, PassRecord, failure, one_line, rounded, write_results

from graphstep.cli.problems import print_error, print_notices
from graphstep.errors import UserInputError
from graphstep.training.setup import preflight

T = TypeVar("T")

_LEAST_WARMUP_STEPS, _WARMUP_SECONDS = 5, 0.5
"""Warmup steps after this time are not needed any more, if there were that many."""


class Benchmark:
    """Runs the passes. An arm is built anew in each, and is closed before the next one is built.

    1. Timing, in the order of the arms, each compared with eager before it is timed.
    2. Timing again, in the opposite order: a drift of the machine shows as a difference, and the median over both
       passes is that of arms whose places in time average out.
    3. The profiler, which must not have been active before: it slows launches down.
    4. The comparison of the project's own arms with eager once more, with deterministic kernels. Peers are left out:
       they would be compiled again, which takes as long as all their steps, and never equal eager bit for bit.

    An arm that fails is left out of later passes; the others go on.
    """

    def __init__(self, options: Options, device: torch.device, *, arms: Mapping[str, Callable[[], Arm]] = ARMS) -> None:
        self.options = options
        self.case = Case.make(options.config, device=device, has_main_grads=options.has_main_grads)
        self.records = [ArmRecord(name=name, is_ours=arms[name]().is_ours) for name in options.arms]
        self.reference: dict[str, float] = {}
        self.nondeterministic: list[str] = []
        self._arms = arms
        self._began = time.monotonic()
        self._device = device
        self._expected: list[check.StepResult] = []

    def run(self) -> None:
        """Run all passes; results are in ``records``."""
        for record in self.records:
            reason = self._arms[record.name]().why_not(self.case)
            if reason is not None:
                record.status, record.reason = "unavailable", reason
        # Also has the libraries take their memory before that of any arm is measured.
        self._expected = check.eager_results(self.case, num_steps=self.options.num_checked_steps)
        self.reference = {
            "first_loss": float(self._expected[0].losses[0]),
            "first_gradient_norm": check.gradient_norm(self._expected[0]),
        }
        free_memory(self._device)
        for title, order in (("timing", self.records), ("timing again", self.records[::-1])):
            self._each(order, title, self._time)
        if self._device.type == "cuda":
            start_profiler(self._device)
            self._each(self.records, "profile", self._profile)
        if self.options.compares_deterministic and any(r.is_ours and r.status == "ok" for r in self.records):
            with check.deterministic_kernels() as names:
                self._expected = check.eager_results(self.case, num_steps=self.options.num_checked_steps)
                self._each([record for record in self.records if record.is_ours], "deterministic", self._compare)
            self.nondeterministic = names

    def _each(self, records: Iterable[ArmRecord], title: str, action: Callable[[ArmRecord], None]) -> None:
        for record in records:
            if record.status != "ok":
                continue
            print(f"{time.monotonic() - self._began:5.0f} s  {title}: {record.name}", file=sys.stderr, flush=True)
            try:
                action(record)
            except Exception as error:  # whatever an arm does, the others are to go on
                traceback.print_exc()
                record.status, record.reason = "failed", failure(title, error)
            if record.status != "ok":
                self._clean_up()  # only here, where the error is gone, do its frames let go of the arm's tensors

    def _clean_up(self) -> None:
        try:
            free_memory(self._device)
        except RuntimeError as error:  # a broken device stays so: the next arms will say the same
            print(f"cannot free memory: {error}", file=sys.stderr)

    def _time(self, record: ArmRecord) -> None:
        meter = MemoryMeter(self._device)

        def measure(arm: Arm) -> PassRecord:
            ready_seconds = seconds_of(lambda: arm.build(self.case), self._device)
            meter.built()
            if record.normal is None:
                record.normal = check.compare(arm, self.case, self._expected)
            self._warm_up(arm)
            times = measure_steps(
                self._runner(arm),
                self._device,
                num_steps=self.options.num_steps,
                enough_ms=self.options.enough_ms,
            )
            meter.end()
            return PassRecord(
                times=times,
                memory=meter.use,
                ready_seconds=ready_seconds,
                capture_seconds=arm.capture_seconds,
                details=arm.details(),
            )

        record.passes.append(self._with_arm(record, measure))
        meter.closed()

    def _profile(self, record: ArmRecord) -> None:
        def measure(arm: Arm) -> None:
            arm.build(self.case)
            self._warm_up(arm)
            record.device_time = profile_steps(
                self._runner(arm), self._device, num_steps=self.options.num_profiled_steps
            )

        self._with_arm(record, measure)
        free_memory(self._device)

    def _compare(self, record: ArmRecord) -> None:
        def measure(arm: Arm) -> None:
            arm.build(self.case)
            record.deterministic = check.compare(arm, self.case, self._expected)

        self._with_arm(record, measure)
        free_memory(self._device)

    def _with_arm(self, record: ArmRecord, action: Callable[[Arm], T]) -> T:
        arm = self._arms[record.name]()
        try:
            return action(arm)
        finally:
            arm.close()

    def _runner(self, arm: Arm) -> Callable[[int], object]:
        return lambda index: arm.step(self.case.batches(index))

    def _warm_up(self, arm: Arm) -> None:
        run = self._runner(arm)
        started = time.perf_counter()
        for index in range(self.options.num_warmup_steps):
            if index >= _LEAST_WARMUP_STEPS and time.perf_counter() - started > _WARMUP_SECONDS:
                break
            run(index)
        synchronize(self._device)


def results_of(benchmark: Benchmark, argv: Sequence[str], *, started: datetime, gpu_before: dict[str, str]) -> Any:
    """Return everything as plain data."""
    options, device = benchmark.options, benchmark.case.device
    config = options.config
    return rounded(
        {
            **provenance("train_step", argv, device, started=started, gpu_before=gpu_before),
            "config": {
                "model": config.to_json()["model"],
                "num_parameters": benchmark.case.origin.num_parameters(),
                "micro_batch_size": config.training.micro_batch_size,
                "num_microbatches": config.training.num_microbatches,
                "parameters": "bf16" if config.training.bf16 else "fp32",
                "gradients": benchmark.case.gradient_kind,
                "seed": config.training.seed,
                "num_steps": options.num_steps,
                "enough_ms": options.enough_ms,
                "num_warmup_steps": options.num_warmup_steps,
                "num_profiled_steps": options.num_profiled_steps,
            },
            "reference": benchmark.reference,
            "kernels_without_deterministic_variant": benchmark.nondeterministic,
            "arms": [record.to_json() for record in benchmark.records],
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = read_options(words)
        device, _ = preflight(options.config.training)
    except UserInputError as error:
        print_error(error)
        return 2
    print_notices(options.config.notices)
    started = datetime.now(UTC)
    gpu_before = gpu_state(device)
    benchmark = Benchmark(options, device)
    benchmark.run()
    results = results_of(benchmark, words, started=started, gpu_before=gpu_before)
    console = table.wide_console(170)
    machine, model = results["machine"], results["config"]
    title = (
        f"one training step of a GPT of {model['num_parameters']:,} parameters, {model['parameters']}, "
        f"{model['num_microbatches']} x {model['micro_batch_size']} x {model['model']['seq_length']} tokens, "
        f"{model['gradients']} on {machine['gpu'] or 'the CPU'}, torch {machine['torch']}"
    )
    console.print(table.render(benchmark.records, title=title))
    for remark in table.remarks(benchmark.records, results):
        console.print(f"- {remark}", markup=False, highlight=False, soft_wrap=True)
    if options.output is not None:
        path = write_results(results, options.output, now=started)
        print(f"results: {path}", file=sys.stderr)
    print(one_line(results))
    return 1 if any(record.is_ours and record.status == "failed" for record in benchmark.records) else 0


if __name__ == "__main__":
    sys.exit(main())
