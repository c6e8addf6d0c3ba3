"""``graph_step``: a whole step of anyone's loop as one graph, equal to the loop without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.strategies.step_jobs import (
    Job,
    Loop,
    compared,
    of_microbatches,
    plain_step,
    replays,
    without_zeroing,
    zeroing_in_place,
    zeroing_last,
)
from torch import Tensor, nn

import graphstep
from graphstep.errors import InputMismatchError, LifecycleError

STEPS = [plain_step, zeroing_last, zeroing_in_place, of_microbatches]


@pytest.mark.parametrize("make_step", STEPS)
@pytest.mark.parametrize("warmup_steps", [2, 3, 5])
def test_every_way_of_zeroing(device: torch.device, make_step: Any, warmup_steps: int) -> None:
    def script(job: Job) -> None:
        for _ in range(9):
            job.run()

    job = compared(device, make_step, script, cuda_graph_warmup_steps=warmup_steps)
    assert replays(job) == 9 - warmup_steps
    job.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_of_any_kind_outside(device: torch.device, set_to_none: bool) -> None:
    def script(job: Job) -> None:
        job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
        for index in range(9):
            job.optimizer.zero_grad(set_to_none=set_to_none)
            job.run()
            if index % 2:
                job.run()  # accumulates
            job.optimizer.step()

    job = compared(device, without_zeroing, script)
    assert replays(job) > 3
    job.close()


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.AdamW(p, lr=2.0**-7, fused=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(2.0**-7), fused=True),
        lambda p: torch.optim.Adam(p, lr=2.0**-7, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=2.0**-4, fused=True),
        lambda p: torch.optim.SGD(p, lr=2.0**-4, fused=True, momentum=0.9, nesterov=True, weight_decay=0.01),
    ],
)
def test_optimizers_follow_their_schedules(device: torch.device, build: Any) -> None:
    def script(job: Job) -> None:
        job.optimizer = build(job.model.parameters())
        if isinstance(job.optimizer.param_groups[0]["lr"], Tensor):
            job.optimizer.param_groups[0]["lr"] = job.optimizer.param_groups[0]["lr"].to(job.device)
        # The rates have exact values in fp32, which is what they are in a graph.
        schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=2, gamma=0.5)
        for _ in range(10):
            job.run()
            schedule.step()

    job = compared(device, plain_step, script)
    assert replays(job) == 7
    job.close()


def test_a_clip_threshold_on_the_device_follows_its_schedule(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        def step(batch: tuple[Tensor, Tensor]) -> Tensor:
            job.optimizer.zero_grad()
            loss = nn.functional.mse_loss(job.model(batch[0]), batch[1])
            loss.backward()
            gradients = [p.grad for p in job.model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            torch._foreach_mul_(gradients, (job.clip / (norm + 1e-6)).clamp(max=1.0))
            job.optimizer.step()
            return norm

        return step

    def script(job: Job) -> None:
        for index in range(9):
            job.clip.fill_(0.01 if index % 3 else 10.0)
            job.run()

    compared(device, make, script).close()


def test_weight_decay_that_begins_to_change_is_captured_anew(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(9):
            if index == 6:
                job.optimizer.param_groups[0]["weight_decay"] = 0.4
            job.run()

    job = compared(device, plain_step, script)
    assert replays(job) == 5
    assert job.step.report().num_recordings == 1
    job.close()


def test_many_changes_of_a_number_are_warned_of(device: torch.device) -> None:
    job = Job(device, True, plain_step)
    for _ in range(4):
        job.run()

    def change() -> None:
        for index in range(8):
            job.optimizer.param_groups[0]["eps"] = 1e-8 * (1 + index // 2)
            job.run()

    with pytest.warns(UserWarning, match="eps"):
        change()
    job.close()


def test_state_that_is_loaded_is_followed(device: torch.device) -> None:
    def script(job: Job) -> None:
        for _ in range(5):
            job.run()
        saved = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        saved = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, saved)
        for _ in range(3):
            job.run()
        job.model.load_state_dict(saved["model"])
        job.optimizer.load_state_dict(saved["optimizer"])
        for _ in range(5):
            job.run()

    job = compared(device, plain_step, script)
    assert replays(job) > 6
    job.close()


def test_several_shapes_and_evaluation_between(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(14):
            job.run(size=6 if index % 2 else 4)
            if index % 4 == 3:
                job.model.eval()
                with torch.no_grad():
                    job.kept.append(job.model(job.batch()[0]))
                job.model.train()

    job = compared(device, plain_step, script)
    assert job.step.report().num_recordings == 2
    job.close()


def test_the_model_in_eval_mode_has_a_graph_of_its_own(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(12):
            job.model.train(index % 3 > 0)
            job.run()

    compared(device, plain_step, script).close()


def test_gradients_that_are_kept_stay_as_they_are(device: torch.device) -> None:
    def script(job: Job) -> None:
        for _ in range(8):
            job.run()
            gradient = job.model.outer.weight.grad
            assert gradient is not None
            job.kept.append(gradient)

    compared(device, plain_step, script).close()


def test_gradients_outlive_graphs_that_were_captured_before(device: torch.device) -> None:
    """Those may work in memory that is free at the capture, and are replayed after the gradients were made."""

    def script(job: Job) -> None:
        model = job.model

        def evaluate(values: Tensor) -> Tensor:
            hidden = torch.cat([values.sin().relu(), values.cos().relu()], 1).repeat(1, 4)
            result: Tensor = model(values) + hidden.exp().tanh().sum(1, keepdim=True)
            return result

        options = {"session": job.step.session} if job.is_graphed else {}
        evaluation: Any = graphstep.graph_step(evaluate, **options) if job.is_graphed else evaluate
        for index in range(14):
            if index >= 5:
                job.run()
            kept = model.outer.weight.grad
            model.eval()
            with torch.no_grad():
                job.kept.append(evaluation(job.batch()[0]))
            model.train()
            job.kept += [] if kept is None else [kept, kept.clone()]
            job.note(torch.zeros(()))
        if job.is_graphed:
            assert all(row.num_replays >= 6 for row in job.step.report().rows)

    compared(device, plain_step, script).close()


def test_an_alias_of_a_gradient_is_refused(device: torch.device) -> None:
    job = Job(device, True, plain_step)
    for _ in range(5):
        job.run()
    gradient = job.model.outer.weight.grad
    assert gradient is not None
    kept = gradient.detach()
    with pytest.raises(LifecycleError, match="kept through another tensor"):
        job.run()
    del kept
    job.run()
    job.close()


def test_a_gradient_from_elsewhere_before_a_step_that_ends_with_none(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(9):
            if index == 6:
                values, targets = job.batch()
                nn.functional.mse_loss(job.model(values), targets).backward()
            job.run()

    job = compared(device, zeroing_last, script)
    reasons = job.step.report().rows[0].eager_calls
    assert reasons["a gradient was there before the step"] == 1
    job.close()


def test_gradient_scaler_skips_without_reading(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=3)

        def step(batch: tuple[Tensor, Tensor], poison: Tensor) -> tuple[Tensor, Tensor]:
            job.optimizer.zero_grad()
            loss = nn.functional.mse_loss(job.model(batch[0]), batch[1]) * poison
            scaler.scale(loss).backward()
            scaler.step(job.optimizer)
            scaler.update()
            return loss.detach(), scaler._scale.clone()

        return step

    def script(job: Job) -> None:
        for index in range(12):
            job.run(torch.tensor(float("inf") if index in (1, 6, 9) else 1.0, device=device))

    job = compared(device, make, script)
    assert replays(job) == 9
    job.close()


def test_as_a_decorator(device: torch.device) -> None:
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)

    @graphstep.graph_step(cuda_graph_warmup_steps=2, modules=[model])
    def train(values: Tensor, *, scale: float = 1.0) -> Tensor:
        """Docstring."""
        optimizer.zero_grad()
        loss = model(values).square().mean() * scale
        loss.backward()
        optimizer.step()
        return loss

    losses = [train(torch.ones(2, 4, device=device), scale=2.0) for _ in range(5)]
    assert train.__doc__ == "Docstring."
    assert len({loss.item() for loss in losses}) == 5
    assert not losses[-1].requires_grad
    assert train.report().num_recordings == 1
    train.close()
    with pytest.raises(LifecycleError):
        train(torch.ones(2, 4, device=device))


def test_without_options(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("takes the GPU that is there, as the next line says")

    @graphstep.graph_step
    def double(values: Tensor) -> Tensor:
        return values * 2

    for value in range(6):
        assert double(torch.tensor([float(value)])).item() == 2.0 * value
    double.close()


def test_off(device: torch.device) -> None:
    def script(job: Job) -> None:
        for _ in range(5):
            job.run()

    job = compared(device, plain_step, script, policy="off")
    assert job.step.report().num_recordings == 0
    job.close()


def test_another_signature_by_policy(device: torch.device) -> None:
    job = Job(device, True, plain_step, on_mismatch="error")
    for _ in range(5):
        job.run()
    with pytest.raises(InputMismatchError, match="shape"):
        job.run(size=4)
    job.run()
    job.close()
    job = Job(device, True, plain_step, on_mismatch="eager")
    for _ in range(5):
        job.run()
    for _ in range(5):
        job.run(size=4)
    assert job.step.report().num_recordings == 1
    assert job.step.report().rows[0].eager_calls["another key than those captured"] == 5
    job.close()


def test_rates_are_fp32_from_the_first_call_on(device: torch.device) -> None:
    """A rate that fp32 does not have is rounded in every call alike, also for one that is found in the first."""

    def script(job: Job) -> None:
        rate = 1e-3 if job.is_graphed else float(torch.tensor(1e-3))
        job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=rate, fused=True)
        for _ in range(6):
            job.run()

    compared(device, plain_step, script).close()


def test_a_session_that_is_given_stays_open(device: torch.device) -> None:
    with graphstep.GraphSession(device) as session:
        job = Job(device, True, plain_step, session=session)
        for _ in range(5):
            job.run()
        job.close()
        assert not session.is_closed
        assert session.report().num_recordings == 0


def test_another_number_of_every_shape(device: torch.device) -> None:
    """A graph of one shape does not take the note of another for its own."""

    def script(job: Job) -> None:
        for size, times in ((6, 5), (3, 5)):
            for _ in range(times):
                job.run(size=size)
        job.optimizer.param_groups[0]["weight_decay"] = 0.5
        for size, times in ((3, 4), (6, 4)):
            for _ in range(times):
                job.run(size=size)
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        for size, times in ((3, 5), (6, 5)):
            for _ in range(times):
                job.run(size=size)

    compared(device, plain_step, script).close()


def test_a_number_that_wants_state(device: torch.device) -> None:
    def script(job: Job) -> None:
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=2.0**-5, fused=True)
        for index in range(12):
            if index == 5:
                job.optimizer.param_groups[0]["momentum"] = 0.5
            job.run()

    compared(device, plain_step, script).close()


def test_an_evaluation_gives_no_gradients(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        def evaluate(batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                return job.model(batch[0])

        return evaluate

    def script(job: Job) -> None:
        for index in range(10):
            job.optimizer.zero_grad()
            hidden = job.model.inner(job.batch()[0])
            (job.model.outer(hidden) if index < 4 else hidden).square().mean().backward()
            job.run()
            job.optimizer.step()

    compared(device, make, script).close()


def test_off_is_the_loop_as_it_was(device: torch.device) -> None:
    """Rates are numbers, and a scheduler may be inside."""

    def make(job: Job) -> Loop:
        step = plain_step(job)
        job.optimizer.param_groups[0]["lr"] = 1e-3
        schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=1, gamma=0.9)

        def both(batch: tuple[Tensor, Tensor]) -> Any:
            result = step(batch)
            schedule.step()
            return result

        return both

    def script(job: Job) -> None:
        for _ in range(6):
            job.run()

    compared(device, make, script, policy="off").close()
