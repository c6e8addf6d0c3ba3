"""How much memory do ``local`` graphs take beside eager, with one and with several microbatches in flight?

Method. One step is zero grads + forward + backward of a GPT, all of it, in one of these orders (F0 is the forward of
microbatch 0, B0 its backward; here with 4 in flight, ``--in-flight``):

- ``one_at_a_time``             F0 B0  F1 B1  F2 B2  F3 B3
- ``all_forward_all_backward``  F0 F1 F2 F3  B0 B1 B2 B3
- ``1f1b``                      F0 F1 F2  F3 B0  F4 B1  F5 B2  F6 B3  F7 B4  B5 B6 B7: the first of four pipeline stages

Each arm runs each order in a process of its own, so that neither memory that another one left in PyTorch's cache nor
what the libraries took for it counts. There it is built, captured, and run for some steps with different data.

What is reported, as growth over what is allocated and reserved before the arm exists (the batches, and no more):

- peak allocated (of what torch handed out) and peak reserved (of what it took from the driver), from before the arm is
  built until its last step, so capture and the eager steps before it are in both, and so are weights and gradients;
- the same of the steps after building alone (``steady_*``), and the growth of the memory used on the device
  (``driver_used``), in which are also the graphs themselves, the CUDA modules and the libraries' own memory;
- the strategy's own account: its pool and its static inputs;
- ``capture_seconds``: warmup runs and capture of all layers and slots, as the strategy counts them;
  ``first_step_seconds``: wall clock of the steps in which it got ready, capture in one of them;
- the ratio of both peaks to eager's in the same order.

That the arms did the same work shows in the losses of the last step, which are compared bit for bit.

Not measured: optimizer state, which would be the same in both, and steps' times (``train_step.py`` is for that).

    PYTHONPATH=src python benchmarks/local_memory.py [options]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from common.arms import EagerArm, LocalArm, LocalMergedArm
from common.case import Case, Gradients
from common.clocks import MemoryMeter, free_memory, seconds_of, synchronize
from common.environment import ROOT, gpu_state, provenance
from common.options import MODELS, add_model_option, common_parser, count, output_folder, read_model
from common.record import failure, rounded, write_results
from common.table import wide_console
from rich.table import Table
from torch import Tensor, nn

from graphstep.cli.problems import print_error, print_notices
from graphstep.config import RunConfig
from graphstep.errors import UserInputError
from graphstep.strategies import ForwardBackward
from graphstep.training.setup import preflight

ARMS: Final[Mapping[str, type[EagerArm]]] = MappingProxyType(
    {arm.name: arm for arm in (EagerArm, LocalArm, LocalMergedArm)}
)
DEFAULT_ARMS: Final = ("eager", "local")
CHILD_SECONDS: Final = 300
"""Longest time of one arm in one order."""

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of forwards and backwards in a step."""

    name: str
    events: tuple[tuple[str, int], ...]
    """``forward`` or ``backward``, and the number of the microbatch."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return len(self.events) // 2

    @property
    def num_in_flight(self) -> int:
        """The most forwards whose backward is still to come."""
        waiting = largest = 0
        for half, _ in self.events:
            waiting += 1 if half == "forward" else -1
            largest = max(largest, waiting)
        return largest


def one_at_a_time(num_in_flight: int) -> Order:
    """Each backward right after its forward; as many microbatches as the others have in flight."""
    events = [(half, index) for index in range(num_in_flight) for half in ("forward", "backward")]
    return Order(name="one_at_a_time", events=tuple(events))


def all_forward_all_backward(num_in_flight: int) -> Order:
    """All forwards, then all backwards, the first one first."""
    events = [(half, index) for half in ("forward", "backward") for index in range(num_in_flight)]
    return Order(name="all_forward_all_backward", events=tuple(events))


def one_forward_one_backward(num_in_flight: int) -> Order:
    """The first stage of a pipeline of as many stages as there are microbatches in flight, twice as many in all."""
    num_microbatches, num_first = 2 * num_in_flight, num_in_flight - 1
    events = [("forward", index) for index in range(num_first)]
    for index in range(num_first, num_microbatches):
        events += [("forward", index), ("backward", index - num_first)]
    events += [("backward", index) for index in range(num_microbatches - num_first, num_microbatches)]
    return Order(name="1f1b", events=tuple(events))


ORDERS: Final[Mapping[str, Callable[[int], Order]]] = MappingProxyType(
    {
        "one_at_a_time": one_at_a_time,
        "all_forward_all_backward": all_forward_all_backward,
        "1f1b": one_forward_one_backward,
    }
)


def ordered_step(gradients: Gradients, *, order: Order) -> ForwardBackward:
    """The step that every arm runs: zero the gradients, then forwards and backwards in the order."""

    def step(
        *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        if forward_only or num_microbatches != order.num_microbatches:
            raise ValueError(f"expected to train {order.num_microbatches} microbatches, got {num_microbatches}")
        gradients.zero()
        losses: list[Tensor] = []
        waiting: dict[int, Tensor] = {}
        for half, index in order.events:
            if half == "forward":
                batch = next(data_iterator)
                waiting[index] = model(batch["tokens"], batch["labels"])
            else:
                loss = waiting.pop(index)
                (loss / num_microbatches).backward()
                losses.append(loss.detach().float())
                del loss  # or it would be in flight during the next forward
        return torch.stack(losses)

    return step


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the program is told."""

    given: argparse.Namespace
    rest: Sequence[str]
    """Options of the model."""
    arms: tuple[str, ...]
    orders: tuple[Order, ...]
    num_steps: int

    def case(self, order: Order, device: torch.device) -> Case:
        """Weights and data for an order."""
        config = self.config(order)
        return Case.make(config, device=device, has_main_grads=self.given.main_grads)

    def config(self, order: Order) -> RunConfig:
        """The model and batches of an order.

        Raises:
            UserInputError: all problems.
        """
        return read_model(self.rest, self.given, MODELS[self.given.model], num_microbatches=order.num_microbatches)


def measure(options: Options, name: str, order: Order, device: torch.device) -> Result:
    """Build an arm, run it, and return what it took; in a process of its own on CUDA."""
    result: Result = {
        "name": name,
        "order": order.name,
        "num_in_flight": order.num_in_flight,
        "num_microbatches": order.num_microbatches,
        "is_ours": ARMS[name].is_ours,
        "status": "ok",
        "reason": "",
    }
    case = options.case(order, device)
    free_memory(device)
    meter = MemoryMeter(device)
    arm = ARMS[name](partial(ordered_step, order=order))
    try:
        ready_seconds = seconds_of(lambda: arm.build(case), device)
        meter.built()
        eager_before = arm.details().get("eager_calls")
        step_seconds: list[float] = []
        losses = torch.empty(0)
        for index in range(options.num_steps):
            started = time.perf_counter()
            losses = arm.step(case.batches(index))
            synchronize(device)
            step_seconds.append(time.perf_counter() - started)
        meter.end()
        details = arm.details()
        if details.get("eager_calls") != eager_before:
            raise RuntimeError(f"layers ran eagerly after they were captured: {details['eager_calls']}")
        result |= {
            "losses": losses.tolist(),
            "ready_seconds": ready_seconds,
            "capture_seconds": arm.capture_seconds,
            "median_step_seconds": statistics.median(step_seconds),
            "details": details,
        }
    except Exception as error:  # the parent is to go on with the others
        traceback.print_exc()
        result |= {"status": "failed", "reason": failure("run", error)}
    finally:
        arm.close()
    meter.closed()
    return result | {"memory_bytes": dataclasses.asdict(meter.use)}


def measure_apart(words: Sequence[str], name: str, order: Order) -> Result:
    """Have a process of its own measure an arm; one that dies gives a failed result."""
    folders = filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--worker", name, order.name]
    died: Result = {
        "name": name,
        "order": order.name,
        "num_in_flight": order.num_in_flight,
        "num_microbatches": order.num_microbatches,
        "is_ours": ARMS[name].is_ours,
        "status": "failed",
    }
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return died | {"reason": f"took more than {CHILD_SECONDS} s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return died | {"reason": f"its process ended with code {done.returncode}"}
    result: Result = json.loads(lines[-1])
    return result


def compared(results: Sequence[Result]) -> list[Result]:
    """Add to each result how it stands to eager's of the same order, where there is one."""
    eager = {result["order"]: result for result in results if result["name"] == "eager" and result["status"] == "ok"}
    found = []
    for result in results:
        reference = eager.get(result["order"])
        beside: Result = {"peak_reserved_over_eager": None, "peak_allocated_over_eager": None, "losses_equal": None}
        if reference is not None and result["status"] == "ok":
            beside["losses_equal"] = result["losses"] == reference["losses"]
            for peak in ("peak_reserved", "peak_allocated"):
                own, other = result["memory_bytes"][peak], reference["memory_bytes"][peak]
                beside[f"{peak}_over_eager"] = own / other if own is not None and other else None
        found.append({**result, **beside})
    return found


def render(results: Sequence[Result], *, title: str) -> Table:
    """Return the table; memory in MiB."""
    table = Table(title=title, title_justify="left")
    for name in ("order", "arm"):
        table.add_column(name)
    for name in (
        "in flight",
        "peak reserved\nallocated",
        "over eager",
        "steady reserved\nallocated",
        "on device",
        "pool\nstatic",
        "capture s\nready s",
        "losses\n= eager",
    ):
        table.add_column(name, justify="right")
    for result in results:
        row = [result["order"], result["name"], str(result["num_in_flight"])]
        if result["status"] != "ok":
            table.add_row(*row, result["status"])
            continue
        memory, details, capture = result["memory_bytes"], result["details"], result["capture_seconds"]
        ratios = (result[f"{peak}_over_eager"] for peak in ("peak_reserved", "peak_allocated"))
        table.add_row(
            *row,
            f"{_mib(memory['peak_reserved'])}\n{_mib(memory['peak_allocated'])}",
            "\n".join("-" if ratio is None else f"{ratio:.3f}x" for ratio in ratios),
            f"{_mib(memory['steady_reserved'])}\n{_mib(memory['steady_allocated'])}",
            _mib(memory["driver_used"]),
            f"{_mib(details.get('pool_bytes'))}\n{_mib(details.get('static_bytes'))}",
            f"{'-' if capture is None else f'{capture:.2f}'}\n{result['ready_seconds']:.2f}",
            {None: "-", True: "yes", False: "no"}[result["losses_equal"]],
        )
    return table


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}"


def read_options(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UserInputError: all problems with the options of the model.
        SystemExit: ``--help``, or an option of the benchmark that cannot be read (code 2).
    """
    parser = common_parser(
        "local_memory", "Peak memory of eager and of `local` with one and with several microbatches in flight."
    )
    add_model_option(parser, default="350m")
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=tuple(ARMS),
        default=DEFAULT_ARMS,
        metavar="ARM",
        help=f"of {', '.join(ARMS)} (default: {' '.join(DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--orders",
        nargs="+",
        choices=tuple(ORDERS),
        default=tuple(ORDERS),
        metavar="ORDER",
        help=f"of {', '.join(ORDERS)} (default: all)",
    )
    parser.add_argument("--in-flight", type=count, default=4, metavar="N", help="most microbatches (default: 4)")
    parser.add_argument("--steps", type=count, metavar="N", help="steps of an arm after building (default: 8)")
    parser.add_argument("--worker", nargs=2, metavar=("ARM", "ORDER"), help=argparse.SUPPRESS)
    given, rest = parser.parse_known_args(argv)
    options = Options(
        given=given,
        rest=rest,
        arms=tuple(name for name in ARMS if name in given.arms),
        orders=tuple(make(given.in_flight) for name, make in ORDERS.items() if name in given.orders),
        num_steps=given.steps or (2 if given.quick else 8),
    )
    for order in options.orders:
        options.config(order)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = read_options(words)
        config = options.config(options.orders[0])
        device, _ = preflight(config.training)
    except UserInputError as error:
        print_error(error)
        return 2
    if options.given.worker is not None:
        name, order_name = options.given.worker
        print(json.dumps(measure(options, name, ORDERS[order_name](options.given.in_flight), device)))
        return 0
    print_notices(config.notices)
    started = datetime.now(UTC)
    gpu_before = gpu_state(device)
    found = []
    for order in options.orders:
        for name in options.arms:
            print(f"{order.name}: {name}", file=sys.stderr, flush=True)
            found.append(measure_apart(words, name, order))
    results = rounded(
        {
            **provenance("local_memory", words, device, started=started, gpu_before=gpu_before),
            "config": {
                "model": config.to_json()["model"],
                "micro_batch_size": config.training.micro_batch_size,
                "parameters": "bf16" if config.training.bf16 else "fp32",
                "has_main_grads": options.given.main_grads,
                "num_steps": options.num_steps,
                "orders": {
                    order.name: " ".join(f"{half[0].upper()}{index}" for half, index in order.events)
                    for order in options.orders
                },
            },
            "arms": compared(found),
        }
    )
    console = wide_console(150)
    machine, model = results["machine"], config.model
    title = (
        f"memory in MiB: GPT of {model.num_layers} layers, hidden {model.hidden_size}, sequence {model.seq_length}, "
        f"{results['config']['parameters']}, on {machine['gpu'] or 'the CPU'}, torch {machine['torch']}"
    )
    console.print(render(results["arms"], title=title))
    for result in results["arms"]:
        if result["status"] != "ok":
            text = f"- {result['order']}, {result['name']}: {result['status']}: {result['reason']}"
            console.print(text, markup=False, soft_wrap=True)
    folder = output_folder(options.given)
    if folder is not None:
        print(f"results: {write_results(results, folder, now=started)}", file=sys.stderr)
    print(json.dumps(results, separators=(",", ":")))
    return 1 if any(result["is_ours"] and result["status"] == "failed" for result in results["arms"]) else 0


if __name__ == "__main__":
    sys.exit(main())
