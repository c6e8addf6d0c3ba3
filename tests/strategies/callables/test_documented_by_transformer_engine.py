"""The arguments of Transformer Engine's ``make_graphed_callables``: keywords, hooks, eval mode, reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import DTYPES, HIDDEN, SIZE, Block, Job, compared
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, ConfigError, GraphstepError, LifecycleError

KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class Scaled(Block):
    """Keyword-only arguments, one with a gradient."""

    def forward(self, x: Tensor, *, scale: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        y = super().forward(x * scale)
        return y if mask is None else y.masked_fill(mask, 0.0)


def mask_of(x: Tensor) -> Tensor:
    return x.detach() > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_tuple", [True, False])
def test_sample_kwargs(device: torch.device, dtype: torch.dtype, as_tuple: bool) -> None:
    def script(job: Job) -> None:
        module = job.built(Scaled)
        sample = job.sample(requires_grad=True)
        named: Any = {"scale": job.sample(HIDDEN, requires_grad=True), "mask": mask_of(sample)}
        if as_tuple:
            (given,) = job.graphed((module,), ((sample,),), sample_kwargs=(named,))
        else:
            given = job.graphed(module, (sample,), sample_kwargs=named)
        scales = [job.draw(HIDDEN, requires_grad=True) for _ in range(5)]
        optimizer = job.optimizer()
        for scale in scales:
            optimizer.zero_grad(set_to_none=True)
            x = job.draw(requires_grad=True)
            given(x, scale=scale, mask=mask_of(x)).square().sum().backward()
            job.note(x=x, scale=scale)
            optimizer.step()

    compared(device, script, dtype=dtype, replays=5)


def test_order_of_keywords_does_not_matter(device: torch.device) -> None:
    def script(job: Job) -> None:
        sample = job.sample(requires_grad=True)
        named = {"scale": job.sample(HIDDEN), "mask": mask_of(sample)}
        given = job.graphed(job.built(Scaled), (sample,), sample_kwargs=named)
        job.train(lambda x: given(x, mask=mask_of(x), scale=x.detach()[0]))

    compared(device, script, replays=5)


def test_one_dict_of_keywords_for_several_callables(device: torch.device) -> None:
    def script(job: Job) -> None:
        modules = (job.built(Scaled), job.built(Scaled))
        sample = job.sample(requires_grad=True)
        first, second = job.graphed(modules, ((sample,), (sample,)), sample_kwargs={"scale": job.sample(HIDDEN)})
        scale = job.draw(HIDDEN)
        job.train(lambda x: second(first(x, scale=scale), scale=scale))

    compared(device, script, replays=10)


def test_different_keywords_for_several_callables(device: torch.device) -> None:
    def script(job: Job) -> None:
        modules = (job.built(Scaled), job.built(Block))
        sample = job.sample(requires_grad=True)
        named: Any = ({"scale": job.sample(HIDDEN)}, {})
        first, second = job.graphed(modules, ((sample,), (sample,)), sample_kwargs=named)
        job.train(lambda x: second(first(x, scale=x.detach()[0])))

    compared(device, script, replays=10)


@pytest.mark.parametrize("fixed", ["all by keyword", "first by position"])
def test_no_positional_arguments_at_all(device: torch.device, fixed: str) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        sample = job.sample(requires_grad=True)
        if fixed == "all by keyword":
            given = job.graphed(module, (), sample_kwargs={"x": sample})
            job.train(lambda x: given(x=x))
        else:
            given = job.graphed(module, (sample,), sample_kwargs={})
            job.train(given)

    compared(device, script, replays=5)


def test_keywords_with_an_order(device: torch.device) -> None:
    def script(job: Job) -> None:
        modules = (job.built(Scaled), job.built(Block))
        sample = (job.sample(requires_grad=True),)
        named: Any = ({"scale": job.sample(HIDDEN)}, {}) * 2
        calls = job.graphed(modules, (sample,) * 4, sample_kwargs=named, _order=[1, 1, -1, -1])
        optimizer = job.optimizer()
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            results = [
                calls[2 * m + 1](calls[2 * m](job.draw(requires_grad=True), scale=job.draw(HIDDEN))) for m in (0, 1)
            ]
            for result in results:
                result.sum().backward()
            job.note(results=results)
            del results, result
            optimizer.step()

    compared(device, script, replays=20)


def test_single_module_with_an_order_gives_a_list(device: torch.device) -> None:
    def script(job: Job) -> None:
        calls = job.graphed(job.built(Block), ((job.sample(requires_grad=True),),) * 2, _order=[1, -1, 1, -1])
        assert isinstance(calls, list)
        assert len(calls) == 2
        job.train(calls[0], num_steps=0)
        for _ in range(5):
            for call in calls:
                call(job.draw(requires_grad=True)).sum().backward()
            job.note()

    compared(device, script, replays=10)


def test_module_that_is_given_with_an_order_runs_eagerly_by_itself(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(Block)
    (call,) = job.graphed(module, ((job.sample(requires_grad=True),),), _order=[1, -1])
    module(job.draw(requires_grad=True)).sum().backward()
    assert [row.num_replays for row in call.report().rows] == [0]
    job.close()
    assert "forward" not in vars(module)


# ----- hooks


def hooks_that_note(seen: list[tuple[str, Any]]) -> dict[str, Any]:
    return {kind: (lambda module, kind=kind: seen.append((kind, module))) for kind in KINDS}


def test_capture_time_hooks_run_around_each_capture_and_never_at_replay(device: torch.device) -> None:
    seen: list[tuple[str, Any]] = []

    def script(job: Job) -> None:
        modules = (job.built(Block), job.built(Block))
        sample = (job.sample(requires_grad=True),)
        first, second = job.graphed(modules, (sample, sample), capture_time_hooks=(hooks_that_note(seen), None))
        if job.graphs:
            assert seen == [(kind, modules[0]) for kind in KINDS]
        job.train(lambda x: second(first(x)))
        assert len(seen) == (4 if job.graphs else 0)

    compared(device, script, replays=10)


def test_capture_time_hooks_of_several_callables_follow_the_order(device: torch.device) -> None:
    seen: list[tuple[str, Any]] = []
    job = Job(device, True, torch.float32)
    modules = (job.built(Block), job.built(Block))
    sample = (job.sample(requires_grad=True),)
    job.graphed(modules, (sample, sample), capture_time_hooks=[hooks_that_note(seen)] * 2)
    first, second = modules
    forwards = [(kind, module) for module in (first, second) for kind in KINDS[:2]]
    backwards = [(kind, module) for module in (second, first) for kind in KINDS[2:]]
    assert seen == forwards + backwards
    job.close()


@pytest.mark.parametrize("form", ["one", "list", "dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_forms_of_capture_time_hooks(device: torch.device, kind: str, form: str) -> None:
    seen: list[str] = []
    hooks = [lambda _module: seen.append("first"), lambda _module: seen.append("second")]
    given: Any = {"one": hooks[0], "list": hooks, "dict": dict(enumerate(hooks))}[form]
    job = Job(device, True, torch.float32)
    job.graphed(job.built(Block), (job.sample(requires_grad=True),), capture_time_hooks=({kind: given},))
    assert seen == (["first"] if form == "one" else ["first", "second"])
    job.close()


@pytest.mark.parametrize("kind", KINDS)
def test_capture_time_hook_that_returns_something_is_an_error(device: torch.device, kind: str) -> None:
    module = Block().to(device)
    generator = torch.get_rng_state()
    with pytest.raises(GraphstepError, match=kind):
        graphstep.make_graphed_callables(
            module,
            (torch.ones(SIZE, HIDDEN, device=device, requires_grad=True),),
            capture_time_hooks=({kind: lambda _module: 1},),
        )
    assert "forward" not in vars(module)
    assert torch.equal(torch.get_rng_state(), generator)
    assert int(module.num_calls) == 0


def test_unknown_kind_of_capture_time_hook_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'forward_post_hooks'.*callable 1"):
        graphstep.make_graphed_callables(
            Block(), (torch.ones(SIZE, HIDDEN),), capture_time_hooks=({"forward_post_hooks": lambda _module: None},)
        )


def test_warmup_hooks_run_once_each(device: torch.device) -> None:
    seen: list[str] = []

    class Seen(Block):
        def forward(self, x: Tensor) -> Tensor:
            if seen[-1:] != ["forward"]:
                seen.append("forward")
            return super().forward(x)

    job = Job(device, True, torch.float32)
    sample = (job.sample(requires_grad=True),)
    job.graphed(
        (job.built(Seen), job.built(Seen)),
        (sample, sample),
        pre_warmup_hook=lambda: seen.append("pre"),
        post_warmup_hook=lambda: seen.append("post"),
    )
    assert seen[:2] == ["pre", "forward"]
    assert (seen.count("pre"), seen.count("post")) == (1, 1)
    job.close()


@pytest.mark.parametrize("clones", [True, False])
@pytest.mark.parametrize("retains", [True, False])
def test_accepted_options_change_no_bit(device: torch.device, retains: bool, clones: bool) -> None:
    def script(job: Job) -> None:
        options: dict[str, Any] = {"retain_graph_in_backward": retains, "clone_param_grads_on_return": clones}
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),), **options)
        job.train(given, num_microbatches=3)

    compared(device, script, replays=15)


# ----- modes


@pytest.mark.parametrize("dtype", DTYPES)
def test_eval_stays_eager_and_training_comes_back(device: torch.device, dtype: torch.dtype) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        given = job.graphed(module, (job.sample(requires_grad=True),))
        for _ in range(3):
            job.train(given, num_steps=2)
            module.eval()
            job.note(result=given(job.draw()))
            job.note(result=given(job.draw(5, HIDDEN)))  # Another shape is no matter for eager calls.
            module.train()

    job = compared(device, script, dtype=dtype, replays=6)
    assert job.reasons() == {"evaluation": 6}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_runs_eagerly_also_with_training_flags(device: torch.device, mode: Any) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        for _ in range(3):
            job.train(given, num_steps=2)
            with mode():
                result = given(job.draw(requires_grad=False))
                assert not result.requires_grad
            job.note(result=result)

    compared(device, script, replays=6)


def test_eval_between_the_turns_of_an_order(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        calls = job.graphed(module, ((job.sample(requires_grad=True),),) * 2, _order=[1, 1, -1, -1])
        for _ in range(5):
            first = calls[0](job.draw(requires_grad=True))
            module.eval()
            job.note(result=calls[1](job.draw()))
            module.train()
            second = calls[1](job.draw(requires_grad=True))
            first.sum().backward()
            with torch.no_grad():
                job.note(result=calls[0](job.draw()))
            second.sum().backward()
            job.note(first=first, second=second)
            del first, second

    compared(device, script, replays=10)


def test_module_captured_in_eval_mode_trains_eagerly_in_train_mode(device: torch.device) -> None:
    """Gradients flow in eval mode, too: of a frozen dropout, say."""

    def script(job: Job) -> None:
        module = job.built(Block).eval()
        given = job.graphed(module, (job.sample(requires_grad=True),))
        job.train(given, num_steps=3)
        module.train()
        job.train(given, num_steps=2)
        module.eval()
        job.train(given, num_steps=3)

    compared(device, script, replays=6)


@pytest.mark.parametrize("num_resets", [1, 2])
def test_reset_ends_replays_and_is_idempotent(device: torch.device, num_resets: int) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(nn.Sequential)
    module.append(job.built(Block))
    graphed = job.graphed(lambda x: module(x) * 2, (job.sample(requires_grad=True),))
    graphed(job.draw(requires_grad=True)).sum().backward()
    for _ in range(num_resets):
        graphed.reset()
    with pytest.raises(LifecycleError, match="reset"):
        graphed(job.draw(requires_grad=True))
    assert graphed.report().pool_bytes == 0


def test_hook_errors_are_of_the_capture() -> None:
    with pytest.raises(CaptureError):
        graphstep.make_graphed_callables(
            Block(),
            (torch.ones(SIZE, HIDDEN, requires_grad=True),),
            capture_time_hooks=({"forward_hooks": lambda _module: "something"},),
        )
