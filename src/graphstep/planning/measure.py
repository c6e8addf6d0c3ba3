"""One eager step, measured: times without any instrument, then its operations and memory, then a profile on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphstep.coverage import StepMeasurement, measure_steps
from graphstep.planning.calibration import Costs
from graphstep.planning.operations import StepLog, log_step
from graphstep.planning.predict import scaled, two_clocks_us
from graphstep.planning.scopes import Scopes
from graphstep.planning.work import Work, counted_work, profile_work

Follow = Callable[[Scopes], AbstractContextManager[None]]
"""Says for the body that scopes follow a step of a loop that knows where forward and backward end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """What is known of an eager step."""

    device: torch.device
    times: StepMeasurement
    log: StepLog
    work: tuple[Work, ...]
    """In order; on a GPU with host times that fit a step without the profiler."""
    host_factor: float
    """By which those of the profile were multiplied; 1 on the CPU."""
    peak_bytes: int
    """Memory that the step took beyond what was there before it: on a GPU as torch counts it."""
    free_bytes: int | None
    """Memory of the device that nobody had at the end; None on the CPU."""

    @property
    def has_device(self) -> bool:
        """True if kernels and launches were seen; False if operations were counted."""
        return self.device.type == "cuda"

    @property
    def step_us(self) -> float:
        """The step, in microseconds."""
        return (self.times.step_ms or 0.0) * 1e3

    @property
    def host_us(self) -> float:
        """What the host needs to launch it all."""
        return sum(each.host_us for each in self.work)

    @property
    def busy_us(self) -> float | None:
        """What the kernels take, one after another; None on the CPU."""
        return sum(each.device_us for each in self.work) if self.has_device else None

    @property
    def num_launches(self) -> int:
        """Launches; on the CPU operations that a GPU would launch."""
        return sum(not each.waits for each in self.work)

    @property
    def modelled_us(self) -> float:
        """The step as the two clocks give it: equal to the measured one, as far as waiting allows."""
        return two_clocks_us(self.work) if self.has_device else self.step_us


def measure_step(
    step: Callable[[], Any],
    model: nn.Module,
    costs: Costs,
    *,
    device: torch.device | str,
    paths: Sequence[str],
    follow: Follow | None = None,
    num_warmup: int = 3,
    num_timed: int = 9,
) -> MeasuredStep:
    """Run some eager steps and take them apart.

    Args:
        step: a whole step; runs ``num_warmup + num_timed + 1`` times, on a GPU three times more.
        model: what it trains.
        costs: of this machine.
        device: where it runs.
        paths: parts of the model to tell apart, see :func:`graphstep.planning.parts_of`.
        follow: for loops that know where forward and backward end.
        num_warmup: steps before the timed ones.
        num_timed: steps whose median is the time of a step.
    """
    device = torch.device(device)
    times = measure_steps(step, device, num_warmup=num_warmup, num_timed=num_timed, num_profiled=0)

    def run(scopes: Scopes) -> None:
        with scopes.installed(model, paths), follow(scopes) if follow is not None else nullcontext():
            step()

    peak = _peak_bytes(step, device)
    log = log_step(run, device, (*model.parameters(), *model.buffers()))
    step_us = (times.step_ms or 0.0) * 1e3
    if device.type != "cuda":
        return MeasuredStep(
            device=device,
            times=times,
            log=log,
            work=counted_work(log, costs.eager_operation_us),
            host_factor=1.0,
            peak_bytes=log.peak_bytes() if peak is None else peak,
            free_bytes=None,
        )
    work, factor = scaled(profile_work(run, device), step_us)
    return MeasuredStep(
        device=device,
        times=times,
        log=log,
        work=work,
        host_factor=factor,
        peak_bytes=log.peak_bytes() if peak is None else peak,
        free_bytes=_free_bytes(device),
    )


def _peak_bytes(step: Callable[[], Any], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def _free_bytes(device: torch.device) -> int:
    """What the driver has left, and what torch has reserved beyond the peak."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(free + max(0, unused))
