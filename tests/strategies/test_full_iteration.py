"""``full_iteration`` equals eager training bit for bit, whatever changes from step to step."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from tests.models.tiny import LLAMA, TINY, tiny_model
from tests.strategies.models import Decoder
from tests.strategies.runs import Run, compared, steps
from torch import Tensor

from graphstep.capture.reasons import EagerReason
from graphstep.errors import ConfigError, LifecycleError
from graphstep.strategies import FullCudaGraphWrapper

FULL = "full_iteration"
WITH_DROPOUT = partial(Decoder, dropout=0.2)


@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("zero", ["zeros", "none", "buffers"])
def test_training_equals_eager(device: torch.device, warmup_steps: int, num_microbatches: int, zero: str) -> None:
    run = compared(device, FULL, steps(6, num_microbatches), build=WITH_DROPOUT, warmup_steps=warmup_steps, zero=zero)
    assert run.num_replays == 6 - warmup_steps
    assert run.report.num_recordings == 1


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_model(device: torch.device, config: Any, dtype: torch.dtype) -> None:
    run = compared(device, FULL, steps(4, 2), build=lambda: tiny_model(config, dtype=dtype), zero="buffers")
    assert run.num_replays == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", ["none", "buffers"])
def test_autocast(device: torch.device, dtype: torch.dtype, zero: str) -> None:
    """Low-precision copies of weights are made inside the graph."""
    run = compared(device, FULL, steps(5, 2), build=WITH_DROPOUT, autocast=dtype, zero=zero)
    assert run.num_replays == 4


def test_the_number_of_microbatches_changes(device: torch.device) -> None:

    def script(run: Run) -> None:
        for number in (4, 6, 3, 4, 4, 6, 6, 3, 4, 1, 1):
            run.step(number)

    run = compared(device, FULL, script, build=WITH_DROPOUT)
    assert run.report.num_recordings == 4
    assert run.num_replays == 7


def test_shapes_change(device: torch.device) -> None:
    """Two shapes in turn settle into one graph each."""

    def script(run: Run) -> None:
        for size, length in [(2, 6), (2, 9), (3, 6), (2, 6), (2, 9), (2, 6), (2, 9), (2, 6)]:
            run.step(2, size=size, length=length)

    run = compared(device, FULL, script)
    assert run.report.num_recordings == 2
    assert run.reasons() == {"warmup": 3}


def test_shapes_differ_within_a_step(device: torch.device) -> None:
    def script(run: Run) -> None:
        for lengths in ((6, 9), (6, 9), (9, 6), (9, 6), (6, 9)):
            run.step(batches=[run.batch(length=length) for length in lengths])

    assert compared(device, FULL, script).report.num_recordings == 2


def test_evaluation_between_steps(device: torch.device) -> None:
    """No dropout, no counting, and a graph of its own."""

    def script(run: Run) -> None:
        for step in range(6):
            run.step(2)
            if step % 2:
                run.evaluate(3)
                run.evaluate(2)

    run = compared(device, FULL, script, build=WITH_DROPOUT)
    rows = {row.name: row for row in run.report.rows}
    assert rows["training"].num_replays == 5
    assert rows["validation"].num_replays == 4
    assert rows["validation"].num_recordings == 2


def test_evaluation_in_training_mode_is_another_key(device: torch.device) -> None:
    def script(run: Run) -> None:
        for _ in range(3):
            run.step(1)
            run.note(run.forward_backward([run.batch()], forward_only=True))
            run.evaluate(1)

    run = compared(device, FULL, script, build=WITH_DROPOUT)
    assert run.report.num_recordings == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_under_a_mode_of_the_caller(device: torch.device, mode: Any) -> None:

    def script(run: Run) -> None:
        for _ in range(3):
            run.step(1)
            with mode():
                run.evaluate(2)
            run.evaluate(2)

    compared(device, FULL, script, build=WITH_DROPOUT)


def test_part_of_the_model_in_evaluation(device: torch.device) -> None:
    def script(run: Run) -> None:
        for step in range(6):
            run.model.layers[0].train(step % 2 == 0)
            run.step(1)

    assert compared(device, FULL, script, build=WITH_DROPOUT).report.num_recordings == 2


def test_a_seed_set_between_steps_counts(device: torch.device) -> None:
    """Every replay draws anew, and a seed makes it draw the same again."""

    def script(run: Run) -> None:
        for seed in (1, 1, 1, 2, 1):
            torch.manual_seed(seed)
            run.data.manual_seed(seed)
            run.step(1, optimize=False)

    run = compared(device, FULL, script, build=WITH_DROPOUT)
    losses = [float(taken["losses"]) for taken in run.trace]
    assert losses[0] == losses[1] == losses[2] == losses[4] != losses[3]


def test_gradients_accumulate_over_calls(device: torch.device) -> None:
    def script(run: Run) -> None:
        for call in range(6):
            if call % 3 == 0:
                run.optimizer.zero_grad(set_to_none=True)
            run.note(run.forward_backward([run.batch()]))
            if call % 3 == 2:
                run.optimizer.step()

    compared(device, FULL, script)


def test_learning_rate_and_weights_change_outside(device: torch.device) -> None:
    def script(run: Run) -> None:
        for step in range(6):
            run.optimizer.param_groups[0]["lr"] = 0.01 * 0.9**step
            run.step(2)
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
            with torch.no_grad():
                run.model.norm.weight.mul_(1.01)

    compared(device, FULL, script)


def test_a_checkpoint_loaded_in_the_middle(device: torch.device) -> None:
    """Weights, buffers and optimizer state are written in place, and the graph goes on."""

    def script(run: Run) -> None:
        for _ in range(3):
            run.step(1)
        saved = {name: value.clone() for name, value in run.model.state_dict().items()}
        for _ in range(3):
            run.step(1)
        run.model.load_state_dict(saved)
        for _ in range(3):
            run.step(1)

    run = compared(device, FULL, script, build=WITH_DROPOUT)
    assert run.num_replays == 8


def test_a_cap_on_graphs(device: torch.device) -> None:
    """Past the cap, the key that was used longest ago makes room."""

    def script(run: Run) -> None:
        for length in (3, 3, 4, 4, 3, 5, 5, 4, 3, 3):
            run.step(1, length=length)

    with pytest.warns(UserWarning, match="more signatures than the 2"):
        run = compared(device, FULL, script, build=WITH_DROPOUT, max_graphs=2)
    assert run.report.num_recordings == 2
    assert run.num_replays == 6  # 5 takes the place of 4, which is then seen once more: 3 keeps its graph
    assert run.reasons() == {"warmup": 3, EagerReason.TOO_MANY_SIGNATURES: 1}


@pytest.mark.filterwarnings("ignore:training was called with more signatures")
def test_keys_past_the_cap_keep_nothing(device: torch.device) -> None:
    run = Run(device, FULL, max_graphs=1)
    run.step(1, length=3)
    gc.collect()
    before = num_tensors()
    for length in range(4, 24):
        run.step(1, length=length)
    run.trace.clear()
    run.kept.clear()
    gc.collect()
    assert num_tensors() <= before + 5
    run.strategy.close()


def num_tensors() -> int:
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def test_results_may_be_kept(device: torch.device) -> None:
    """`compared` looks at every result again at the end."""
    run = compared(device, FULL, steps(6, 2))
    assert len({result.data_ptr() for result in run.kept}) == 6
    assert not any(result.requires_grad for result in run.kept)


def test_graphs_are_dropped_by_stage(device: torch.device) -> None:
    def script(run: Run) -> None:
        for step in range(9):
            run.step(1)
            run.evaluate(1)
            if isinstance(run.strategy, FullCudaGraphWrapper):
                if step == 2:
                    run.strategy.reset_cuda_graph("validation")
                    counts = {row.name: row.num_recordings for row in run.report.rows}
                    assert counts == {"training": 1, "validation": 0}
                if step == 5:
                    run.strategy.reset_cuda_graph()
                    assert run.report.num_recordings == 0
                    assert all(row.static_bytes == 0 and row.pool_bytes == 0 for row in run.report.rows)

    run = compared(device, FULL, script, build=WITH_DROPOUT)
    assert run.report.num_recordings == 2
    assert run.reasons() == {"warmup": 5}


def test_a_stage_that_does_not_exist_is_refused(device: torch.device) -> None:
    run = Run(device, FULL)
    with pytest.raises(ConfigError, match="valid"):
        run.strategy.reset_cuda_graph("valid")  # type: ignore[attr-defined]
    run.strategy.close()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_closed_wrapper_refuses(device: torch.device, num_steps: int) -> None:
    run = Run(device, FULL)
    for _ in range(num_steps):
        run.step(1)
    run.strategy.close()
    run.strategy.close()
    with pytest.raises(LifecycleError):
        run.step(1)
    assert run.report.pool_bytes == 0


def test_two_wrappers_do_not_meet(device: torch.device) -> None:
    alone = [compared(device, FULL, steps(5), build=partial(Decoder, num_layers=n)) for n in (1, 2)]
    both = [Run(device, FULL, build=partial(Decoder, num_layers=n)) for n in (1, 2)]
    for step in range(5):
        for run in both:
            run.step(1)
        if step == 3:
            assert [run.num_replays for run in both] == [3, 3]
    for one, other in zip(alone, both, strict=True):
        mine = [taken["losses"] for taken in one.trace]
        assert all(map(torch.equal, mine, [taken["losses"] for taken in other.trace]))
        other.strategy.close()


def test_the_data_ends(device: torch.device) -> None:
    """As in an eager step, and the next step is whole again."""

    def script(run: Run) -> list[Tensor]:
        losses = [run.step(2) for _ in range(2)]
        with pytest.raises(StopIteration):
            run.strategy.forward_backward(data_iterator=iter([run.batch()]), num_microbatches=2)
        return [*losses, run.step(2)]

    runs = [Run(device, impl) for impl in ("none", FULL)]
    assert all(map(torch.equal, *map(script, runs)))
    runs[1].strategy.close()
