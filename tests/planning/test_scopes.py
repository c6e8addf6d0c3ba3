"""Which part of a step runs, forward and backward."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
import torch
from tests.coverage.documents import Loop, Model
from torch import Tensor, nn

from graphstep.config import from_argv
from graphstep.planning import parts_of
from graphstep.planning.operations import StepLog, log_step
from graphstep.planning.scopes import ITERATION, OPTIMIZER, OUTSIDE, Scopes
from graphstep.training.setup import build_model, with_vocabulary


def log_of(loop: Loop) -> StepLog:
    loop()

    def run(scopes: Scopes) -> None:
        with scopes.installed(loop.model, [part.path for part in parts_of(loop.model)]):
            loop()

    return log_step(run, loop.device, (*loop.model.parameters(), *loop.model.buffers()))


def test_forward_and_backward_go_through_the_parts_in_opposite_order() -> None:
    log = log_of(Loop(Model(2)))
    seen = [(each.scope, each.is_backward) for each in log.operations]
    layers = [
        (scope.split(".")[1], is_backward) for (scope, is_backward), _ in groupby(seen) if scope.startswith("layers.")
    ]
    assert [layer for layer, _ in groupby(layers)] == [("0", False), ("1", False), ("1", True), ("0", True)]
    assert log.num_microbatches == 1


def test_every_operation_belongs_to_the_module_that_runs_it() -> None:
    log = log_of(Loop(Model(2)))
    names: dict[tuple[str, bool], Counter[str]] = {}
    for each in log.operations:
        names.setdefault((each.scope, each.is_backward), Counter())[each.name.split("::")[1].split(".")[0]] += 1
    for layer in ("layers.0", "layers.1"):
        assert names[f"{layer}.up", False] == Counter(addmm=1)
        assert names[f"{layer}.down", False] == Counter(addmm=1)
        assert names[layer, False] == Counter(relu=1, add=1)
        assert names[f"{layer}.down", True]["mm"] == names[f"{layer}.up", True]["mm"] == 2
        assert names[layer, True]["threshold_backward"] == 1
    assert names[ITERATION, False]["addmm"] == 2  # first and head
    assert {scope for scope, is_backward in names if is_backward} >= {ITERATION, "layers.0.up"}
    assert sum(names[OPTIMIZER, False].values()) > 5


def test_zeroed_gradients_and_batches_are_outside() -> None:
    loop = Loop()
    log = log_of(loop)
    assert [each.name for each in log.operations if each.scope == OUTSIDE] == ["aten::ones"]
    assert not any(each.scope == OUTSIDE and "mm" in each.name for each in log.operations)


def test_a_part_at_the_end_of_another_keeps_its_backward() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.linear(x))

    model = Model(2)
    model.layers = nn.ModuleList(Normed() for _ in range(2))
    log = log_of(Loop(model))
    norms = [each.scope for each in log.operations if "layer_norm_backward" in each.name]
    assert norms == ["layers.1.norm", "layers.0.norm"]


def test_microbatches_are_counted() -> None:
    model = Model(2)

    def run(scopes: Scopes) -> None:
        with scopes.installed(model, ["layers.0"]):
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()

    log = log_step(run, torch.device("cpu"), model.parameters())
    assert log.num_microbatches == 3
    assert [entry.microbatch for entry in log.entries if entry.scope == "layers.0"] == [0, 1, 2]


def test_segments_of_layers_are_parts() -> None:
    config = from_argv(
        [
            *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
            *("--vocab-size", "128", "--attention-dropout", "0", "--hidden-dropout", "0"),
        ]
    )
    model = build_model(with_vocabulary(config, 128), device=torch.device("cpu"))
    tokens = torch.zeros(2, 8, dtype=torch.int64)

    def run(scopes: Scopes) -> None:
        with scopes.installed(model, [part.path for part in parts_of(model)]):
            model(tokens, tokens).backward()

    log = log_step(run, torch.device("cpu"), model.parameters())
    scopes = {each.scope for each in log.operations}
    assert scopes == {ITERATION, *(f"layers.{n}.{name}" for n in (0, 1) for name in ("attention", "mlp"))}
    both = {(each.scope, each.is_backward) for each in log.operations}
    assert len(both) == 2 * len(scopes)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_model(fails: bool) -> None:
    loop = Loop()
    scopes = Scopes()
    x = torch.ones(2, 8, requires_grad=True)

    def use() -> None:
        with scopes.installed(loop.model, ["layers.0", "layers.0.up"]):
            loop.model(x).sum().backward()
            if fails:
                raise ValueError("inside")

    if fails:
        with pytest.raises(ValueError, match="inside"):
            use()
    else:
        use()
    for module in loop.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "segments" not in module.__dict__
    assert not x._backward_hooks
    assert scopes.current == OUTSIDE
    before = scopes.current
    loop()
    assert scopes.current == before  # The hooks on optimizers are gone as well.


def test_following_changes_no_number() -> None:
    torch.manual_seed(0)
    plain, followed = Loop(Model(2)), Loop(Model(2))
    followed.model.load_state_dict(plain.model.state_dict())
    for _ in range(2):
        plain()
        log_of_step = Scopes()
        with log_of_step.installed(followed.model, [part.path for part in parts_of(followed.model)]):
            followed()
    for (name, a), b in zip(plain.model.state_dict().items(), followed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_arguments_and_results_are_found_in_any_nesting() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, *, given: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
            return {"result": self.inner(given["x"][0]) * given["x"][1]}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Named() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            factor = x.mean() + 1
            for layer in self.layers:
                x = layer(given={"x": (x, factor)})["result"]
            return x

    log = log_of(Loop(Outer()))
    scopes = [each.scope for each in log.operations if each.is_backward and each.name.startswith("aten::mm")]
    assert scopes == ["layers.1.inner", "layers.1.inner", "layers.0.inner"]
    first = next(entry for entry in log.entries if entry.scope == "layers.0")
    assert first.nbytes == (128, 4)
