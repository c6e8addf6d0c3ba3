"""The command line: a few options of the benchmark, and the project's own for the model."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.arms import ARMS
from common.environment import COMMIT_VARIABLE, ROOT
from graphstep.config import RunConfig, from_argv
from graphstep.config.options import OPTIONS
from graphstep.errors import ConfigError, Problem, UserInputError

BAR_MODEL: Final[Mapping[str, str]] = {
    "--num-layers": "12",
    "--hidden-size": "768",
    "--num-attention-heads": "12",
    "--vocab-size": "32768",
    "--seq-length": "512",
    "--micro-batch-size": "1",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
}
"""GPT 125M, the model of the project's numbers. The width of the MLP follows: 4 x 768 = 3072."""

_WITH_EFFECT: Final = ("micro_batch_size", "seed", "device", "make_vocab_size_divisible_by", "bf16")
"""Options outside the model's that this benchmark heeds."""

_DESCRIPTION: Final = (
    "Times one training step (zero grads, forward, backward) of a GPT, eager and captured in several ways, with the "
    "same weights and data. All options of the model that `graphstep train` has can be given too; without any it is "
    f"`{' '.join(word for pair in BAR_MODEL.items() for word in pair)}`, in bf16."
)
_EPILOG: Final = (
    f"Where there is no git checkout, {COMMIT_VARIABLE}=<hash> in the environment names the commit. "
    "Exit code: 0; 1 when an arm of the project failed; 2 for bad options."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the program is told."""

    config: RunConfig
    """Model, batch sizes, precision, seed, device."""
    arms: tuple[str, ...]
    """In the order in which they run."""
    has_main_grads: bool
    num_steps: int
    """Single steps of an arm in a pass; back to back, about as many again."""
    num_warmup_steps: int
    num_profiled_steps: int
    num_checked_steps: int
    compares_deterministic: bool
    output: Path | None
    """Folder for the file of results; None: no file."""


def read_options(argv: Sequence[str]) -> Options:
    """Read a command line.

    Raises:
        UserInputError: all problems with the options of the model.
        SystemExit: ``--help``, or an option of the benchmark that cannot be read (code 2).
    """
    given, rest = _parser().parse_known_args(argv)
    is_quick: bool = given.quick
    output: Path | None = given.output
    if output is None and not is_quick:
        output = ROOT / "benchmarks" / "results"
    return Options(
        config=_read_model(rest, given),
        arms=tuple(name for name in ARMS if name in given.arms),
        has_main_grads=given.main_grads,
        num_steps=given.steps or (5 if is_quick else 200),
        num_warmup_steps=2 if is_quick else 20,
        num_profiled_steps=2 if is_quick else 10,
        num_checked_steps=2 if is_quick else 3,
        compares_deterministic=given.deterministic_check,
        output=output,
    )


def _read_model(rest: Sequence[str], given: argparse.Namespace) -> RunConfig:
    spelled = {word.partition("=")[0] for word in rest}
    words = [word for option, value in BAR_MODEL.items() if option not in spelled for word in (option, value)]
    if not given.fp32 and "--bf16" not in spelled:
        words.append("--bf16")
    problems = [*_contradictions(spelled, given), *_without_effect(spelled)]
    try:
        config = from_argv([*words, *rest])
    except UserInputError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if config.model.attention_dropout or config.model.hidden_dropout:
        problems.append(
            Problem(
                "dropout",
                "with dropout the arms draw different numbers and cannot be compared",
                where="--attention-dropout, --hidden-dropout",
                fix="leave both out: they are 0 here",
            )
        )
    if problems:
        raise ConfigError(problems)
    training = config.training
    size = training.micro_batch_size * given.num_microbatches
    return dataclasses.replace(config, training=dataclasses.replace(training, global_batch_size=size))


def _contradictions(spelled: set[str], given: argparse.Namespace) -> Iterator[Problem]:
    others = ("--bf16" if "--bf16" in spelled else "", "--main-grads" if given.main_grads else "")
    for other in filter(None, others if given.fp32 else ()):
        what = f"--fp32 and {other} contradict each other"
        yield Problem("contradiction", what, where=f"--fp32, {other}", fix="leave one of them out")


def _without_effect(spelled: set[str]) -> Iterator[Problem]:
    for option in OPTIONS:
        is_heeded = option.section in ("model", None) or option.dest in _WITH_EFFECT
        for spelling in () if is_heeded else spelled.intersection(option.spellings):
            fix = "use --num-microbatches" if option.dest == "global_batch_size" else "leave it out"
            yield Problem("without-effect", f"{spelling} has no effect on this benchmark", where=spelling, fix=fix)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/train_step.py", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), metavar="ARM", help="of " + ", ".join(ARMS)
    )
    parser.add_argument("--num-microbatches", type=_count, default=1, metavar="N", help="of a step (default: 1)")
    parser.add_argument("--fp32", action="store_true", help="fp32 parameters and gradients (default: bf16)")
    parser.add_argument(
        "--main-grads",
        action="store_true",
        help="accumulate gradients of bf16 parameters in fp32, as `graphstep train` does (default: bf16 `.grad`)",
    )
    parser.add_argument(
        "--steps", type=_count, metavar="N", help="timed steps of an arm in each of two passes (default: 200)"
    )
    parser.add_argument(
        "--no-deterministic-check",
        dest="deterministic_check",
        action="store_false",
        help="leave out the comparison with eager under deterministic kernels",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: few repeats, no file unless --output")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for the file of results (default: benchmarks/results)"
    )
    return parser


def _count(word: str) -> int:
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {count}")
    return count
