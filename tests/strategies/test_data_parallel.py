"""Models wrapped in DistributedDataParallel: every gradient still goes through its buckets, once a backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.strategies.models import Decoder
from tests.strategies.runs import Run, compared, steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.fixture(autouse=True)
def one_process(device: torch.device) -> Iterator[None]:
    """A group of one: what counts here is that reductions happen, which `doubled` shows."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def doubled(_state, bucket):  # type: ignore[no-untyped-def]
    """Doubled before the reduction: what a callback computes runs in a thread of the backend, which no tape sees.

    Without annotations: DDP compares them with types, and here they would be strings.
    """
    future = dist.all_reduce(bucket.buffer().mul_(2), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def build(**options: Any) -> nn.Module:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    model = DistributedDataParallel(Decoder(dropout=0.2).to(device), **options)
    model.register_comm_hook(None, doubled)
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("modules", [(), ("mlp",)], ids=["layers", "mlp"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_local(device: torch.device, options: str, modules: Any, num_microbatches: int) -> None:
    run = compared(
        device,
        "local",
        steps(5, num_microbatches),
        build=partial(build, **OPTIONS[options]),
        modules=modules,
        zero="zeros",
    )
    assert run.num_replays == 2 * 4 * num_microbatches


def script(run: Run) -> None:
    for _ in range(6):
        run.step(1)


@pytest.mark.parametrize("options", ["plain", "buckets"])
def test_full_iteration(device: torch.device, options: str) -> None:
    if device.type == "cuda":
        pytest.skip("captures only where DDP was built on the capture stream")
    run = compared(
        device, "full_iteration", script, build=partial(build, **OPTIONS[options]), warmup_steps=3, zero="zeros"
    )
    assert run.num_replays == 3
