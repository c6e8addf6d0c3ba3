"""How long is the host busy with one replay of a layer's forward, and of its backward?

Method. The layers of a GPT are run alone, one after another, without embedding, head and loss. A step times the host
twice, by the wall clock: the loop over the N layers under grad, until it returns; then, the device idle again, one call
of ``torch.autograd.backward`` on the last layer's output, until that returns. Each is divided by N: microseconds a
layer, which is microseconds a replay where each layer has its own pair of graphs. Steps are repeated until
``--replays`` layers have run in each half, in each of two passes (arms in order, then in the opposite order, built
anew).

The device is never what the host waits for: before either half, outside the timed part, the host waits until the device
is idle; in between it issues the N launches of one half, which the queue of a CUDA stream holds; and nothing in a layer
reads from the device. The layers are tiny, as the time of a launch does not depend on the size of its tensors; all
options of the model can be given. Gradients are zeroed between steps, outside the timed part.

What is in the time of a layer, beside the launch:

- the call of the module, all checks before a replay, autograd's node, the handing over to autograd's thread;
- 1/N of what a step has once: the start of a backward pass, the copy of the first layer's input and of its gradient;
- accumulation into ``.grad``, where it is not in the graph: `eager` and `make_graphed_callables` launch it for each
  parameter. `bare_replay` has no accumulation, and no autograd: two loops over ``torch.cuda.CUDAGraph.replay()``.

Not in it: what a strategy does once a step, before the first layer and after the last backward.

    PYTHONPATH=src python benchmarks/local_host_time.py [options]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from common.case import Case
from common.clocks import Spread, free_memory
from common.environment import gpu_state, provenance
from common.host_arms import HOST_ARMS, HostArm
from common.host_split import measure_split
from common.options import Words, common_parser, count, output_folder, read_model
from common.record import failure, rounded, write_results
from common.table import wide_console
from rich.table import Table

from graphstep.cli.problems import print_error, print_notices
from graphstep.config import RunConfig
from graphstep.errors import UserInputError
from graphstep.training.setup import preflight

TINY_MODEL: Final[Words] = {
    "--num-layers": "24",
    "--hidden-size": "64",
    "--num-attention-heads": "2",
    "--vocab-size": "128",
    "--seq-length": "16",
    "--micro-batch-size": "1",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
}
"""As many layers as GPT 350M has, tiny."""

NUM_WARMUP_STEPS = 5
SPLIT_ARMS: Final = ("local", "local_merged")


@dataclass(kw_only=True)
class HostPass:
    """One build of an arm, timed. Microseconds a layer, one value a step."""

    forward_us: list[float]
    backward_us: list[float]
    details: dict[str, Any]


@dataclass(kw_only=True)
class HostRecord:
    """Everything measured of one arm."""

    name: str
    is_ours: bool
    num_layers: int
    status: str = "ok"
    """``ok``, ``unavailable`` (cannot run here) or ``failed``."""
    reason: str = ""
    passes: list[HostPass] = field(default_factory=list)
    split_us: dict[str, float] | None = None
    """Where the time goes, see :func:`common.host_split.measure_split`."""

    def times(self, half: str) -> list[float]:
        """Microseconds a layer of all passes; ``half`` is ``forward`` or ``backward``."""
        return [us for timed in self.passes for us in getattr(timed, f"{half}_us")]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        halves = ("forward", "backward")
        return {
            "name": self.name,
            "is_ours": self.is_ours,
            "status": self.status,
            "reason": self.reason,
            "num_replays": len(self.times("forward")) * self.num_layers,
            **{f"{half}_us": _described(self.times(half)) for half in halves},
            "split_us": self.split_us,
            "passes": [
                {
                    **{f"{half}_us": _described(getattr(timed, f"{half}_us")) for half in halves},
                    "details": timed.details,
                }
                for timed in self.passes
            ],
        }


def _described(values: list[float]) -> dict[str, float] | None:
    return {"mean": statistics.fmean(values), **dataclasses.asdict(Spread.of(values))} if values else None


def run(case: Case, names: Sequence[str], *, num_replays: int, is_split: bool = False) -> list[HostRecord]:
    """Measure the arms, in order and then in the opposite order. An arm that fails is left out of the second pass.

    Args:
        case: what the arms run.
        names: of arms.
        num_replays: see :func:`measure`.
        is_split: afterwards, those of the project once more with clocks inside.
    """
    num_layers = case.config.model.num_layers
    records = [HostRecord(name=name, is_ours=HOST_ARMS[name]().is_ours, num_layers=num_layers) for name in names]
    for record in records:
        reason = HOST_ARMS[record.name]().why_not(case.device)
        if reason is not None:
            record.status, record.reason = "unavailable", reason
    for title, order in (("timing", records), ("timing again", records[::-1])):
        for record in order:
            if record.status != "ok":
                continue
            print(f"{title}: {record.name}", file=sys.stderr, flush=True)
            try:
                record.passes.append(measure(HOST_ARMS[record.name](), case, num_replays=num_replays))
            except Exception as error:  # whatever an arm does, the others are to go on
                traceback.print_exc()
                record.status, record.reason = "failed", failure(title, error)
            free_memory(case.device)
    for record in records:
        if is_split and record.status == "ok" and record.name in SPLIT_ARMS:
            print(f"split: {record.name}", file=sys.stderr, flush=True)
            record.split_us = measure_split(HOST_ARMS[record.name](), case)
            free_memory(case.device)
    return records


def measure(arm: HostArm, case: Case, *, num_replays: int) -> HostPass:
    """Build an arm and time it.

    Raises:
        RuntimeError: a layer ran eagerly, for another reason than that the step was observed, while it was timed.
    """
    num_layers = case.config.model.num_layers
    try:
        work = arm.build(case)
        for _ in range(NUM_WARMUP_STEPS):
            arm.step()
        work.forget_times()
        eager_before = arm.details().get("eager_calls")
        for _ in range(math.ceil(num_replays / num_layers)):
            arm.step()
        details = arm.details()
        if details.get("eager_calls") != eager_before:
            raise RuntimeError(f"layers ran eagerly while they were timed: {details['eager_calls']}")
        return HostPass(
            forward_us=[us / num_layers for us in work.forward_us],
            backward_us=[us / num_layers for us in work.backward_us],
            details=details,
        )
    finally:
        arm.close()


def render(records: Sequence[HostRecord], *, title: str) -> Table:
    """Return the table; times in microseconds a layer, and of all layers together."""
    table = Table(title=title, title_justify="left")
    table.add_column("arm")
    halves = ("forward", "backward")
    for name in (*(f"{half} us\np10-p90" for half in halves), "all layers us\nforward, backward", "replays\nof each"):
        table.add_column(name, justify="right")
    table.add_column("capture s", justify="right")
    for record in records:
        if not record.passes:
            table.add_row(record.name, record.status)
            continue
        spreads = [Spread.of(record.times(half)) for half in halves]
        capture = record.passes[0].details.get("capture_seconds")
        table.add_row(
            record.name,
            *(f"{spread.median:.2f}\n{spread.p10:.2f}-{spread.p90:.2f}" for spread in spreads),
            ", ".join(f"{spread.median * record.num_layers:.0f}" for spread in spreads),
            str(len(record.times("forward")) * record.num_layers),
            "-" if capture is None else f"{capture:.2f}",
        )
    return table


def read_options(argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Read the command line.

    Raises:
        UserInputError: all problems with the options of the model.
        SystemExit: ``--help``, or an option of the benchmark that cannot be read (code 2).
    """
    told = " ".join(word for pair in TINY_MODEL.items() for word in pair)
    parser = common_parser(
        "local_host_time",
        f"Times the host for one replay of a layer's forward and backward. The model is `{told}`, in bf16, "
        "unless options say otherwise.",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=tuple(HOST_ARMS),
        default=tuple(HOST_ARMS),
        metavar="ARM",
        help="of " + ", ".join(HOST_ARMS),
    )
    parser.add_argument(
        "--replays", type=count, metavar="N", help="of each half, in each of two passes, at least (default: 1000)"
    )
    parser.add_argument(
        "--split", action="store_true", help="also say where the time of local goes, with clocks inside"
    )
    given, rest = parser.parse_known_args(argv)
    return given, read_model(rest, given, TINY_MODEL, num_microbatches=1)


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
    case = Case.make(config, device=device, has_main_grads=given.main_grads)
    num_replays = given.replays or (20 if given.quick else 1000)
    records = run(
        case, [name for name in HOST_ARMS if name in given.arms], num_replays=num_replays, is_split=given.split
    )
    results = rounded(
        {
            **provenance("local_host_time", words, device, started=started, gpu_before=gpu_before),
            "config": {
                "model": config.to_json()["model"],
                "micro_batch_size": config.training.micro_batch_size,
                "parameters": "bf16" if config.training.bf16 else "fp32",
                "gradients": case.gradient_kind,
                "num_replays": num_replays,
                "num_warmup_steps": NUM_WARMUP_STEPS,
                "unit": "microseconds of the host a layer and half",
            },
            "arms": [record.to_json() for record in records],
        }
    )
    console = wide_console(120)
    machine, model = results["machine"], config.model
    title = (
        f"host time a layer: {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{results['config']['parameters']}, on {machine['gpu'] or 'the CPU'}, torch {machine['torch']}"
    )
    console.print(render(records, title=title))
    for record in records:
        if record.split_us is not None:
            told = ", ".join(f"{name} {us:.1f}" for name, us in record.split_us.items())
            console.print(f"- {record.name}, us: {told}", markup=False, soft_wrap=True)
        if record.status != "ok":
            console.print(f"- {record.name}: {record.status}: {record.reason}", markup=False, soft_wrap=True)
    folder = output_folder(given)
    if folder is not None:
        print(f"results: {write_results(results, folder, now=started)}", file=sys.stderr)
    print(json.dumps(results, separators=(",", ":")))
    return 1 if any(record.is_ours and record.status == "failed" for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
