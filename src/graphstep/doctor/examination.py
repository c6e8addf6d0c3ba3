"""Runs a step under observation and says what a graph of it would get wrong."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from graphstep.capture.places import Place
from graphstep.doctor.capturable import capturable_on_cpu
from graphstep.doctor.data_path import DataPath, tensors_of
from graphstep.doctor.diagnosis import Diagnosis
from graphstep.doctor.environment import look_at_environment, names_collectives
from graphstep.doctor.findings import FindingList
from graphstep.doctor.lines import Ground, Spot, call_observed
from graphstep.doctor.load_target import failed
from graphstep.doctor.notes import Notes, Roles
from graphstep.doctor.python_state import LineFinder, PythonState
from graphstep.doctor.settle import settle
from graphstep.doctor.source import Sources
from graphstep.doctor.stand_in import cuda_stood_in
from graphstep.doctor.static_look import StaticLook
from graphstep.doctor.target import Target, call_of, needs_arguments, target_of
from graphstep.doctor.watch_calls import CallWatch
from graphstep.doctor.watch_functions import FunctionWatch
from graphstep.doctor.watch_modules import ModuleWatch
from graphstep.doctor.watch_operations import OperationWatch
from graphstep.engine import torch_private
from graphstep.engine.compiler import compiled_code_off
from graphstep.engine.host_reads import answers_as_capturing
from graphstep.errors import CaptureError, ConfigError, Problem, UserInputError
from graphstep.strategies.iteration_refusals import with_children
from graphstep.strategies.optimizers_inside import OptimizersInside
from graphstep.strategies.step_parts import StepParts
from graphstep.strategies.step_reads import StepReads


def diagnose(step: Callable[..., Any], batches: Iterable[Any] = (), *, num_runs: int = 3, name: str = "") -> Diagnosis:
    """Say what of a step cannot be captured, would be replayed wrongly, or makes it slow.

    The step runs ``num_runs + 1`` times and for real: weights are updated, buffers written. Give it a model that may
    change. Nothing is captured and no GPU is needed; on a machine without one the tensors of the step lie on the CPU.

    Args:
        step: makes one step: forward, backward, and the optimizer if it is to be in the graph. A module stands for its
            forward and a backward of its loss, or of the mean of what it returns.
        batches: arguments of the calls, one entry each: a tensor, a tuple of arguments or a dict of named ones. A
            ``DataLoader`` is looked at as well. Used again from the start if there are too few; none for a step without
            arguments.
        num_runs: observed runs, at least 2: what changes from one to the next is seen in the first, and its line in
            the second.
        name: of the target, for the report.

    Returns:
        The findings, the worst first.

    Raises:
        ConfigError: fewer than 2 runs.
        UserInputError: the step cannot be called, or it failed.
    """
    return examine(target_of(step, batches, name), num_runs=num_runs)


def examine(target: Target, *, num_runs: int = 3) -> Diagnosis:
    """Do what :func:`diagnose` does, for a target."""
    if num_runs < 2:
        what = f"num_runs is {num_runs}: what changes from run to run is seen in two"
        raise ConfigError(Problem("num-runs", what, "num_runs", "use 2 or more"))
    return _Examination(target).result(num_runs)


class _Examination:
    """One look at one target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._findings = FindingList()
        self._sources = Sources()
        self._notes = Notes(self._findings, Ground(target.where, target.has_libraries))
        self._finder = LineFinder(self._notes)
        self._functions = FunctionWatch(self._notes)
        self._operations = OperationWatch(self._notes)
        self._calls = CallWatch(self._notes, self._finder.after_line)
        self._modules = ModuleWatch(self._notes)
        self._parts = StepParts()
        self._places: list[Place] = []

    def result(self, num_runs: int) -> Diagnosis:
        begin = time.perf_counter()
        # A step that was made here is small and names no device.
        with _one_thread() if self._target.has_libraries else cuda_stood_in(self._notes.add):
            batches = self._batches(num_runs + 1)
            self._read_code()
            has_run = False
            for number, batch in enumerate(batches):
                self._run(batch, number)
                self._read_code()
                has_run = has_run or self._operations.num_operations > 0
        self._finder.finish()
        self._look_around(batches)
        settle(self._findings)
        if not has_run and not self._findings.sorted():
            what = f"{self._target.name} runs no operation of torch: there is nothing to look at"
            fix = "name the function that makes one step"
            raise UserInputError(Problem("target-empty", what, str(self._target.where), fix))
        return Diagnosis(
            target=self._target.name,
            file=self._target.where.file,
            findings=self._findings.sorted(),
            num_runs=num_runs,
            num_operations=self._operations.num_operations,
            seconds=time.perf_counter() - begin,
            written_buffers=tuple(self._operations.written_buffers),
        )

    # ----- before the runs

    def _batches(self, number: int) -> list[Any]:
        """Batches for so many calls; ``None`` for calls without arguments."""
        given: Any = self._target.batches
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Of pinned memory on a machine without a GPU.
                found = list(itertools.islice(iter(given), number))
        except (Exception, SystemExit) as error:
            if not isinstance(given, Iterable):
                what = f"the batches are {type(given).__name__} {given!r:.40}, and no list of batches"
                raise self._no_batches(what) from error
            raise failed(error, str(self._target.where), "taking batches") from error
        if not found and needs_arguments(self._target.step):
            raise self._no_batches(f"{self._target.name} takes arguments, and there is no batch")
        return list(itertools.islice(itertools.cycle(found), number)) if found else [None] * number

    def _no_batches(self, what: str) -> UserInputError:
        fix = "give a list, one entry for each call"
        return UserInputError(Problem("target-batches", what, str(self._target.where), fix))

    def _refuse_unrun(self, result: Any) -> None:
        """Refuse what has only been made by the call: nothing has run that could be looked at."""
        if isinstance(result, Generator | Coroutine | AsyncGenerator):
            if isinstance(result, Generator | Coroutine):
                result.close()
            what = f"{self._target.name} returns a {type(result).__name__}: calling it runs none of it"
            fix = "name a plain function that makes one step"
            raise UserInputError(Problem("target-generator", what, str(self._target.where), fix))

    def _read_code(self) -> None:
        """Find modules, variables and attributes that the code of the target reads."""
        reads = StepReads()
        modules = [module for _, module in self._parts.modules()]
        for function in self._target.functions:
            reads.add_function(function)
        reads.add_optimizers(self._parts.optimizers)
        for module in [*modules, *reads.modules.values()]:
            for inner in module.modules():
                for hook in _hooks_of(inner):
                    reads.add_function(hook)
        reads.add_modules(modules)
        self._places = reads.places
        held = (place.value() for place in self._places)
        self._parts.add_modules([*reads.modules.values(), *(each for each in held if isinstance(each, nn.Module))])
        self._modules.know([module for _, module in self._parts.modules()])

    # ----- one run

    def _run(self, batch: Any, number: int) -> None:
        notes = self._notes
        read = (place.value() for place in self._places)
        known = {id(each): each for each in (*self._parts.optimizers, *read) if isinstance(each, Optimizer)}
        optimizers = list(known.values())
        modules = with_children(self._parts.modules())
        notes.roles = Roles.of(modules, optimizers, tensors_of(batch))
        notes.is_listening = number > 0
        before = PythonState(modules, self._places, optimizers)
        self._finder.begin()
        self._operations.begin()
        args, kwargs = ((), {}) if batch is None else call_of(self._target.step, batch)
        try:
            with self._watched(number):
                result = call_observed(self._target.step, args, kwargs)
        except (Exception, SystemExit) as error:
            raise failed(error, str(self._target.where), f"run {number + 1} of {self._target.name}") from error
        self._refuse_unrun(result)
        notes.is_listening = True
        if number > 0:
            self._finder.watch(before.changes(self._operations.used))

    @contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(compiled_code_off())
            # The backward of tensors on a GPU runs in another thread otherwise, where Python's hooks see nothing.
            enter(torch.autograd.set_multithreading_enabled(False))
            if number == 1:  # So that lines of the forward are known in the backward. Slow where Python is watched.
                enter(torch.autograd.set_detect_anomaly(True, check_nan=False))
            if number > 0:
                # Libraries read values where they are run eagerly, and not under capture. Optimizers that cannot be
                # captured would refuse to step.
                enter(answers_as_capturing(lambda: not self._notes.is_stepping))
            enter(self._parts.watching(self._steps))
            enter(capturable_on_cpu(notes=self._notes))  # After the look at how they are built.
            enter(self._modules.watching())
            if number > 0:
                enter(self._functions)
            enter(self._operations)
            if number > 1:
                enter(self._calls.watching())
            yield

    def _steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        notes = self._notes
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        try:
            OptimizersInside([optimizer], device).require_capturable("")
        except CaptureError as error:
            notes.add("GS-O001", f"{type(optimizer).__name__}.step", detail=error.what, part="optimizer")

    # ----- after the runs

    def _look_around(self, batches: list[Any]) -> None:
        target, notes = self._target, self._notes
        own = {code for code in self._calls.functions if not notes.ground.has_libraries}
        StaticLook(self._findings, self._sources).read(own, self._calls.executed)
        files = sorted({code.co_filename for code in own} | ({target.where.file} if target.where.line else set()))
        files = [file for file in files if notes.ground.owns(file)]
        data = DataPath(self._findings, target.where, self._sources)
        has_short = False
        if isinstance(target.batches, DataLoader):
            has_short = data.look_at_loader(target.batches, target.loader_name, files)
        if batches and batches[0] is not None:
            data.look_at_batches(batches, may_be_short=has_short)
        self._taken_inside()
        communicates = self._operations.has_collectives or names_collectives(self._sources, files)
        look_at_environment(self._findings, os.environ, self._sources, files, communicates=communicates)

    def _taken_inside(self) -> None:
        """Batches that come from an iterator which the step reads."""
        iterators = [place for place in self._places if _is_iterator(place.value())]
        if iterators:
            counts = isinstance(iterators[0].value(), itertools.count)
            for line in self._calls.taken or [self._target.where]:
                spot = Spot(line, True, True, "", frozenset(), frozenset(), False)
                code, part = ("GS-Y001", "forward") if counts else ("GS-D004", "data")
                self._notes.add(code, f"next({iterators[0].path})", spot=spot, part=part)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads would wait for each other longer than they compute, the more so on a busy machine."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
        yield from hooks.values()
    for parameter in module._parameters.values():
        if parameter is not None:
            yield from (getattr(parameter, "_backward_hooks", None) or {}).values()
            yield from torch_private.post_accumulate_hooks(parameter)


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not hasattr(value, "readable") and not isinstance(value, nn.Module)
