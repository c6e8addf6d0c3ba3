"""How much memory do graphs of training and of validation take together, beside eager execution?

A GPT is trained for some steps (zeroing, forward, backward, fused AdamW on the parameters as they are), with validation
steps in between, in the same microbatches and shapes: eagerly, and with `FullCudaGraphWrapper`, which captures one
graph for training and one for validation in one pool. Both run in this process, one after the other, from the same
weights.

What is reported: peak of allocated and of reserved device memory over what was there before the arm was built, capture
included, and its ratio to eager's; the losses of both arms have to be equal bit for bit.

    PYTHONPATH=src python benchmarks/validation_memory.py [options]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import torch
from common.case import Case
from common.clocks import MemoryMeter, free_memory
from common.environment import gpu_state, provenance
from common.options import MODELS, add_model_option, common_parser, count, output_folder, read_model
from common.record import rounded, write_results
from common.table import wide_console
from rich.table import Table
from torch import Tensor

from graphstep.capture.session import GraphSession
from graphstep.cli.problems import print_error, print_notices
from graphstep.errors import UserInputError
from graphstep.strategies import FullCudaGraphWrapper
from graphstep.training.setup import preflight
from graphstep.training.step import forward_backward_no_pipelining

ARMS: Final = ("eager", "full_iteration")
NUM_STEPS: Final = 12
VALIDATED_EVERY: Final = 2


def measure(name: str, case: Case) -> dict[str, Any]:
    """Run one arm; returns its memory and its losses."""
    free_memory(case.device)
    meter = MemoryMeter(case.device)
    losses, report = _run(name, case, meter)
    meter.closed()
    return {"name": name, "memory": asdict(meter.use), "losses": losses, "report": report}


def _run(name: str, case: Case, meter: MemoryMeter) -> tuple[list[float], Any]:
    model = case.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session = GraphSession(case.device)
    function: Any = forward_backward_no_pipelining
    given: dict[str, Any] = {"model": model}
    if name == "full_iteration":
        function, given = FullCudaGraphWrapper(function, model=model, session=session), {}
    losses: list[Tensor] = []

    def run(step: int, *, forward_only: bool) -> None:
        batches = case.batches(step)
        losses.append(
            function(data_iterator=iter(batches), num_microbatches=len(batches), forward_only=forward_only, **given)
        )

    try:
        for step in range(NUM_STEPS):
            optimizer.zero_grad(set_to_none=False)
            run(step, forward_only=False)
            optimizer.step()
            if step % VALIDATED_EVERY == 0:
                model.eval()
                run(step + 1, forward_only=True)
                model.train()
        meter.built()
        meter.end()
        return [float(value) for loss in losses for value in loss], session.report().to_json()
    finally:
        session.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = common_parser("validation_memory", "Peak memory of training with validation, eager and as whole graphs.")
    add_model_option(parser, default="125m")
    parser.add_argument("--num-microbatches", type=count, default=1, metavar="N", help="of a step (default: 1)")
    given, rest = parser.parse_known_args(words)
    try:
        config = read_model(rest, given, MODELS[given.model], num_microbatches=given.num_microbatches)
        device, _ = preflight(config.training)
    except UserInputError as error:
        print_error(error)
        return 2
    print_notices(config.notices)
    started, before = datetime.now(UTC), gpu_state(device)
    case = Case.make(config, device=device, has_main_grads=False)
    measure("eager", case)  # libraries take their memory before that of any arm is measured
    arms = [measure(name, case) for name in ARMS]
    eager = arms[0]
    table = Table(title=f"training and validation, {given.model}")
    for column in ("arm", "peak allocated MiB", "peak reserved MiB", "allocated, over eager", "reserved, over eager"):
        table.add_column(column, justify="right")
    for arm in arms:
        arm["over_eager"] = {kind: _ratio(arm, eager, kind) for kind in ("peak_allocated", "peak_reserved")}
        sizes = [arm["memory"][kind] for kind in ("peak_allocated", "peak_reserved")]
        table.add_row(
            arm["name"],
            *("-" if size is None else f"{size / 2**20:.0f}" for size in sizes),
            *("-" if ratio is None else f"{ratio:.3f}x" for ratio in arm["over_eager"].values()),
        )
    is_equal = eager["losses"] == arms[1]["losses"]
    wide_console(120).print(table)
    print(f"losses equal bit for bit: {'yes' if is_equal else 'no'}")
    results = rounded(
        {
            **provenance("validation_memory", words, device, started=started, gpu_before=before),
            "config": {"model": config.to_json()["model"], "num_parameters": case.origin.num_parameters()},
            "is_equal": is_equal,
            "arms": arms,
        }
    )
    folder = output_folder(given)
    if folder is not None:
        print(f"results: {write_results(results, folder, now=started)}", file=sys.stderr)
    return 0 if is_equal else 1


def _ratio(arm: dict[str, Any], eager: dict[str, Any], kind: str) -> float | None:
    mine, theirs = arm["memory"][kind], eager["memory"][kind]
    return mine / theirs if mine and theirs else None


if __name__ == "__main__":
    sys.exit(main())
