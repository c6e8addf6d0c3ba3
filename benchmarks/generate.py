"""How fast are tokens generated: by this project's engine with graphs, and by transformers, with the same weights?

Three parts, in one process and one file of results.

Arms: prompts of equal length, greedy decoding of a fixed number of tokens, one batch at a time:

- ``block``, ``layer``, ``none``     `DynamicEngine`: one graph for the model, one a layer, or none
- ``block_synchronous``             ``block``, each step launched after the tokens of the last one were read
- ``transformers``                  ``LlamaForCausalLM.generate``, eager
- ``transformers_static_compile``   the same with a static cache, which it compiles on a GPU

Reported: tokens a second of the whole call, prompts included, median of several calls; the time of a decode step issued
through the engine, the sum of its own kernels from the profiler, what the host is busy with in a step; the time before
the first call (capture or compilation); how many leading tokens equal those of `transformers`. Greedy decoding of
random weights follows rounding: where two arms round differently, tokens part at the first near tie. So tokens are
compared in float32 too, where all have to be equal.

Traffic: requests of mixed lengths and settings that arrive over time, against the same requests one after another in
the same engine; the share of decode steps that were graphs; captures after the start.

Host: a decode step without its forward.

    PYTHONPATH=src python benchmarks/generate.py [options]

An arm that takes longer than ``--arm-seconds`` is given up with that reason; the others go on. The exit code is 1 if an
arm of the project failed or tokens differ in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from common.clocks import free_memory, synchronize
from common.device_time import start_profiler
from common.environment import gpu_state, provenance
from common.generation import (
    ENGINE_ARMS,
    SIZES,
    EngineArm,
    build_arm,
    build_model,
    host_only_step,
    random_prompts,
    time_limit,
)
from common.record import failure, rounded, write_results
from common.table import wide_console
from common.traffic import measure_traffic
from rich.table import Table

from graphstep.models import GPTModel

ARMS: Final = (*ENGINE_ARMS, "transformers", "transformers_static_compile")
TRAFFIC_SECONDS: Final = 90
EQUALITY_BATCH, EQUALITY_NEW = 4, 64


def measure(name: str, model: GPTModel, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time one arm on one batch size."""
    device = model.embedding.weight.device
    prompts = random_prompts(model, batch, options.prompt)
    started = time.perf_counter()
    arm = build_arm(name, model, batch, options.prompt + options.new)
    try:
        tokens = arm.generate(prompts, options.new)
        if name.startswith("transformers"):
            arm.generate(prompts, options.new)
        synchronize(device)
        ready = time.perf_counter() - started
        seconds = []
        for _ in range(options.repeats):
            begun = time.perf_counter()
            arm.generate(prompts, options.new)
            synchronize(device)
            seconds.append(time.perf_counter() - begun)
        result: dict[str, Any] = {
            "name": name,
            "batch": batch,
            "tokens_per_second": batch * options.new / statistics.median(seconds),
            "seconds": seconds,
            "ready_seconds": ready,
            "tokens": tokens,
            "details": arm.details(),
        }
        if isinstance(arm, EngineArm):
            result |= arm.decode_times(prompts, options.new, num_profiled=min(10, options.new // 4))
    finally:
        arm.close()
    return result


def measure_all(model: GPTModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every arm with every batch; one that breaks or takes too long says why."""
    found = []
    for batch in options.batches:
        for name in options.arms:
            print(f"{name}, batch {batch}", file=sys.stderr, flush=True)
            try:
                with time_limit(options.arm_seconds):
                    found.append(measure(name, model, batch, options))
            except Exception as error:  # the other arms are to go on
                traceback.print_exc()
                found.append({"name": name, "batch": batch, "reason": failure("generate", error)})
            free_memory(model.embedding.weight.device)
    return found


def compare(found: list[dict[str, Any]]) -> None:
    """Replace the tokens of each arm by how many of them come before the first that differs from transformers'."""
    expected = {arm["batch"]: arm["tokens"] for arm in found if arm["name"] == "transformers" and "tokens" in arm}
    for arm in found:
        tokens = arm.pop("tokens", None)
        wanted = expected.get(arm["batch"])
        if tokens is None or wanted is None:
            continue
        equal = [_num_leading(mine, theirs) for mine, theirs in zip(tokens, wanted, strict=True)]
        arm["equal_tokens"] = {"least": min(equal), "mean": statistics.mean(equal), "of": len(wanted[0])}


def _num_leading(mine: list[int], theirs: list[int]) -> int:
    differs = (index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return next(differs, len(theirs))


def measure_equality(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Tokens of the arms of the engine against those of transformers, in float32."""
    num_new = min(EQUALITY_NEW, options.new)
    model = build_model(options.model, options.prompt + num_new, device, torch.float32)
    prompts = random_prompts(model, EQUALITY_BATCH, options.prompt)
    tokens = {}
    for name in ("transformers", *(name for name in options.arms if name in ENGINE_ARMS)):
        arm = build_arm(name, model, len(prompts), options.prompt + num_new)
        try:
            tokens[name] = arm.generate(prompts, num_new)
        finally:
            arm.close()
        free_memory(device)
    wanted = tokens.pop("transformers")
    return {
        "of": EQUALITY_BATCH * num_new,
        "arms": {
            name: sum(_num_leading(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
            for name, found in tokens.items()
        },
    }


def guarded(what: str, seconds: float, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``measured`` returns, or why it did not."""
    print(what, file=sys.stderr, flush=True)
    try:
        with time_limit(seconds):
            return measured()
    except Exception as error:  # the other parts are to go on
        traceback.print_exc()
        return {"reason": failure(what, error)}


def measure_all_traffic(model: GPTModel, options: argparse.Namespace, longest: int) -> list[dict[str, Any]]:
    """The requests that arrive over time, in each of the scopes that are asked for."""
    found = []
    for scope in options.traffic:
        run = partial(
            measure_traffic,
            model,
            scope,
            number=options.requests,
            mean_gap_seconds=options.gap_ms / 1e3,
            longest=longest,
        )
        found.append(guarded(f"traffic, {scope}", TRAFFIC_SECONDS, run))
        free_memory(model.embedding.weight.device)
    return found


def measure_host(model: GPTModel, options: argparse.Namespace) -> dict[str, Any]:
    """A decode step without its forward, by the number of requests."""
    num_steps = 20 if options.quick else 200
    return {
        str(batch): guarded(
            f"host, batch {batch}", options.arm_seconds, partial(host_only_step, model, batch, num_steps)
        )
        for batch in options.batches
    }


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SIZES), help="default: 1b, with --quick tiny")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 32), metavar="N")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: 128)")
    parser.add_argument("--new", type=int, help="tokens to generate, at least 32 (default: 128)")
    parser.add_argument("--repeats", type=int, help="timed calls of an arm (default: 3)")
    parser.add_argument("--traffic", nargs="*", choices=("block", "layer"), default=("block",), metavar="SCOPE")
    parser.add_argument("--requests", type=int, help="of the traffic (default: 64)")
    parser.add_argument("--gap-ms", type=float, help="mean time between two arrivals (default: 20)")
    parser.add_argument("--no-equality", action="store_true", help="no comparison of tokens in float32")
    parser.add_argument("--arm-seconds", type=float, default=70, metavar="S", help="give an arm up after so long")
    parser.add_argument("--quick", action="store_true", help="a smoke test: little of everything, no file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args(words)
    quick = {"model": "tiny", "prompt": 8, "new": 32, "repeats": 1, "requests": 8, "gap_ms": 2.0}
    usual = {"model": "1b", "prompt": 128, "new": 128, "repeats": 3, "requests": 64, "gap_ms": 20.0}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.output is None and not options.quick:
        options.output = Path(__file__).parent / "results"
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = read_options(words)
    device = torch.device(options.device)
    started, before = datetime.now(UTC), gpu_state(device)
    longest = 64 if options.model == "tiny" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(options.model, max(options.prompt + options.new, longest), device, dtype)
    start_profiler(device)
    arms = measure_all(model, options)
    compare(arms)
    traffic = measure_all_traffic(model, options, longest)
    host = measure_host(model, options)
    num_parameters = model.num_parameters()
    del model
    free_memory(device)
    equality = {} if options.no_equality else guarded("equality", 60, partial(measure_equality, options, device))
    results = rounded(
        {
            **provenance("generate", words, device, started=started, gpu_before=before),
            "model": {"size": options.model, "num_parameters": num_parameters},
            "prompt": options.prompt,
            "new": options.new,
            "arms": arms,
            "traffic": traffic,
            "host_without_forward": host,
            "equality_in_float32": equality,
        }
    )
    print_results(results)
    if options.output is not None:
        print(f"results: {write_results(results, options.output, now=started)}", file=sys.stderr)
    print(json.dumps(results, separators=(",", ":")))
    return int(has_failed(results))


def has_failed(results: dict[str, Any]) -> bool:
    """Did a part of the project fail? Transformers may."""
    arms = [arm for arm in results["arms"] if arm["name"] in ENGINE_ARMS]
    equality = results["equality_in_float32"]
    differs = any(number < equality["of"] for number in equality.get("arms", {}).values())
    return differs or any("reason" in part for part in (*arms, *results["traffic"]))


def print_results(results: dict[str, Any]) -> None:
    """Print what was measured."""
    title = f"{results['model']['size']}, prompts of {results['prompt']} tokens, {results['new']} new ones"
    table = Table(title=title, title_justify="left")
    names = ("arm", "batch", "tokens/s", "decode ms", "kernels ms", "ratio", "kernels", "host ms", "ready s")
    for column in (*names, "equal tokens"):
        table.add_column(column)
    console = wide_console(150)
    for arm in results["arms"]:
        if "reason" in arm:
            table.add_row(arm["name"], str(arm["batch"]), arm["reason"])
            continue
        equal = arm.get("equal_tokens")
        keys = ("decode_step_ms", "decode_kernel_ms", "over_kernels", "decode_num_kernels", "host_ms")
        table.add_row(
            arm["name"],
            str(arm["batch"]),
            f"{arm['tokens_per_second']:.0f}",
            *(f"{arm[key]:.3f}" if key in arm else "" for key in keys),
            f"{arm['ready_seconds']:.1f}",
            f"{equal['least']} to {equal['of']}, mean {equal['mean']:.0f}" if equal else "",
        )
    console.print(table)
    parts = ("traffic", "host_without_forward", "equality_in_float32")
    for name in parts:
        console.print(f"{name}: {json.dumps(results[name])}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
