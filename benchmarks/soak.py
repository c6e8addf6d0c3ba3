"""Does a long job of whole captured steps equal the eager one, bit for bit, on this machine?

A job trains a tiny GPT for many steps: the number of microbatches alternates between two, the learning rate follows a
schedule, validation runs every few steps, the optimizer is in the step. Half-way the job is saved, closed, built anew
from the checkpoint and goes on with new graphs; at three quarters the same checkpoint is loaded into the running job.
Batches come from host memory. It runs eagerly, with `FullCudaGraphWrapper` and with `graph_step`, from the same seed.

What is measured: equality of the losses of all steps and validations, which are kept as tensors until the end, and of
weights, optimizer state and random state after the last step. Beside it the seconds of each arm, its captures and why
it ran eagerly when it did, and the memory that is allocated after a quarter and at the end, which must not grow.
Kernels are deterministic ones. Prints a table and one line of JSON, and writes
`soak-<device>-<date>-<commit>.json`. The exit code is 1 if an arm differs.

Usage: PYTHONPATH=src CUBLAS_WORKSPACE_CONFIG=:4096:8 python benchmarks/soak.py [--num-steps N] [--bf16]
           [--device cpu|cuda] [--output DIR]
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common.environment import command_line, commit, describe_machine
from common.record import rounded, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import graphstep
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.config.model import ModelConfig
from graphstep.models import GPTModel
from graphstep.strategies import FullCudaGraphWrapper
from graphstep.training.determinism import deterministic_algorithms, random_state, restore_random_state
from graphstep.training.step import forward_backward_no_pipelining

ARMS = ("eager", "full_iteration", "graph_step")
MICROBATCHES = (2, 3)
STEPS_OF_A_KIND = 20
VALIDATED_EVERY = 10
BATCH, SEQUENCE, VOCABULARY = 2, 16, 64
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=64,
    seq_length=SEQUENCE,
    max_position_embeddings=SEQUENCE,
    vocab_size=VOCABULARY,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)

Batch = dict[str, Tensor]


class Job:
    """One process of training: what a restart makes anew.

    Args:
        arm: how steps run.
        device: where.
        bf16: forward under autocast.
        seed: of the weights and of dropout.
    """

    def __init__(self, arm: str, device: torch.device, *, bf16: bool, seed: int) -> None:
        self._device, self._bf16 = device, bf16
        self.model = GPTModel(CONFIG, generator=torch.Generator().manual_seed(seed)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.1, fused=True)
        torch.manual_seed(seed)
        self._session = GraphSession(device)
        self._is_graphed = arm != "eager"
        self._train: Any = self._step
        self._validate: Any = self._losses
        if arm == "full_iteration":
            wrapper = FullCudaGraphWrapper(
                self._whole, model=self.model, session=self._session, optimizers=[self.optimizer]
            )
            self._train = lambda batches: wrapper(data_iterator=iter(batches), num_microbatches=len(batches))
            self._validate = lambda batches: wrapper(
                data_iterator=iter(batches), num_microbatches=len(batches), forward_only=True
            )
        elif arm == "graph_step":
            self._train = graphstep.graph_step(self._step, session=self._session)
            self._validate = graphstep.graph_step(self._losses, session=self._session)

    def train(self, batches: list[Batch], lr: float) -> Tensor:
        """One step; returns the losses of its microbatches."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        losses: Tensor = self._train(self._given(batches))
        return losses

    def validate(self, batches: list[Batch]) -> Tensor:
        """Losses in evaluation mode."""
        self.model.eval()
        losses: Tensor = self._validate(self._given(batches))
        self.model.train()
        return losses

    def save(self) -> bytes:
        """A checkpoint."""
        file = io.BytesIO()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "random": random_state(self._device)}, file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        """Go on from there."""
        state = torch.load(io.BytesIO(checkpoint), map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_random_state({key: value.cpu() for key, value in state["random"].items()}, self._device)

    def report(self) -> CaptureReport:
        """What was captured."""
        return self._session.report()

    def close(self) -> None:
        """Free the graphs."""
        self._session.close()

    def _given(self, batches: list[Batch]) -> list[Batch]:
        """Graphs take batches from the host as they are."""
        if self._is_graphed:
            return batches
        return [{key: value.to(self._device) for key, value in batch.items()} for batch in batches]

    def _whole(self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool, model: Any) -> Tensor:
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        return self._losses(batches) if forward_only else self._step(batches)

    def _step(self, batches: list[Batch]) -> Tensor:
        self.optimizer.zero_grad()
        losses = self._run(batches, forward_only=False)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return losses

    def _losses(self, batches: list[Batch]) -> Tensor:
        return self._run(batches, forward_only=True)

    def _run(self, batches: list[Batch], *, forward_only: bool) -> Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16):
            return forward_backward_no_pipelining(
                data_iterator=iter(batches),
                model=self.model,
                num_microbatches=len(batches),
                forward_only=forward_only,
            )


def batches_of(step: int, number: int, *, is_validation: bool = False) -> list[Batch]:
    """Microbatches in host memory, the same in each run."""
    data = torch.Generator().manual_seed(2 * step + is_validation)
    drawn = [torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=data) for _ in range(number)]
    return [{"tokens": each[:, :-1].contiguous(), "labels": each[:, 1:].contiguous()} for each in drawn]


def rate_of(step: int, num_steps: int) -> float:
    """A cosine, in numbers that fp32 holds: what a graph has."""
    return float(torch.tensor(1e-3 * (0.55 + 0.45 * math.cos(math.pi * step / num_steps)), dtype=torch.float32))


def run(arm: str, device: torch.device, num_steps: int, *, bf16: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One arm: what is told of it, and everything that is compared."""
    started = time.perf_counter()
    job = Job(arm, device, bf16=bf16, seed=1)
    losses: dict[str, Tensor] = {}
    reports: list[CaptureReport] = []
    allocated: dict[str, int] = {}
    checkpoint = b""
    for step in range(num_steps):
        if step == num_steps // 2:
            checkpoint = job.save()
            reports.append(job.report())
            job.close()
            job = Job(arm, device, bf16=bf16, seed=2)
            job.load(checkpoint)
        elif step == num_steps * 3 // 4:
            job.load(checkpoint)
        number = MICROBATCHES[step // STEPS_OF_A_KIND % len(MICROBATCHES)]
        losses[f"step {step}"] = job.train(batches_of(step, number), rate_of(step, num_steps))
        if step % VALIDATED_EVERY == VALIDATED_EVERY - 1:
            batches = batches_of(step, MICROBATCHES[0], is_validation=True)
            losses[f"validation after step {step}"] = job.validate(batches)
        if device.type == "cuda" and step in (num_steps // 4, num_steps - 1):
            kept = sum(-(-loss.untyped_storage().nbytes() // 512) * 512 for loss in losses.values())
            allocated[f"after step {step}"] = torch.cuda.memory_allocated(device) - kept
    reports.append(job.report())
    found = {key: value.cpu() for key, value in losses.items()}
    found.update((f"weight {name}", value.detach().cpu()) for name, value in job.model.state_dict().items())
    for index, state in enumerate(job.optimizer.state.values()):
        found.update((f"optimizer state {index}.{key}", value.cpu()) for key, value in state.items())
    found.update((f"random state of {name}", state) for name, state in random_state(device).items())
    job.close()
    rows = [row for report in reports for row in report.rows]
    facts = {
        "name": arm,
        "seconds": time.perf_counter() - started,
        "num_replays": sum(row.num_replays for row in rows),
        "num_recordings": sum(report.num_recordings for report in reports),
        "capture_seconds": sum(report.capture_seconds for report in reports),
        "eager_calls": {},
        "allocated_bytes": allocated,
        "last_loss": float(found[f"step {num_steps - 1}"].mean()),
    }
    for row in rows:
        for reason, count in row.eager_calls.items():
            facts["eager_calls"][str(reason)] = facts["eager_calls"].get(str(reason), 0) + count
    return facts, found


def first_difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> str | None:
    """The name of the first value that is not the same bits, or None."""
    if mine.keys() != theirs.keys():
        return "other values than eager has"
    for name, value in mine.items():
        if value.dtype != theirs[name].dtype or not torch.equal(value, theirs[name]):
            return name
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run all arms; exit code 1 if one differs from eager."""
    words = list(sys.argv[1:] if argv is None else argv)
    started = datetime.now(UTC)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--bf16", action="store_true", help="forward under autocast to bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    own = parser.parse_args(words)
    device = torch.device(own.device)
    console, arms, expected = Console(), [], {}
    with deterministic_algorithms(True):
        for arm in ARMS:
            facts, found = run(arm, device, own.num_steps, bf16=own.bf16)
            expected = expected or found
            facts["difference"] = first_difference(found, expected)
            facts["is_equal"] = facts["difference"] is None
            arms.append(facts)
            console.print(f"{arm}: {facts['seconds']:.1f} s, {facts['difference'] or 'equal'}")
    record = {
        "schema": 1,
        "benchmark": "soak",
        "started": started.isoformat(timespec="seconds"),
        "command": command_line("benchmarks/soak.py", words),
        "commit": commit(),
        "machine": describe_machine(device),
        "num_steps": own.num_steps,
        "precision": "bf16" if own.bf16 else "fp32",
        "arms": arms,
    }
    record = rounded(record)
    console.print(_table(record))
    print(f"results: {write_results(record, own.output, now=started)}", file=sys.stderr)
    print(json.dumps(record, separators=(",", ":")))
    return 0 if all(arm["is_equal"] for arm in arms) else 1


def _table(record: dict[str, Any]) -> Table:
    title = f"{record['num_steps']} steps of whole graphs against eager ones, {record['precision']}, bit for bit"
    table = Table(title=title, title_justify="left")
    for name in ("arm", "equal", "seconds", "replays", "eager calls", "first difference"):
        table.add_column(name)
    for arm in record["arms"]:
        counts = str(sum(arm["eager_calls"].values()))
        equal = "yes" if arm["is_equal"] else "no"
        table.add_row(
            arm["name"], equal, str(arm["seconds"]), str(arm["num_replays"]), counts, arm["difference"] or "-"
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
