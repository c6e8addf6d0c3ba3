"""The command lines: a few options of the benchmarks, and the project's own for the model."""

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

Words = Mapping[str, str]
"""Options of a model and their values."""

_COMMON_WORDS: Final[Words] = {
    "--vocab-size": "32768",
    "--micro-batch-size": "1",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
}
MODELS: Final[Mapping[str, Words]] = {
    "10m": {
        **{"--num-layers": "6", "--hidden-size": "256", "--num-attention-heads": "4", "--seq-length": "256"},
        **_COMMON_WORDS,
    },
    "125m": {
        **{"--num-layers": "12", "--hidden-size": "768", "--num-attention-heads": "12", "--seq-length": "512"},
        **_COMMON_WORDS,
    },
    "350m": {
        **{"--num-layers": "24", "--hidden-size": "1024", "--num-attention-heads": "16", "--seq-length": "1024"},
        **_COMMON_WORDS,
    },
    "moe": {
        **{"--num-layers": "8", "--hidden-size": "768", "--num-attention-heads": "12", "--seq-length": "512"},
        **{"--num-experts": "32", "--moe-router-topk": "4", "--moe-ffn-hidden-size": "768"},
        **{"--moe-router-load-balancing-type": "none", "--moe-router-dtype": "fp32"},
        **{"--normalization": "RMSNorm", "--position-embedding-type": "rope"},
        **{"--moe-grouped-gemm": "", "--swiglu": "", "--disable-bias-linear": ""},
        **{"--untie-embeddings-and-output-weights": ""},
        **_COMMON_WORDS,
    },
    "hybrid": {
        **{"--hybrid-layer-pattern": "MM*-MM*-M*-*", "--hidden-size": "768", "--num-attention-heads": "12"},
        **{"--seq-length": "512", "--normalization": "RMSNorm", "--position-embedding-type": "none"},
        **{"--disable-bias-linear": ""},
        **_COMMON_WORDS,
    },
}
"""The models of the project's numbers; a value of "" is an option without one. The width of a dense MLP follows: four
times the hidden size. ``moe`` has the shape of a Qwen3-MoE of Hugging Face; ``hybrid`` has 4 layers of attention."""

_MODEL_SECTIONS: Final = ("model", "layers", "moe", "mamba", None)
"""Sections whose options say what the model is."""
_WITH_EFFECT: Final = ("micro_batch_size", "seed", "device", "make_vocab_size_divisible_by", "bf16")
"""Options outside the model's that the benchmarks heed."""

_DESCRIPTION: Final = (
    "Times one training step (zero grads, forward, backward) of a GPT, eager and captured in several ways, with the "
    "same weights and data."
)
_EPILOG: Final = (
    "All options of the model that `graphstep train` has can be given too; they come before those of --model. "
    f"Where there is no git checkout, {COMMIT_VARIABLE}=<hash> in the environment names the commit. "
    "Exit code: 0; 1 when an arm of the project failed; 2 for bad options."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``train_step.py`` is told."""

    config: RunConfig
    """Model, batch sizes, precision, seed, device."""
    arms: tuple[str, ...]
    """In the order in which they run."""
    has_main_grads: bool
    num_steps: int
    """Single steps of an arm in a pass, at most."""
    enough_ms: float | None
    """No further single steps once they have taken this time together; None: all of them."""
    num_warmup_steps: int
    num_profiled_steps: int
    num_checked_steps: int
    compares_deterministic: bool
    output: Path | None
    """Folder for the file of results; None: no file."""


def read_options(argv: Sequence[str]) -> Options:
    """Read the command line of ``train_step.py``.

    Raises:
        UserInputError: all problems with the options of the model.
        SystemExit: ``--help``, or an option of the benchmark that cannot be read (code 2).
    """
    given, rest = _parser().parse_known_args(argv)
    is_quick: bool = given.quick
    return Options(
        config=read_model(rest, given, MODELS[given.model], num_microbatches=given.num_microbatches),
        arms=tuple(name for name in ARMS if name in given.arms),
        has_main_grads=given.main_grads,
        num_steps=given.steps or (5 if is_quick else 200),
        enough_ms=1000.0 if given.steps is None else None,
        num_warmup_steps=2 if is_quick else 20,
        num_profiled_steps=2 if is_quick else 10,
        num_checked_steps=2 if is_quick else 3,
        compares_deterministic=given.deterministic_check,
        output=output_folder(given),
    )


def common_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have.

    Args:
        program: name of the program, without its ending.
        description: what it measures.
    """
    parser = argparse.ArgumentParser(
        prog=f"benchmarks/{program}.py", description=description, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument("--fp32", action="store_true", help="fp32 parameters and gradients (default: bf16)")
    parser.add_argument(
        "--main-grads",
        action="store_true",
        help="accumulate gradients of bf16 parameters in fp32, as `graphstep train` does (default: bf16 `.grad`)",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: few repeats, no file unless --output")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for the file of results (default: benchmarks/results)"
    )
    return parser


def add_model_option(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Let a program choose one of ``MODELS``."""
    told = "; ".join(
        f"{name} is `{' '.join(w for pair in words.items() for w in pair)}`" for name, words in MODELS.items()
    )
    parser.add_argument("--model", choices=tuple(MODELS), default=default, help=f"default: {default}; {told}")


def count(word: str) -> int:
    """Read a whole number above 0."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {number}")
    return number


def output_folder(given: argparse.Namespace) -> Path | None:
    """Return where results go; None: nowhere, as after ``--quick`` alone."""
    folder: Path | None = given.output
    if folder is None and not given.quick:
        return ROOT / "benchmarks" / "results"
    return folder


def read_model(rest: Sequence[str], given: argparse.Namespace, base: Words, *, num_microbatches: int) -> RunConfig:
    """Read the options of the model, and of the batches.

    Args:
        rest: what the parser of the program left.
        given: what it read, the options of :func:`common_parser` among it.
        base: options that hold unless ``rest`` says otherwise.
        num_microbatches: of a step.

    Raises:
        UserInputError: all problems.
    """
    spelled = {word.partition("=")[0] for word in rest}
    words = [word for option, value in base.items() if option not in spelled for word in (option, value) if word]
    if not given.fp32 and "--bf16" not in spelled:
        words.append("--bf16")
    problems = [*_contradictions(spelled, given), *_without_effect(spelled, given)]
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
    size = training.micro_batch_size * num_microbatches
    return dataclasses.replace(config, training=dataclasses.replace(training, global_batch_size=size))


def _contradictions(spelled: set[str], given: argparse.Namespace) -> Iterator[Problem]:
    others = ("--bf16" if "--bf16" in spelled else "", "--main-grads" if given.main_grads else "")
    for other in filter(None, others if given.fp32 else ()):
        what = f"--fp32 and {other} contradict each other"
        yield Problem("contradiction", what, where=f"--fp32, {other}", fix="leave one of them out")


def _without_effect(spelled: set[str], given: argparse.Namespace) -> Iterator[Problem]:
    for option in OPTIONS:
        is_heeded = option.section in _MODEL_SECTIONS or option.dest in _WITH_EFFECT
        for spelling in () if is_heeded else spelled.intersection(option.spellings):
            has_substitute = option.dest == "global_batch_size" and "num_microbatches" in given
            fix = "use --num-microbatches" if has_substitute else "leave it out"
            yield Problem("without-effect", f"{spelling} has no effect on this benchmark", where=spelling, fix=fix)


def _parser() -> argparse.ArgumentParser:
    parser = common_parser("train_step", _DESCRIPTION)
    add_model_option(parser, default="125m")
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), metavar="ARM", help="of " + ", ".join(ARMS)
    )
    parser.add_argument("--num-microbatches", type=count, default=1, metavar="N", help="of a step (default: 1)")
    parser.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="timed single steps of an arm in each of two passes (default: 200, or as many as take a second)",
    )
    parser.add_argument(
        "--no-deterministic-check",
        dest="deterministic_check",
        action="store_false",
        help="leave out the comparison with eager under deterministic kernels",
    )
    return parser
