"""How long does a decode step of the inference engine take, and how far is that from the time its own kernels need?

Method. One model with random weights; for each number of requests and each scope of graphs a new engine over it, with
all its graphs captured before the first request. As many prompts of ``--prompt`` random tokens are added at once. Once
all have their first token, every step is a decode step of all of them: `DynamicEngine.step`, which schedules, copies
the step's description, launches the forward, draws the most likely tokens and waits for them. Steps are timed one by
one by the wall clock, after ``NUM_WARMUP_STEPS``; some later ones are profiled for their device time. Arms run in
order, then in the opposite order, built anew. Tokens of all arms are compared: kernels are the same in all scopes, so
that they have to be equal.

Not in the time: prompts, captures, text.

    PYTHONPATH=src python benchmarks/decode_step.py [options]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import torch
from common.clocks import Spread, free_memory, synchronize
from common.device_time import DeviceTime, profile_steps, start_profiler
from common.environment import gpu_state, provenance
from common.options import Words, common_parser, count, output_folder, read_model
from common.record import failure, rounded, write_results
from common.table import wide_console
from rich.table import Table

from graphstep.cli.problems import print_error, print_notices
from graphstep.config import InferenceConfig, InferenceCudaGraphScope, RunConfig
from graphstep.errors import UserInputError
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.requests import SamplingParams
from graphstep.models import GPTModel
from graphstep.training.setup import preflight

LLAMA_1B: Final[Words] = {
    "--num-layers": "16",
    "--hidden-size": "2048",
    "--num-attention-heads": "32",
    "--group-query-attention": "",
    "--num-query-groups": "8",
    "--ffn-hidden-size": "8192",
    "--vocab-size": "128256",
    "--seq-length": "2048",
    "--max-position-embeddings": "2048",
    "--position-embedding-type": "rope",
    "--rotary-base": "500000",
    "--normalization": "RMSNorm",
    "--swiglu": "",
    "--disable-bias-linear": "",
    "--micro-batch-size": "1",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
}
NUM_WARMUP_STEPS = 10
_FLAGS: Final = ("--group-query-attention", "--swiglu", "--disable-bias-linear")


@dataclass(kw_only=True)
class DecodePass:
    """One engine, timed."""

    step_ms: list[float]
    capture_seconds: float
    pool_bytes: int
    num_graphs: int
    tokens: list[list[int]]
    device_time: DeviceTime | None


@dataclass(kw_only=True)
class DecodeRecord:
    """Everything measured of one scope and number of requests."""

    scope: str
    num_requests: int
    status: str = "ok"
    reason: str = ""
    passes: list[DecodePass] = field(default_factory=list)

    @property
    def step(self) -> Spread:
        """Milliseconds of all passes."""
        return Spread.of([ms for timed in self.passes for ms in timed.step_ms])

    @property
    def device_ms(self) -> float | None:
        """Kernels, copies and memsets of a step, added up."""
        found = [timed.device_time.sum_ms for timed in self.passes if timed.device_time is not None]
        return statistics.fmean(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, without the tokens."""
        median = self.step.median if self.passes else None
        return {
            "scope": self.scope,
            "num_requests": self.num_requests,
            "status": self.status,
            "reason": self.reason,
            "step_ms": dataclasses.asdict(self.step) if self.passes else None,
            "device_ms": self.device_ms,
            "over_device_time": median / self.device_ms if median and self.device_ms else None,
            "tokens_per_second": self.num_requests / median * 1e3 if median else None,
            "passes": [
                {
                    "step_ms": dataclasses.asdict(Spread.of(timed.step_ms)),
                    "capture_seconds": timed.capture_seconds,
                    "pool_bytes": timed.pool_bytes,
                    "num_graphs": timed.num_graphs,
                    "device_time": None if timed.device_time is None else dataclasses.asdict(timed.device_time),
                }
                for timed in self.passes
            ],
        }


def measure(
    model: GPTModel, scope: str, num_requests: int, *, prompt: int, num_steps: int, num_profiled: int
) -> DecodePass:
    """Build an engine and time its decode steps.

    Raises:
        RuntimeError: a decode step ran without its graph.
    """
    num_tokens = 1 + NUM_WARMUP_STEPS + num_steps + num_profiled
    options = InferenceConfig(
        inference_dynamic_batching_max_requests=num_requests,
        inference_dynamic_batching_max_tokens=max(2048, prompt, num_requests),
        decode_only_cuda_graphs=True,
    )
    blocks = num_requests * -(-(prompt + num_tokens + 1) // options.inference_dynamic_batching_block_size) + 1
    config = EngineConfig(
        inference=options,
        scope=InferenceCudaGraphScope(scope),
        is_required=True,
        num_blocks=blocks + num_requests,
        prefix_caching=False,
    )
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(1)
    start_profiler(device)
    with DynamicEngine(model, config) as engine:
        requests = [
            engine.add_request(
                torch.randint(model.config.vocab_size, (prompt,), generator=generator).tolist(),
                SamplingParams(temperature=0, max_new_tokens=num_tokens + 1),
            )
            for _ in range(num_requests)
        ]
        while any(request.is_prefilling for request in requests):
            engine.step()
        for _ in range(NUM_WARMUP_STEPS):
            engine.step()
        synchronize(device)
        before = engine.runner.step_stats.num_replays
        times = []
        for _ in range(num_steps):
            started = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - started) * 1e3)
        device_time = profile_steps(lambda _: engine.step(), device, num_steps=num_profiled)
        replayed = engine.runner.step_stats.num_replays - before
        if scope != "none" and replayed < num_steps:
            raise RuntimeError(f"{num_steps - replayed} of {num_steps} steps ran without their graph")
        graphs = engine.runner.graphs
        return DecodePass(
            step_ms=times,
            capture_seconds=sum(each.capture_seconds for each in graphs),
            pool_bytes=engine.report().pool_bytes,
            num_graphs=len(graphs),
            tokens=[request.output_tokens[: 1 + NUM_WARMUP_STEPS + num_steps] for request in requests],
            device_time=device_time,
        )


def run(
    model: GPTModel, given: argparse.Namespace, *, prompt: int, num_steps: int, num_profiled: int
) -> list[DecodeRecord]:
    """Measure all arms, in order and then in the opposite order, and compare their tokens."""
    records = [DecodeRecord(scope=scope, num_requests=number) for number in given.requests for scope in given.scopes]
    for order in (records, records[::-1]):
        for record in order:
            if record.status != "ok":
                continue
            print(f"timing: {record.scope}, {record.num_requests} requests", file=sys.stderr, flush=True)
            try:
                timed = measure(
                    model,
                    record.scope,
                    record.num_requests,
                    prompt=prompt,
                    num_steps=num_steps,
                    num_profiled=num_profiled,
                )
                record.passes.append(timed)
            except Exception as error:  # whatever an arm does, the others are to go on
                traceback.print_exc()
                record.status, record.reason = "failed", failure("timing", error)
            free_memory(model.embedding.weight.device)
    first: dict[int, list[list[int]]] = {}
    for record in records:
        for timed in record.passes:
            if first.setdefault(record.num_requests, timed.tokens) != timed.tokens:
                record.status, record.reason = "failed", "its tokens differ from those of the first scope"
    return records


def render(records: Sequence[DecodeRecord], *, title: str) -> Table:
    """Return the table; times in milliseconds a step."""
    table = Table(title=title, title_justify="left")
    headings = ("requests", "step ms\np10-p90", "device ms\nlaunches", "step/\ndevice", "tokens/s", "graphs\ncapture s")
    for name in ("scope", *headings):
        table.add_column(name, justify="right")
    for record in records:
        if not record.passes:
            table.add_row(record.scope, str(record.num_requests), record.status)
            continue
        step, device, timed = record.step, record.device_ms, record.passes[0]
        launches = "" if timed.device_time is None else f"\n{timed.device_time.num_launches:.0f}"
        table.add_row(
            record.scope,
            str(record.num_requests),
            f"{step.median:.3f}\n{step.p10:.3f}-{step.p90:.3f}",
            "-" if device is None else f"{device:.3f}{launches}",
            "-" if device is None else f"{step.median / device:.2f}",
            f"{record.num_requests / step.median * 1e3:.0f}",
            f"{timed.num_graphs}\n{timed.capture_seconds:.2f}",
        )
    return table


def read_options(argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Read the command line.

    Raises:
        UserInputError: all problems with the options of the model.
        SystemExit: ``--help``, or an option of the benchmark that cannot be read (code 2).
    """
    scopes = tuple(scope.value for scope in InferenceCudaGraphScope)
    parser = common_parser(
        "decode_step", "Times decode steps of the inference engine. The model is Llama 1B unless options say otherwise."
    )
    parser.add_argument("--scopes", nargs="+", choices=scopes, default=scopes, metavar="SCOPE", help=", ".join(scopes))
    parser.add_argument("--requests", nargs="+", type=count, default=(1, 32), metavar="N", help="default: 1 32")
    parser.add_argument("--prompt", type=count, metavar="N", help="tokens of a prompt (default: 128)")
    parser.add_argument("--steps", type=count, metavar="N", help="steps that are timed (default: 128)")
    given, rest = parser.parse_known_args(argv)
    config = read_model([*_flags_left(rest), *rest], given, _without_flags(), num_microbatches=1)
    return given, config


def _without_flags() -> Words:
    return {option: value for option, value in LLAMA_1B.items() if option not in _FLAGS}


def _flags_left(rest: Sequence[str]) -> list[str]:
    return [flag for flag in _FLAGS if flag not in rest]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        given, config = read_options(words)
        device, _ = preflight(config.training)
    except UserInputError as error:
        print_error(error)
        return 2
    print_notices(config.notices)
    started = datetime.now(UTC)
    gpu_before = gpu_state(device)
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    # Drawn on the device: its own generator, as the weights of 1B take minutes on the host.
    model = GPTModel(
        config.model,
        moe=config.moe,
        layers=config.layers,
        mamba=config.mamba,
        generator=torch.Generator(device).manual_seed(config.training.seed),
        device=device,
        dtype=dtype,
    ).eval()
    prompt = given.prompt or (5 if given.quick else 128)
    num_steps = given.steps or (4 if given.quick else 128)
    records = run(model, given, prompt=prompt, num_steps=num_steps, num_profiled=2 if given.quick else 10)
    results = rounded(
        {
            **provenance("decode_step", words, device, started=started, gpu_before=gpu_before),
            "config": {
                "model": config.to_json()["model"],
                "parameters": str(dtype).removeprefix("torch."),
                "num_parameters": model.num_parameters(),
                "prompt": prompt,
                "num_steps": num_steps,
                "num_warmup_steps": NUM_WARMUP_STEPS,
                "unit": "milliseconds a decode step of all requests",
            },
            "arms": [record.to_json() for record in records],
        }
    )
    console = wide_console(120)
    machine = results["machine"]
    title = (
        f"decode step: {model.num_parameters() / 1e6:.0f}M parameters, {results['config']['parameters']}, prompts of "
        f"{prompt}, on {machine['gpu'] or 'the CPU'}, torch {machine['torch']}"
    )
    console.print(render(records, title=title))
    for record in records:
        if record.status != "ok":
            name = f"{record.scope}, {record.num_requests} requests"
            console.print(f"- {name}: {record.status}: {record.reason}", markup=False, soft_wrap=True)
    folder = output_folder(given)
    if folder is not None:
        print(f"results: {write_results(results, folder, now=started)}", file=sys.stderr)
    print(json.dumps(results, separators=(",", ":")))
    return 1 if any(record.status == "failed" for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
