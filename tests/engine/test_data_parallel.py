"""DistributedDataParallel that is set up again in the middle of training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphstep.engine import data_parallel

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters and bucket views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "communication hook": {},
}


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layers(nn.Module):
    """The last one is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.second, self.third = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, batch: Tensor, is_whole: bool) -> Tensor:
        found = self.second(self.norm(self.first(batch)).relu())
        return self.third(found) if is_whole else found


def tripled(_state, bucket):  # type: ignore[no-untyped-def]
    """Without annotations: DDP compares them with types, and here they would be strings."""
    return dist.all_reduce(bucket.buffer().mul_(3), async_op=True).get_future().then(lambda done: done.value()[0])


def trace(options: str, again_at: int | None) -> list[Tensor]:
    """All that a run leaves, with two microbatches a step, and losses kept."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.0005, **OPTIONS[options])
    if "hook" in options:
        model.register_comm_hook(None, tripled)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    data = torch.Generator().manual_seed(5 + dist.get_rank())
    found, losses = [], []
    for step in range(7):
        if step == again_at:
            assert data_parallel.why_not_anew(model) is None
            data_parallel.set_up_anew(model)
        optimizer.zero_grad(set_to_none=bool(step % 2))
        is_whole = step % 3 == 0 or "unused" not in options
        for is_last in (False, True):
            is_synchronised = is_last or "static" in options  # A static graph cannot begin with no_sync.
            with nullcontext() if is_synchronised else model.no_sync():
                losses.append(model(torch.randn(4, 8, generator=data), is_whole).square().mean())
                losses[-1].backward()
        optimizer.step()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found += [each.detach().clone() for each in (losses[-1], *model.parameters(), *model.buffers(), *gradients)]
    return found


def is_seamless(options: str) -> None:
    """On one rank of several, or of one."""
    eager = trace(options, None)
    for again_at in (0, 1, 3):
        found = trace(options, again_at)
        assert len(found) == len(eager)
        assert all(map(torch.equal, found, eager)), (options, again_at)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("one_process")
def test_training_goes_on_bit_for_bit(options: str) -> None:
    is_seamless(options)


@pytest.mark.usefixtures("one_process")
def test_nodes_of_the_parameters_are_new() -> None:
    model = DistributedDataParallel(Layers())
    before = [id(torch.autograd.graph.get_gradient_edge(p).node) for p in model.parameters()]
    held = [p.view_as(p) for p in model.parameters()]
    data_parallel.set_up_anew(model)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    assert not {id(node) for node in nodes} & set(before)
    assert len(held) == len(nodes)


@pytest.mark.usefixtures("one_process")
def test_reasons_against_it() -> None:
    model = DistributedDataParallel(Layers())
    assert data_parallel.why_not_anew(model) is None
    node = torch.autograd.graph.get_gradient_edge(model.module.first.weight).node
    assert "holds the nodes" in str(data_parallel.why_not_anew(model))
    del node
    loss = model(torch.ones(4, 8), True).sum()
    loss.backward()
    assert data_parallel.why_not_anew(model) is None
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert "built-in communication hook" in str(data_parallel.why_not_anew(model))
    mixed = DistributedDataParallel(Layers())
    mixed.mixed_precision = object()
    assert "mixed_precision" in str(data_parallel.why_not_anew(mixed))


@pytest.mark.usefixtures("one_process")
def test_another_version_of_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(Layers())
    monkeypatch.setattr(DistributedDataParallel, "_ddp_init_helper", lambda self, parameters: None)
    assert "another way" in str(data_parallel.why_not_anew(model))
