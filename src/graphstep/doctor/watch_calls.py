"""Watches Python itself: which lines of the user's run, and calls that no operation of torch comes of."""

from __future__ import annotations

import builtins
import datetime
import gc
import inspect
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from graphstep.doctor.findings import SourceLine
from graphstep.doctor.notes import Notes

Handler = Callable[[FrameType], None]
OnLine = Callable[[SourceLine | None], None]

_CLOCKS: Final = frozenset(
    {time.time, time.perf_counter, time.monotonic, time.process_time, time.time_ns, time.perf_counter_ns}
)
_TODAY: Final = frozenset({"now", "utcnow", "today"})
_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_WRAPPERS: Final = (
    _TORCH + "_dynamo" + os.sep,
    _TORCH + "_compile.py",
    os.path.join(_TORCH, "distributed", "c10d_logger.py"),
    os.path.join(_TORCH, "utils", "_contextlib.py"),
)
_MODULE_HOOKS: Final = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)
_READS: Final = MappingProxyType({"cpu": "GS-H004", "numpy": "GS-H004", "tolist": "GS-H005"})
"""Methods of tensors that leave no operation that tells of them."""
_SEEDS: Final = ("manual_seed", "seed", "set_rng_state")
_CUDA_SEEDS: Final = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")


class CallWatch:
    """Sees calls and lines through the hooks that debuggers and profilers use; gives them back afterwards.

    Args:
        notes: where findings go.
        on_line: called after each line of the user's that has run, with that line.
    """

    def __init__(self, notes: Notes, on_line: OnLine) -> None:
        self._notes = notes
        self._on_line = on_line
        self._handlers = self._table()
        self._last: SourceLine | None = None
        self.executed: set[tuple[str, int]] = set()
        """File and line of what has run of the user's."""
        self.functions: set[CodeType] = set()
        """The user's functions that have run."""
        self.taken: dict[SourceLine, None] = {}
        """Lines that call ``next``."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the body, in this thread."""
        tracer, profiler = sys.gettrace(), sys.getprofile()
        self._last = None
        sys.settrace(self._on_call)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(profiler)
            sys.settrace(tracer)
            self._on_line(self._last)

    # ----- lines of the user's

    def _on_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        handler = self._handlers.get(code)
        if handler is not None:
            handler(frame)
        if not self._notes.ground.owns(code.co_filename):
            return None
        self.functions.add(code)
        self._on_line(self._last)
        return self._in_function

    def _in_function(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self._on_line(self._last)
            self._last = SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
            self.executed.add((frame.f_code.co_filename, frame.f_lineno))
        elif event == "return":
            self._on_line(self._last)
            caller = frame.f_back
            while caller is not None and not self._notes.ground.owns(caller.f_code.co_filename):
                caller = caller.f_back
            if caller is not None:
                self._last = SourceLine(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_qualname)
        return self._in_function

    # ----- functions written in C

    def _on_event(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or not self._notes.is_listening:
            return
        is_own = self._notes.ground.owns(frame.f_code.co_filename)
        if is_own and function is builtins.next:
            self.taken.setdefault(SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        elif is_own and function is torch.from_numpy:
            self._note("GS-T001", "torch.from_numpy", frame)
        elif is_own and function is builtins.print:
            self._note("GS-Y005", "print", frame)
        elif is_own and function is gc.collect:
            self._note("GS-C002", "gc.collect", frame)
        elif is_own and getattr(function, "__name__", "") == "manual_seed":
            if isinstance(getattr(function, "__self__", None), torch.Generator):
                self._note("GS-R003", "Generator.manual_seed", frame)
        elif is_own and isinstance(getattr(function, "__self__", None), Tensor) and function.__name__ in _READS:
            # Modes are told of calls, but not of those inside of one of torch's functions: hooks on what is saved.
            if self._notes.function:
                self._note(_READS[function.__name__], f"Tensor.{function.__name__}", frame)
        elif is_own and _is_clock(function):
            self._note("GS-Y006", f"time.{function.__name__}", frame)
        elif is_own and _is_calendar(function):
            self._note("GS-Y006", f"datetime.{function.__name__}", frame)

    def _note(self, code: str, operation: str, frame: FrameType | None, **more: Any) -> None:
        """A call of the user's own, whatever torch has wrapped around the function."""
        while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
            frame = frame.f_back
        if frame is not None and self._notes.is_listening and self._notes.ground.owns(frame.f_code.co_filename):
            self._notes.add(code, operation, spot=self._notes.ground.spot(frame), only_own=True, **more)

    # ----- functions written in Python

    def _table(self) -> Mapping[CodeType, Handler]:
        found: dict[CodeType, Handler] = {}

        def simple(function: Any, code: str, name: str) -> None:
            inner = getattr(inspect.unwrap(function), "__code__", None)
            if inner is not None:
                found[inner] = lambda frame: self._note(code, name, frame.f_back)

        for name in _SEEDS:
            simple(getattr(torch.random, name), "GS-R003", f"torch.{name}")
        for name in _CUDA_SEEDS:
            simple(getattr(torch.cuda, name), "GS-R003", f"torch.cuda.{name}")
        simple(random.Random.seed, "GS-R003", "random.seed")
        simple(torch.cuda.synchronize, "GS-H010", "torch.cuda.synchronize")
        simple(torch.cuda.empty_cache, "GS-C002", "torch.cuda.empty_cache")
        simple(torch.save, "GS-H009", "torch.save")
        simple(getattr(torch.distributed, "barrier", None), "GS-H010", "torch.distributed.barrier")
        for name in _MODULE_HOOKS:
            simple(getattr(nn.Module, name), "GS-Y007", f"Module.{name}")
        for kind in (lr_scheduler.LRScheduler, *vars(lr_scheduler).values()):
            if isinstance(kind, type) and "step" in vars(kind) and hasattr(vars(kind)["step"], "__code__"):
                simple(vars(kind)["step"], "GS-O002", f"{kind.__name__}.step")
        found[logging.Logger._log.__code__] = self._logged
        found[inspect.unwrap(nn.Module.train).__code__] = self._switched
        found[inspect.unwrap(Optimizer.zero_grad).__code__] = self._zeroed
        found[inspect.unwrap(nn.Module.zero_grad).__code__] = self._zeroed
        found[inspect.unwrap(torch.amp.GradScaler.step).__code__] = self._scaled
        saved_on_cpu = vars(torch.autograd.graph.save_on_cpu)["__init__"].__code__
        found[saved_on_cpu] = lambda frame: self._note("GS-H004", "save_on_cpu", frame.f_back)
        for name in ("detect_anomaly", "set_detect_anomaly"):
            found[vars(getattr(torch.autograd, name))["__init__"].__code__] = self._anomaly
        return found

    def _logged(self, frame: FrameType) -> None:
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__") == "logging":
            caller = caller.f_back
        self._note("GS-Y005", "logging", caller)

    def _switched(self, frame: FrameType) -> None:
        module, mode = frame.f_locals["self"], frame.f_locals.get("mode", True)
        caller = frame.f_back
        if caller is not None and caller.f_code is inspect.unwrap(nn.Module.eval).__code__:
            caller = caller.f_back
        if module.training != mode:
            self._note("GS-Y008", f"{type(module).__name__}.{'train' if mode else 'eval'}", caller)

    def _zeroed(self, frame: FrameType) -> None:
        if frame.f_locals.get("set_to_none") is False:
            caller = frame.f_back
            while caller is not None and "torch" in caller.f_code.co_filename and not self._owns(caller):
                caller = caller.f_back
            self._note("GS-W011", "zero_grad(set_to_none=False)", caller)

    def _scaled(self, frame: FrameType) -> None:
        """A scaler for CUDA does nothing on this machine, and reads on one with a GPU."""
        scaler, optimizer = frame.f_locals["self"], frame.f_locals["optimizer"]
        is_off_here = not scaler.is_enabled() and getattr(scaler, "_device", "") == "cuda"
        if (
            is_off_here
            and not torch.cuda.is_available()
            and not getattr(optimizer, "_step_supports_amp_scaling", False)
        ):
            self._note("GS-O004", "GradScaler.step", frame.f_back)

    def _anomaly(self, frame: FrameType) -> None:
        if frame.f_locals.get("mode", True) and frame.f_locals.get("check_nan", True):
            self._note("GS-C004", "torch.autograd.detect_anomaly", frame.f_back)

    def _owns(self, frame: FrameType) -> bool:
        return self._notes.ground.owns(frame.f_code.co_filename)


def _is_calendar(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, datetime.date) and function.__name__ in _TODAY


def _is_clock(function: Any) -> bool:
    try:
        return function in _CLOCKS
    except TypeError:  # A function of an object that cannot be hashed.
        return False
