"""DistributedDataParallel over two processes with different data: layers replay, and every gradient is reduced."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from tests.engine import test_data_parallel as engine_test
from tests.strategies.models import Decoder
from tests.strategies.runs import Run, differences
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError, ConfigError
from graphstep.strategies import CudaGraphManager

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)

WORLD_SIZE = 2
NUM_STEPS = 5
BUCKET_CAP_MB = 0.004  # several buckets, some of which end in the middle of a layer
SECONDS_FOR_ALL = 100
CPU: Final = torch.device("cpu")
CONFIG: Final = CudaGraphConfig(impl="local", warmup_steps=1)

Build = Callable[[], nn.Module]
Attach = Callable[[Any], CudaGraphManager]
"""Given the wrapped model."""


# ----- runs of one rank


def synchronized_last(
    *, data_iterator: Iterator[Any], model: Any, num_microbatches: int, forward_only: bool = False
) -> Tensor:
    """Gradients are reduced in the backward of the last microbatch."""
    losses = []
    for left in reversed(range(num_microbatches)):
        batch = next(data_iterator)
        with model.no_sync() if left else nullcontext(), torch.set_grad_enabled(not forward_only):
            loss = model(batch["tokens"], batch["labels"])
            if not forward_only:
                (loss / num_microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def with_dropout() -> Decoder:
    return Decoder(dropout=0.2)


class Nested(nn.Module):
    """The decoder is not what is wrapped, but a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = with_dropout()

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.decoder(tokens, labels)


def wrapped(build: Build = with_dropout, **options: Any) -> nn.Module:
    """A model that starts with other weights on each rank, until DistributedDataParallel sends round the first's."""
    torch.manual_seed(10 + dist.get_rank())
    return DistributedDataParallel(build(), bucket_cap_mb=BUCKET_CAP_MB, **options)


class Ranked(Run):
    """One rank's run, with data and dropout of its own: eager, with the strategy ``local``, or with a manager."""

    def __init__(
        self, *, build: Build = wrapped, impl: str = "none", attach: Attach | None = None, zero: str = "none"
    ) -> None:
        super().__init__(CPU, impl, build=build, forward_backward=synchronized_last, zero=zero)
        self.data.manual_seed(100 + dist.get_rank())
        self.manager = attach(self.model) if attach is not None else None

    @property
    def report(self) -> Any:
        return self.strategy.report() if self.manager is None else self.manager.report()

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()
        self.strategy.close()


def attached(model: nn.Module) -> CudaGraphManager:
    return graphstep.attach(model, CONFIG)


def attached_inside(model: Any) -> CudaGraphManager:
    return graphstep.attach(model.module, CONFIG)


USES: Mapping[str, Mapping[str, Any]] = {
    "attach": {"attach": attached},
    "attach inside": {"attach": attached_inside},
    "strategy": {"impl": "local"},
}


def twins(script: Callable[[Any], Any], *uses: Mapping[str, Any], num_replays: int, **options: Any) -> None:
    """Run ``script`` eagerly and in each of the uses, and insist on the same bits, and on those of the other rank."""
    eager = Ranked(**options)
    script(eager)
    assert eager.trace, "the script noted nothing"
    for use in uses or (USES["attach"],):
        graphed = Ranked(**options, **use)
        script(graphed)
        found = differences(eager.trace, graphed.trace)
        assert found == [], found[:5]
        assert graphed.num_replays == num_replays, str(graphed.report)
        assert_same_on_all_ranks(graphed)
        graphed.close()


def assert_same_on_all_ranks(run: Run) -> None:
    """Weights and reduced gradients are the same on all ranks; losses are not, as the data differ."""
    mine = {name: value.detach() for name, value in run.model.named_parameters()}
    mine |= {f"{name}.grad": value.grad for name, value in run.model.named_parameters() if value.grad is not None}
    mine["losses"] = torch.cat([each["losses"] for each in run.trace])
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, mine)
    for name, value in mine.items():
        others = [each[name] for rank, each in enumerate(everyone) if rank != dist.get_rank()]
        assert all(torch.equal(value, other) for other in others) is (name != "losses"), name


def steps(run: Run, counts: Sequence[int]) -> None:
    for number in counts:
        run.step(number)


def replays(counts: Sequence[int]) -> int:
    """Of two layers, in all steps but the first."""
    return 2 * sum(counts[1:])


# ----- what the processes check


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph and bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
}


def parity(options: str, num_microbatches: int, uses: Sequence[str], zero: str = "none") -> None:
    counts = [num_microbatches] * NUM_STEPS
    if "static" in options:
        counts.insert(0, 1)  # a static graph cannot begin with no_sync, eagerly neither
    twins(
        partial(steps, counts=counts),
        *(USES[use] for use in uses),
        build=partial(wrapped, **OPTIONS[options]),
        zero=zero,
        num_replays=replays(counts),
    )


def changing_counts() -> None:
    """The same graphs serve backwards with and without a reduction."""
    counts = (2, 1, 2, 3, 1, 2)
    twins(partial(steps, counts=counts), num_replays=replays(counts))


def unused_parameters() -> None:
    """The third layer is never called; which parameters are used has to be found behind the replays."""
    counts = [2] * NUM_STEPS
    build = partial(wrapped, partial(Decoder, 3, 0.2, order=(0, 1)), find_unused_parameters=True)
    twins(partial(steps, counts=counts), build=build, num_replays=replays(counts))


def evaluation() -> None:
    """Between steps. Buffers of the first rank are sent round before each forward, in training too."""

    def script(run: Run) -> None:
        for _ in range(NUM_STEPS):
            run.step(2)
            run.evaluate(2)

    twins(script, num_replays=replays([2] * NUM_STEPS))


def as_by_default(state, bucket):  # type: ignore[no-untyped-def]
    """The reduction that DistributedDataParallel does by itself, and a note of it. It would compare annotations."""
    state.append((bucket.index(), bucket.buffer().numel(), bucket.is_last()))
    future = dist.all_reduce(bucket.buffer().div_(WORLD_SIZE), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def buckets(options: str) -> None:
    """Each bucket is reduced once a step, in the order of the eager run."""
    logs: list[list[tuple[int, int, bool]]] = []

    def script(run: Any) -> None:
        logs.append([])
        run.model.register_comm_hook(logs[-1], as_by_default)
        steps(run, [2] * NUM_STEPS)

    twins(script, build=partial(wrapped, **OPTIONS[options]), num_replays=replays([2] * NUM_STEPS))
    eager, graphed = logs
    assert eager == graphed
    assert len({index for index, *_ in eager}) > 2
    assert sum(is_last for *_, is_last in eager) == NUM_STEPS


def gradient_hooks() -> None:
    """Once a parameter and backward, with the gradient of this rank."""
    seen: list[dict[str, list[float]]] = []

    def script(run: Run) -> None:
        values: dict[str, list[float]] = defaultdict(list)
        seen.append(values)
        for name, parameter in run.model.named_parameters():
            parameter.register_hook(lambda gradient, note=values[name].append: note(float(gradient.sum())))
        steps(run, [2] * NUM_STEPS)

    twins(script, num_replays=replays([2] * NUM_STEPS))
    eager, graphed = seen
    assert eager == graphed
    assert {len(values) for values in graphed.values()} == {2 * NUM_STEPS}


def accumulation_hooks() -> None:
    """Once a parameter and backward. What they see may be in the middle of its reduction."""
    counts: list[dict[str, int]] = []

    def script(run: Run) -> None:
        count = dict.fromkeys((name for name, _ in run.model.named_parameters()), 0)
        counts.append(count)
        for name, parameter in run.model.named_parameters():

            def note(_parameter: Tensor, count: dict[str, int] = count, name: str = name) -> None:
                count[name] += 1

            parameter.register_post_accumulate_grad_hook(note)
        steps(run, [2] * NUM_STEPS)

    twins(script, num_replays=replays([2] * NUM_STEPS))
    assert [set(count.values()) for count in counts] == [{2 * NUM_STEPS}] * 2


def closed_half_way() -> None:
    """Eager training goes on after the graphs are gone."""

    def script(run: Ranked) -> None:
        steps(run, [2] * NUM_STEPS)
        if run.manager is not None:
            run.manager.close()
        steps(run, [2] * 2)

    twins(script, num_replays=replays([2] * NUM_STEPS))


def reduced_or_refused(attach: Attach, num_layers: int = 2, **options: Any) -> None:
    """A manager that overlooks DistributedDataParallel has to say so: with unused parameters, torch does not."""
    counts = [1] * NUM_STEPS
    num_replays = replays(counts) * num_layers // 2
    with suppress(CaptureError, ConfigError):
        twins(partial(steps, counts=counts), {"attach": attach}, num_replays=num_replays, **options)


def frozen() -> nn.Module:
    """As loops do that want fewer collections."""
    model = wrapped(find_unused_parameters=True)
    gc.freeze()
    return model


def attached_first() -> None:
    """The model is wrapped when it has a manager."""
    managers: list[Any] = []

    def build() -> nn.Module:
        model = with_dropout()
        if managers:
            managers.append(graphstep.attach(model, CONFIG))
        managers.append(None)
        return DistributedDataParallel(model)

    twins(
        partial(steps, counts=[1] * NUM_STEPS),
        {"attach": lambda _model: managers[-2]},
        build=build,
        num_replays=replays([1] * NUM_STEPS),
    )


JOBS: Mapping[str, Callable[[], None]] = {
    **{f"{options}, 1 microbatch": partial(parity, options, 1, ("attach",)) for options in OPTIONS},
    **{f"{options}, 2 microbatches": partial(parity, options, 2, ("attach", "strategy")) for options in OPTIONS},
    **{
        f"attached inside, {options}": partial(parity, options, 2, ("attach inside",), "zeros")
        for options in ("plain", "static graph and bucket views")
    },
    "strategy, 1 microbatch": partial(parity, "bucket views", 1, ("strategy",), "zeros"),
    "counts of microbatches that change": changing_counts,
    "unused parameters": unused_parameters,
    "evaluation": evaluation,
    "buckets": partial(buckets, "plain"),
    "buckets that gradients view": partial(buckets, "bucket views"),
    "hooks on gradients": gradient_hooks,
    "hooks after accumulation": accumulation_hooks,
    "closed half-way": closed_half_way,
    "attached before it is wrapped": attached_first,
    "part of what is wrapped": partial(
        reduced_or_refused,
        lambda model: attached(model.module.decoder),
        build=partial(wrapped, Nested, find_unused_parameters=True),
    ),
    "one layer of what is wrapped": partial(
        reduced_or_refused,
        lambda model: attached(model.module.layers[0]),
        num_layers=1,
        build=partial(wrapped, find_unused_parameters=True),
    ),
    **{f"set up again: {options}": partial(engine_test.is_seamless, options) for options in engine_test.OPTIONS},
    "frozen for the collector": partial(reduced_or_refused, attached, build=frozen),
}


# ----- the processes


def join(folder: Path, rank: int, name: str) -> None:
    """Each job has a process group of its own, so that one that fails leaves nothing to the next."""
    store = dist.FileStore(str(folder / f"{name}.store"), WORLD_SIZE)
    timeout = timedelta(seconds=SECONDS_FOR_ALL / 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)


def run_jobs(folder: Path, rank: int) -> None:
    """Write what went wrong, job by job, into ``folder``. All graphs are closed before the process group goes."""
    importlib.import_module("torch._dynamo")  # what optimizers import when they are first used
    gc.collect()
    gc.freeze()  # every capture collects garbage first
    for name, job in JOBS.items():
        join(folder, rank, name)
        try:
            job()
            report = ""
        except Exception:
            report = traceback.format_exc()
        dist.destroy_process_group()
        (folder / f"{name}.{rank}").write_text(report, encoding="utf-8")


def leave_open(folder: Path, rank: int) -> list[Ranked]:
    """Two runs whose graphs nobody closes: one whose process group is destroyed, and one whose group is left too."""
    runs = []
    for name in ("destroyed", "left"):
        join(folder, rank, name)
        run = Ranked(attach=attached)
        steps(run, [1] * 3)
        assert run.num_replays == replays([1] * 3)
        runs.append(run)
        if name == "destroyed":
            dist.destroy_process_group()
    return runs


SCRIPT: Final = f"""
import sys
from pathlib import Path
from {__name__} import leave_open, run_jobs

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
run_jobs(folder, rank)
lives_until_the_end = leave_open(folder, rank)
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    status: int
    errors: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes write their reports."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ended(folder: Path) -> list[Ended]:
    """The processes, after all jobs: starting them takes longer than most of these."""
    path = os.pathsep.join(filter(None, sys.path))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    ends_before = time.monotonic() + SECONDS_FOR_ALL
    try:
        errors = [process.communicate(timeout=max(0, ends_before - time.monotonic()))[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [Ended(status=process.returncode, errors=text) for process, text in zip(processes, errors, strict=True)]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.usefixtures("ended")
def test_two_processes(folder: Path, name: str) -> None:
    for rank in range(WORLD_SIZE):
        report = (folder / f"{name}.{rank}").read_text(encoding="utf-8")
        assert report == "", f"rank {rank}:\n{report}"


def test_processes_end_well_with_graphs_open(ended: list[Ended]) -> None:
    for process in ended:
        assert process.status == 0, process.errors
        assert "Traceback" not in process.errors
        assert "Exception ignored" not in process.errors
