"""Dispatchers on one rank and on two: each rank has half of the experts, and results are those of one rank with all."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models.moe.tiny import MOE, built_block
from torch import Tensor

from graphstep.config.moe import MoEConfig
from graphstep.errors import ConfigError
from graphstep.models.moe import AllGatherDispatcher, AllToAllDispatcher, MoEBlock, build_dispatcher

WORLD_SIZE = 2
DROP: dict[str, Any] = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}
PAD: dict[str, Any] = {**DROP, "moe_pad_expert_input_to_capacity": True}
CASES: dict[str, dict[str, Any]] = {
    "allgather": {},
    "allgather, drop": DROP,
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "alltoall, one by one": {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": False},
    "alltoall, drop": {"moe_token_dispatcher_type": "alltoall", **DROP},
    "alltoall, pad": {"moe_token_dispatcher_type": "alltoall", **PAD},
}


class Ranks:
    """Stands for a process group where only its size is asked for."""

    def size(self) -> int:
        return WORLD_SIZE


@pytest.mark.parametrize("case", ["allgather", "alltoall, drop", "alltoall, pad"])
def test_a_plan_has_as_many_tensors_as_it_says(case: str) -> None:
    dispatcher = build_dispatcher(replace(MOE, **CASES[case]), 8)
    plan = dispatcher.preprocess(torch.rand(10, 2), torch.randint(8, (10, 2)))
    assert len(plan) == dispatcher.num_planned
    assert all(isinstance(tensor, Tensor) for tensor in plan)


def test_the_options_choose() -> None:
    assert type(build_dispatcher(MOE, 8)) is AllGatherDispatcher
    assert type(build_dispatcher(replace(MOE, moe_token_dispatcher_type="alltoall"), 8)) is AllToAllDispatcher
    with pytest.raises(ConfigError, match="libraries"):
        build_dispatcher(replace(MOE, moe_token_dispatcher_type="flex"), 8)


def test_what_does_not_fit_the_ranks() -> None:
    group: Any = Ranks()
    with pytest.raises(ConfigError, match="7 experts cannot be spread evenly over 2 ranks"):
        build_dispatcher(MOE, 7, group)
    with pytest.raises(ConfigError, match="does not pad"):
        build_dispatcher(replace(MOE, **PAD), 8, group)
    assert build_dispatcher(MOE, 8, group).num_local_experts == 4


# ----- two processes


def run_case(moe: MoEConfig, group: dist.ProcessGroup) -> None:
    """Compare one rank's half of the experts and its tokens with a block that has all experts, given all tokens."""
    rank = group.rank()
    whole, mine = built_block(moe), built_block(moe, group=group)
    first = rank * 4
    assert torch.equal(mine.experts.up, whole.experts.up[first : first + 4])
    inputs = [torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(r)) for r in range(WORLD_SIZE)]
    inputs[1][:, 1:] = inputs[1][:, :1]  # An uneven load, and experts without a token.
    upstream = torch.randn(2, 7, 32)
    expected_x = [x.clone().requires_grad_() for x in inputs]
    expected = [whole(x) for x in expected_x]
    for y in expected:
        y.backward(upstream)
    x = inputs[rank].clone().requires_grad_()
    y = mine(x)
    y.backward(upstream)
    torch.testing.assert_close(y, expected[rank])
    torch.testing.assert_close(x.grad, expected_x[rank].grad)
    for name in ("up", "down"):
        grad, of_whole = getattr(mine.experts, name).grad, getattr(whole.experts, name).grad
        torch.testing.assert_close(grad, of_whole[first : first + 4], msg=lambda text, name=name: f"{name}: {text}")
    summed = mine.router.weight.grad
    dist.all_reduce(summed, group=group)
    torch.testing.assert_close(summed, whole.router.weight.grad)


def worker(rank: int, folder: str, run: Callable[[MoEConfig, dist.ProcessGroup], None]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    try:
        for case, options in CASES.items():
            torch.manual_seed(3)
            try:
                run(replace(MOE, **options), dist.group.WORLD)  # type: ignore[arg-type]
            except Exception:
                Path(folder, f"{case} {rank}").write_text(traceback.format_exc(), encoding="utf-8")
                raise
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (str(tmp_path), run_case), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
    assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == []


def test_one_rank_as_a_group_is_no_group() -> None:
    x = torch.randn(2, 7, 32)
    results = []
    for group in (None, OneRank()):
        block: MoEBlock = built_block(replace(MOE, moe_token_dispatcher_type="alltoall"), group=group)
        results.append(block(x))
    assert torch.equal(results[0], results[1])


class OneRank:
    def size(self) -> int:
        return 1
