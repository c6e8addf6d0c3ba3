"""Loops wired by hand with ``make_graphed_callables``, each with an eager twin that must leave the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tests.strategies.runs import differences
from torch import Tensor, nn
from torch.nn import functional

import graphstep
from graphstep.capture.reasons import EagerReason
from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.capture.tree import flatten

HIDDEN, SIZE = 8, 3
NUM_STEPS = 5
DTYPES = [torch.float32, torch.bfloat16]


class Block(nn.Module):
    """Dropout, and buffers that it updates."""

    mean: Tensor
    num_calls: Tensor

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.25)
                self.num_calls.add_(1)
        hidden = functional.gelu(self.up(self.norm(x) - self.mean))
        result: Tensor = x + self.dropout(self.down(hidden))
        return result


class Job:
    """One run of a script; ``graphs`` says whether it is the eager twin."""

    def __init__(self, device: torch.device, graphs: bool, dtype: torch.dtype) -> None:
        self.device, self.graphs, self.dtype = device, graphs, dtype
        torch.manual_seed(0)
        self.data = torch.Generator().manual_seed(1)
        self.models: list[nn.Module] = []
        self.trace: list[dict[str, Any]] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.handles: list[Any] = []
        """One of each group of callables that were given together: it has ``reset`` and ``report``."""

    def built(self, build: Callable[[], nn.Module]) -> Any:
        """A model whose parameters, gradients and buffers are noted in each step."""
        model = build().to(self.device, self.dtype)
        self.models.append(model)
        return model

    def draw(self, *shape: int, requires_grad: bool = False) -> Tensor:
        drawn = torch.randn(shape or (SIZE, HIDDEN), generator=self.data)
        return drawn.to(self.device, self.dtype).requires_grad_(requires_grad)

    def sample(self, *shape: int, requires_grad: bool = False) -> Tensor:
        """Not from the data, which are the same for both twins."""
        filled = torch.full(shape or (SIZE, HIDDEN), 0.5, device=self.device, dtype=self.dtype)
        return filled.requires_grad_(requires_grad)

    def graphed(self, callables: Any, sample_args: Any, *more: Any, **options: Any) -> Any:
        """What replays, or for the eager twin what it stands for."""
        if not self.graphs:
            return callables if options.get("_order") is None else eager_places(callables, options)
        made = graphstep.make_graphed_callables(callables, sample_args, *more, **options)
        self.handles.append(one_of(made))
        return made

    def optimizer(self, lr: float = 0.05) -> torch.optim.Optimizer:
        parameters = dict.fromkeys(p for model in self.models for p in model.parameters() if p.requires_grad)
        return torch.optim.AdamW(list(parameters), lr=lr, weight_decay=0.1)

    def note(self, **found: Any) -> None:
        """Everything that there is to see now; ``found`` are tensors in any nesting."""
        taken: dict[str, Any] = {"rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            taken["cuda rng"] = torch.cuda.get_rng_state(self.device)
        for name, value in found.items():
            tensors, _ = flatten(value)
            taken.update((f"{name} {index}", tensor.detach().clone()) for index, tensor in enumerate(tensors))
            taken[f"number of {name}"] = torch.tensor(len(tensors))
            taken.update((f"{name} {i} grad", _copy(t.grad)) for i, t in enumerate(tensors) if t.is_leaf)
        for number, model in enumerate(self.models):
            taken.update((f"{number}.{name}", value.detach().clone()) for name, value in model.state_dict().items())
            for name, parameter in model.named_parameters():
                taken[f"{number}.{name}.grad"] = _copy(parameter.grad)
                taken[f"{number}.{name}.main_grad"] = _copy(getattr(parameter, "main_grad", None))
        self.trace.append(taken)

    def keep(self, *tensors: Tensor | None) -> None:
        """To be the same for ever."""
        self.kept += [(tensor, tensor.detach().clone()) for tensor in tensors if tensor is not None]

    @property
    def report(self) -> CaptureReport:
        report: CaptureReport = self.handles[-1].report()
        return report

    @property
    def rows(self) -> list[RegionStats]:
        """All callables of all groups."""
        return [row for handle in self.handles for row in handle.report().rows]

    def reasons(self) -> dict[str, int]:
        """Eager calls by the code of their reason."""
        found: dict[str, int] = {}
        for row in self.rows:
            for reason, count in row.eager_calls.items():
                code = reason.code if isinstance(reason, EagerReason) else reason
                found[code] = found.get(code, 0) + count
        return found

    def close(self) -> None:
        for handle in self.handles:
            handle.reset()
            assert handle.report().pool_bytes == 0

    def train(
        self,
        model: Callable[..., Any],
        feed: Callable[[], Sequence[Any]] | None = None,
        *,
        num_steps: int = NUM_STEPS,
        num_microbatches: int = 1,
        before: Callable[[int], Any] | None = None,
        set_to_none: bool = True,
    ) -> None:
        """The loop of a tutorial."""
        optimizer = self.optimizer()
        for step in range(num_steps):
            if before is not None:
                before(step)
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(num_microbatches):
                arguments = feed() if feed is not None else (self.draw(requires_grad=True),)
                result = model(*arguments)
                loss_of(result).backward()
                self.note(arguments=arguments, result=result)
                del result  # What is still held at the next call is the subject of tests of its own.
            optimizer.step()
        self.note()


def compared(
    device: torch.device, script: Callable[[Job], Any], *, dtype: torch.dtype = torch.float32, replays: int | None = -1
) -> Job:
    """Run ``script`` eagerly and with graphs, and insist on the same bits. Returns the closed job with graphs.

    ``replays``: how many replays there must be; by default one at least, ``None`` for any number.
    """
    jobs = []
    for graphs in (False, True):
        job = Job(device, graphs, dtype)
        script(job)
        jobs.append(job)
        assert job.trace, "the script noted nothing"
        for number, (tensor, as_it_was) in enumerate(job.kept):
            assert torch.equal(tensor.detach(), as_it_was), f"kept tensor {number} changed (graphs: {graphs})"
    different = differences(jobs[0].trace, jobs[1].trace)
    assert not different, different[:6]
    if replays is not None:
        found = sum(row.num_replays for row in jobs[1].rows)
        assert found == replays if replays >= 0 else found > 0, jobs[1].reasons()
    jobs[1].close()
    return jobs[1]


def loss_of(result: Any) -> Tensor:
    tensors = [tensor for tensor in flatten(result)[0] if tensor.requires_grad]
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def eager_places(callables: Any, options: Mapping[str, Any]) -> list[Any]:
    """The callables in the order of samples: chunk, microbatch, layer."""
    given = list(callables) if isinstance(callables, (tuple, list)) else [callables]
    order = options["_order"]
    num_chunks = int(max(abs(entry) for entry in order))
    sizes = options.get("_num_layers_per_chunk") or [len(given) // num_chunks] * num_chunks
    num_microbatches = sum(entry == 1 for entry in order)
    places, first = [], 0
    for size in sizes:
        places += given[first : first + size] * num_microbatches
        first += size
    return places


def one_of(made: Any) -> Any:
    """Something that has ``reset`` and ``report``."""
    first = made[0] if isinstance(made, (tuple, list)) else made
    return first.forward if isinstance(first, nn.Module) else first


@contextmanager
def nothing_is_replayed(handle: Any, *models: nn.Module) -> Iterator[None]:
    """Within, no replay happens and no buffer, parameter or generator changes."""
    before = [value.detach().clone() for model in models for value in model.state_dict().values()]
    replays = [row.num_replays for row in handle.report().rows]
    generator = torch.get_rng_state()
    yield
    now = [value for model in models for value in model.state_dict().values()]
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
    assert [row.num_replays for row in handle.report().rows] == replays
    assert torch.equal(torch.get_rng_state(), generator)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
