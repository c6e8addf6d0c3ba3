"""Training with graphs and generating with graphs, in turns, in one process and with one set of weights."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.inference.generation import VOCABULARY, build_engine, build_model, greedy, prompts, reference, seeded
from torch import Tensor

import graphstep
from graphstep.config.switches import CudaGraphConfig
from graphstep.inference.engine import CacheMode, DynamicEngine
from graphstep.inference.requests import Request
from graphstep.models import GPTModel
from graphstep.strategies import FullCudaGraphWrapper

NUM_ROUNDS = 5


@pytest.fixture(scope="module", autouse=True)
def objects_of_optimizers_set_aside() -> None:
    """As those of the test run: see conftest.py."""
    importlib.import_module("torch._dynamo")  # what optimizers import when they are first used
    gc.collect()
    gc.freeze()


def batches(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCABULARY, (2, 13), generator=generator).to(device) for _ in range(NUM_ROUNDS)]


def step_of(*, data_iterator: Iterator[Tensor], model: Any, num_microbatches: int, forward_only: bool) -> Tensor:
    losses = []
    for _ in range(num_microbatches):
        tokens = next(data_iterator)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


class Training:
    """A model that is trained, one step at a time."""

    def __init__(self, how: str, kind: str, device: torch.device) -> None:
        self.model = build_model(kind, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []
        self._manager: Any = None
        self._wrapper: Any = None
        if how == "local":
            # A GPU cannot capture the grouped products of experts in fp32.
            modules: Any = ("attn", "moe_router", "moe_preprocess") if kind == "moe" else ()
            self._manager = graphstep.attach(self.model, CudaGraphConfig(impl="local", modules=modules))
        elif how == "full_iteration":
            self._wrapper = FullCudaGraphWrapper(
                step_of, model=self.model, session=graphstep.GraphSession(device), cuda_graph_warmup_steps=1
            )

    def step(self, tokens: Tensor) -> None:
        self.model.train()
        run = step_of if self._wrapper is None else self._wrapper
        given: dict[str, Any] = {} if self._wrapper is not None else {"model": self.model}
        losses = run(data_iterator=iter([tokens]), num_microbatches=1, forward_only=False, **given)
        self.losses.append(float(losses[0]))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.model.eval()

    @property
    def num_replays(self) -> int:
        owner = self._manager or self._wrapper
        return 0 if owner is None else sum(row.num_replays for row in owner.report().rows)

    def close(self) -> None:
        for owner in (self._manager, self._wrapper):
            if owner is not None:
                owner.close()


def twin(model: GPTModel, kind: str, device: torch.device) -> GPTModel:
    """The same weights without anything around them."""
    other = build_model(kind, device)
    other.load_state_dict(model.state_dict())
    return other


def check(model: GPTModel, requests: list[Request]) -> None:
    for request in requests:
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        assert request.output_tokens == reference(model, prompt, request.sampling)


@pytest.mark.parametrize(
    ("how", "scope", "mode"),
    [
        ("local", "layer", None),
        ("local", "block", CacheMode.PERSIST),
        ("local", "block", CacheMode.OFFLOAD),
        ("full_iteration", "block", None),
        ("full_iteration", "layer", CacheMode.RECOMPUTE),
    ],
)
def test_neither_notices_the_other(how: str, scope: str, mode: CacheMode | None, device: torch.device) -> None:
    alone = Training("eager", "llama", device)
    for tokens in batches(device):
        alone.step(tokens)
    beside = Training(how, "llama", device)
    with build_engine(beside.model, scope) as engine:
        for number, tokens in enumerate(batches(device)):
            if mode is not None:
                engine.suspend(mode)
            with engine.weight_update() as update:
                beside.step(tokens)
            assert update.moved == []
            if mode is not None:
                engine.resume()
            settings = [greedy(5), seeded(6, seed=number)]
            check(twin(beside.model, "llama", device), engine.generate(prompts(4, 7, seed=number), settings))
        stats = engine.runner.step_stats
        assert stats.num_replays == len(batches(device)) * 6  # the prompts together, then tokens of the longer one
        assert not stats.eager_calls
    assert beside.losses == alone.losses
    assert all(torch.equal(a, b) for a, b in zip(beside.model.parameters(), alone.model.parameters(), strict=True))
    assert beside.num_replays > 0
    beside.close()


def started(engine: DynamicEngine) -> list[Request]:
    requests = [engine.add_request(p, greedy(9)) for p in prompts(4, 7)]
    for _ in range(3):
        engine.step()
    return requests


@pytest.mark.parametrize("kind", ["moe", "hybrid"])
def test_requests_in_flight_go_on_with_the_trained_weights(kind: str, device: torch.device) -> None:
    training = Training("local", kind, device)
    for tokens in batches(device)[:2]:
        training.step(tokens)
    with build_engine(training.model, "block") as engine:
        requests = started(engine)
        before = [request.tokens.tolist() for request in requests]
        with engine.weight_update():
            training.step(batches(device)[3])
        assert engine.runner.graphs
        while engine.has_work:
            engine.step()
        model = twin(training.model, kind, device)
        for request, tokens in zip(requests, before, strict=True):
            rest = request.tokens.tolist()[len(tokens) :]
            assert rest == reference(model, tokens, greedy(len(rest)))
    training.step(batches(device)[4])
    training.close()


def test_training_that_ends_leaves_the_engine_its_graphs(device: torch.device) -> None:
    training = Training("local", "llama", device)
    with build_engine(training.model, "block") as engine:
        for tokens in batches(device)[:4]:
            with engine.weight_update():
                training.step(tokens)
            engine.generate(prompts(4, 7), greedy(6))
        num_graphs = len(engine.runner.graphs)
        training.close()
        check(twin(training.model, "llama", device), engine.generate(prompts(4, 7), greedy(6)))
        assert len(engine.runner.graphs) == num_graphs
