"""Programs with collectives of torch.distributed, and the process that runs them all against eager execution."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from tests.engine.programs import Build, Program, assert_replays_equal_eager, snapshot
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphstep.engine import TapeEngine
from graphstep.errors import CaptureError


def rank_input(device: torch.device) -> Tensor:
    return torch.randn(2, 3, device=device) + dist.get_rank()


def all_reduce(device: torch.device) -> Program:
    x, total = rank_input(device), torch.zeros(2, 3)

    def run() -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        total.add_(y)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return y + 1

    return Program(run, [x], [total])


def all_reduce_later(device: torch.device) -> Program:
    x = rank_input(device)

    def run() -> list[Tensor]:
        y, z = x * 2, x.sum(0)
        works = [dist.all_reduce(y, async_op=True), dist.all_reduce(z, async_op=True)]
        between = x.exp()
        for work in works:
            assert work is not None
            work.wait()
        return [y + between, z * 2]

    return Program(run, [x])


def all_reduce_coalesced(device: torch.device) -> Program:
    x = rank_input(device)

    def run() -> list[Tensor]:
        parts = [x * 2, x[0] + 1]
        dist.all_reduce_coalesced(parts)
        return parts

    return Program(run, [x])


def all_gather(device: torch.device) -> Program:
    x = rank_input(device)

    def run() -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x * 2)
        whole = torch.empty(2 * dist.get_world_size(), 3)
        dist.all_gather_into_tensor(whole, x.neg())
        later = torch.empty(2 * dist.get_world_size(), 3)
        work = dist.all_gather_into_tensor(later, x + 1, async_op=True)
        assert work is not None
        work.wait()
        return [*parts, whole.sum(0), later]

    return Program(run, [x])


def reduce_scatter(device: torch.device) -> Program:
    x = torch.randn(4, 3) + dist.get_rank()

    def run() -> list[Tensor]:
        part = torch.empty(4 // dist.get_world_size(), 3)
        dist.reduce_scatter_tensor(part, x * 2)
        return [part + 1]

    return Program(run, [x])


def broadcast(device: torch.device) -> Program:
    x, kept = rank_input(device), torch.zeros(2, 3)

    def run() -> Tensor:
        kept.copy_(x)
        dist.broadcast(kept, src=dist.get_world_size() - 1)
        dist.barrier()
        return kept * 2

    return Program(run, [x], [kept])


def all_to_all(device: torch.device) -> Program:
    x = torch.randn(4, 3) + dist.get_rank()

    def run() -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x * 2)
        return out + 1

    return Program(run, [x])


def send_and_receive(device: torch.device) -> Program:
    """A ring: everyone sends to the next."""
    x, size, rank = rank_input(device), dist.get_world_size(), dist.get_rank()

    def run() -> Tensor:
        received = torch.empty_like(x)
        if size == 1:
            return received.copy_(x)
        operations = [
            dist.P2POp(dist.isend, x * 2, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received + 1

    return Program(run, [x])


def functional(device: torch.device) -> Program:
    """These return tensors that wait when they are first used."""
    x = torch.randn(4, 3) + dist.get_rank()
    group = list(range(dist.get_world_size()))

    def run() -> list[Tensor]:
        total = functional_collectives.all_reduce(x * 2, "sum", group)
        gathered = functional_collectives.all_gather_tensor(x, 0, group)
        part = functional_collectives.reduce_scatter_tensor(x, "sum", 0, group)
        return [total + 1, gathered.sum(0), functional_collectives.wait_tensor(part), total * 1]

    return Program(run, [x])


def functional_backward(device: torch.device) -> Program:
    weight, x = torch.randn(3, 3, requires_grad=True), rank_input(device)
    weight.grad = torch.zeros_like(weight)
    group = list(range(dist.get_world_size()))

    def run() -> Tensor:
        whole = functional_collectives.all_gather_tensor_autograd(x @ weight, 0, group)
        loss = whole.square().sum()
        loss.backward()
        return loss.detach()

    return Program(run, [x], [weight.grad])


def data_parallel(device: torch.device) -> Program:
    """DistributedDataParallel: its reducer calls collectives out of hooks, and copies buckets in C++."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    x = rank_input(device)
    for _ in range(3):  # buckets are built in the first steps
        model(x).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    def run() -> Tensor:
        for gradient in gradients:
            gradient.zero_()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    return Program(run, [x], gradients)


PROGRAMS: Mapping[str, Build] = {
    program.__name__: program
    for program in (
        *(all_reduce, all_reduce_later, all_reduce_coalesced, all_gather, reduce_scatter, broadcast, all_to_all),
        *(send_and_receive, functional, functional_backward, data_parallel),
    )
}


def failure_after_start() -> None:
    """A capture that fails while a collective is under way leaves its argument as it was."""
    x, engine = torch.ones(1000) + dist.get_rank(), TapeEngine()
    before = snapshot(x)

    def run() -> None:
        dist.all_reduce(x, async_op=True)
        x.sum().item()

    for _ in range(3):
        try:
            engine.capture(run)
        except CaptureError:
            pass
        else:
            raise AssertionError("not refused")
        dist.barrier()
        if snapshot(x) != before:
            raise AssertionError("the collective wrote after the capture had failed")
    engine.close()


def run_all(rank: int, world_size: int, folder: str) -> None:
    """One of the processes: run every program and write what went wrong, program by program, into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size
    )
    checks: dict[str, Callable[[], None]] = {
        name: lambda build=build: assert_replays_equal_eager(TapeEngine(), build) for name, build in PROGRAMS.items()
    }
    checks["failure_after_start"] = failure_after_start
    for name, check in checks.items():
        try:
            check()
            report = ""
        except Exception:
            report = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(report, encoding="utf-8")
        dist.barrier()
    dist.destroy_process_group()
