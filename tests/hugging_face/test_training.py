"""What training loops do: masks, recompute, several microbatches, other shapes, collected outputs, caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.hugging_face.tiny import Loop, build, eager_reasons, steps, twins
from tests.verification.faulty import Hidden
from torch import Tensor, nn

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError
from graphstep.verification import Part

SOME = ("llama", "qwen3_moe", "gpt2", "gemma2", "mamba2")


def options_of(family: str) -> dict[str, Any]:
    return {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}


def padding(tokens: Tensor) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return mask


def four_dimensions(tokens: Tensor) -> Tensor:
    length = tokens.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None, None].expand(2, 1, -1, -1)


@pytest.mark.parametrize("family", SOME)
def test_padding(device: torch.device, family: str) -> None:
    report = twins(family, device, steps(6, attention_mask=padding), **options_of(family))
    assert all(row.num_replays == 5 for row in report.rows)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_mask_of_four_dimensions_and_positions(device: torch.device, family: str) -> None:
    def positions(tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=tokens.device).expand(2, -1) // 2

    report = twins(family, device, steps(6, attention_mask=four_dimensions, position_ids=positions))
    assert all(row.num_replays == 5 for row in report.rows)


def test_with_and_without_a_mask(device: torch.device) -> None:
    """Two signatures: each replays when it has been captured."""

    def script(loop: Loop) -> None:
        for index in range(9):
            loop.step(attention_mask=padding if index % 2 else None)

    report = twins("llama", device, script)
    assert report.rows[0].num_signatures == 2
    assert report.rows[0].num_replays == 4 + 2


def test_several_sequences_in_a_row(device: torch.device) -> None:
    def positions(tokens: Tensor) -> Tensor:
        return (torch.arange(tokens.shape[1], device=tokens.device) % 5).expand(2, -1)

    for use_cache in (None, False):
        report = twins("llama", device, steps(4, position_ids=positions, use_cache=use_cache))
        assert all(row.num_replays == 3 for row in report.rows)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(device: torch.device, family: str, reentrant: bool) -> None:
    def prepare(model: Any) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model

    report = twins(family, device, steps(6), prepare=prepare, **options_of(family))
    assert all(row.num_replays == 5 for row in report.rows)


def test_gradient_checkpointing_saves_nothing_more_in_a_graph(device: torch.device) -> None:
    """The captured backward computes the layer again: it has more operations than without."""
    sizes = []
    for enabled in (False, True):
        model = build("llama", device)
        if enabled:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with graphstep.attach(model) as manager:
            steps(3)(Loop(model, device))
            sizes.append(manager.report().rows[0].num_operations)
    if device.type == "cpu":
        assert sizes[1] > 1.2 * sizes[0]


def test_gradient_checkpointing_with_dropout_is_refused(device: torch.device) -> None:
    model = build("gpt2", device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with graphstep.attach(model), pytest.raises(CaptureError, match="recompute with dropout"):
        steps(3)(Loop(model, device))


def test_microbatches_and_other_shapes(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for length in (12, 12, 8, 8, 8, 12):
            loop.step(3, length=length)
        loop.step(2, num_rows=1)  # the last, short batch

    for family in ("llama", "qwen3_moe"):
        report = twins(family, device, script)
        assert report.rows[0].num_signatures == 2
        assert report.rows[0].num_replays == 3 * (1 + 1 + 1) + 0
        assert "other-signature" in eager_reasons(report)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_router_losses(device: torch.device, family: str) -> None:
    """The logits of routers are collected by hooks inside of the graphs."""
    report = twins(family, device, steps(6, output_router_logits=True))
    assert all(row.num_replays == 5 for row in report.rows)
    report = twins(family, device, steps(6), output_router_logits=True)  # in the configuration
    assert all(row.num_replays == 5 for row in report.rows)


@pytest.mark.parametrize("what", ["output_hidden_states", "output_attentions", "output_router_logits"])
def test_collected_outputs_are_those_of_the_call(device: torch.device, what: str) -> None:
    found = []
    for graphs in (False, True):
        model = build("qwen3_moe", device, attn_implementation="eager")
        manager = graphstep.attach(model) if graphs else None
        loop = Loop(model, device)
        for _ in range(4):
            loop.step(**{what: True})
        tokens = loop.tokens()
        result = model(input_ids=tokens, labels=tokens, **{what: True})
        found.append([value.detach().clone() for value in result[what.removeprefix("output_")]])
        result.loss.backward()
        if manager is not None:
            assert manager.report().rows[0].num_replays == 4
            manager.close()
    assert len(found[0]) >= 3
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def test_a_cache_that_nobody_asked_for_is_left_out(device: torch.device) -> None:
    model = build("llama", device)
    assert model.config.use_cache
    tokens = torch.arange(8, device=device)[None]
    assert model(tokens).past_key_values is not None
    with graphstep.attach(model):
        assert model(tokens).past_key_values is None
        assert model(tokens, return_dict=False)[0].shape == (1, 8, 64)
        with torch.no_grad():
            assert model(tokens).past_key_values.get_seq_length() == 8
    assert model(tokens).past_key_values.get_seq_length() == 8


def test_a_copy_of_the_model_is_a_plain_one(device: torch.device) -> None:
    model = build("llama", device)
    tokens = torch.arange(8, device=device)[None]
    with graphstep.attach(model):
        steps(3)(Loop(model, device))
        twin = copy.deepcopy(model)
        assert twin(tokens).past_key_values.get_seq_length() == 8
        assert torch.equal(twin(tokens).logits, model(tokens).logits)
    assert twin(tokens).past_key_values.get_seq_length() == 8


def test_steps_are_verified_without_that_cache_too(device: torch.device) -> None:
    """With it, attention with dropout draws and rounds otherwise."""
    model = build("gpt2", device, attn_pdrop=0.1)
    rows = [torch.randint(3, 64, (2, 12), device=device) for _ in range(2)]
    report = graphstep.verify(model, [{"input_ids": row, "labels": row} for row in rows], num_steps=2, bisected=False)
    assert report.equal, str(report)
    assert report.num_replays == 2 * 3


class Drifting(nn.Linear):
    """Scales by a number that the host counts."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.hidden.count())


class DriftingGradient(nn.Linear):
    """The same in its backward."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * (1 + self.hidden.count() % 3))
        return result


def test_a_fault_is_found_where_graphs_compute_less_again_than_python(device: torch.device) -> None:
    model = build("qwen3_moe", device, num_hidden_layers=2)
    model.model.layers[1].self_attn.o_proj = DriftingGradient().to(device)
    model.gradient_checkpointing_enable()
    rows = [torch.randint(3, 64, (1, 4), device=device) for _ in range(3)]
    with graphstep.attach(model) as manager:
        report = graphstep.verify(manager, [{"input_ids": row, "labels": row} for row in rows])
    assert report.first is not None
    assert (report.first.module, report.first.part) == ("model.layers.1.self_attn.o_proj", Part.GRADIENT)


def test_a_fault_is_found_in_a_layer_that_runs_in_parts(device: torch.device) -> None:
    model = build("qwen3_moe", device, num_hidden_layers=1)
    model.model.layers[0].self_attn.o_proj = Drifting().to(device)
    rows = [torch.randint(3, 64, (1, 4), device=device) for _ in range(2)]
    report = graphstep.verify(model, [{"input_ids": row, "labels": row} for row in rows], num_steps=1)
    assert report.first is not None
    assert (report.first.module, report.first.part) == ("model.layers.0.self_attn.o_proj", Part.FORWARD)


def test_a_cache_that_is_asked_for_is_filled(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        steps(3, use_cache=True)(loop)
        result = loop.model(loop.tokens(), use_cache=True)
        loop.trace += [layer.keys.detach().clone() for layer in result.past_key_values.layers]

    report = twins("llama", device, script)
    assert eager_reasons(report) == {"stateful-argument"}


def test_a_filled_cache_is_read(device: torch.device) -> None:
    """Training behind a prefix."""

    def script(loop: Loop) -> None:
        for _ in range(3):
            with torch.no_grad():
                prefix = loop.model(loop.tokens(length=4), use_cache=True).past_key_values
            loop.step(past_key_values=prefix)

    report = twins("llama", device, script)
    assert eager_reasons(report) == {"stateful-argument", "evaluation"}


def test_evaluation_between_the_steps(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for _ in range(4):
            loop.step()
            loop.model.eval()
            with torch.no_grad():
                loop.trace.append(loop.model(loop.tokens()).logits.clone())
            loop.model.train()

    for family in ("qwen3_moe", "mamba2"):
        report = twins(family, device, script)
        assert all(row.num_replays == 3 for row in report.rows)
        assert eager_reasons(report) == {"observed", "evaluation"}


def test_autocast(device: torch.device) -> None:
    def prepare(model: Any) -> Any:
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
        return model

    for family in ("llama", "qwen3_moe"):
        report = twins(family, device, steps(5), prepare=prepare)
        assert all(row.num_replays == 4 for row in report.rows)


def test_closing_leaves_the_model_as_it_was(device: torch.device) -> None:
    model = build("qwen3_moe", device)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    manager = graphstep.attach(model, CudaGraphConfig(impl="local", modules=("attn", "moe_router")))
    steps(3)(Loop(model, device))
    manager.close()
    manager.close()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()} == hooks
