"""``graphstep``: find the command, run it, turn errors into messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphstep.cli.problems import print_error, print_notices, print_os_error, say
from graphstep.config import from_argv
from graphstep.config.help import help_text
from graphstep.config.suggest import suggestion
from graphstep.errors import GraphstepError, Problem, UserInputError
from graphstep.version import __version__

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of ``graphstep``."""

    summary: str
    """What it does, in one line."""
    run: Callable[[Sequence[str]], int]
    """Runs it with the words after its name; returns the exit code."""
    help: Callable[[], str]
    """Returns the text of its ``--help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: words, without the name of the program; those of this process if None.

    Returns:
        Exit code: that of the command; 1 when it failed, the system refused, or nobody reads its output any more; 2 for
        bad input; 130 after Ctrl-C.
    """
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except UserInputError as error:
        print_error(error)
        return EXIT_BAD_INPUT
    except GraphstepError as error:
        print_error(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        say("graphstep: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            # What standard output still holds would fail once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_os_error(error)
        return EXIT_FAILED


def _dispatch(words: Sequence[str]) -> int:
    if not words:
        say(_overview(), end="")
        return EXIT_BAD_INPUT
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(_overview(), end="")
        return EXIT_OK
    if name in ("-V", "--version"):
        print(f"graphstep {__version__}")
        return EXIT_OK
    command = COMMANDS.get(name)
    if command is None:
        fix = suggestion(name, COMMANDS, "graphstep --help lists the commands")
        raise UserInputError(Problem("unknown-command", f"there is no command {name}", f"graphstep {name}", fix))
    if "-h" in rest or "--help" in rest:
        print(command.help(), end="")
        return EXIT_OK
    code = command.run(rest)
    if sys.stdout is not None:  # None: the shell closed it
        sys.stdout.flush()
    return code


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [
        "usage: graphstep COMMAND [options]",
        "",
        "CUDA graphs for transformer training on plain PyTorch.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
        "",
        "graphstep COMMAND --help lists the options of a command; graphstep --version prints the version.",
    ]
    return "\n".join(lines) + "\n"


def _train(argv: Sequence[str]) -> int:
    # Wrong options are answered before torch is loaded, which takes seconds.
    print_notices(from_argv(argv, os.environ, for_training=True).notices)
    from graphstep.cli.train import run

    return run(argv)


def _train_help() -> str:
    return help_text(
        "graphstep train",
        "Train a GPT. Options have Megatron-LM's names and meaning; without any, a small model learns the text of the "
        "Python standard library on this machine.",
    )


def _generate(argv: Sequence[str]) -> int:
    # Wrong options are answered before torch is loaded, which takes seconds.
    from graphstep.cli.generate_options import read_generate_options

    options = read_generate_options(argv)
    print_notices(options.notices)
    from graphstep.cli.generate import run

    return run(options)


def _generate_help() -> str:
    from graphstep.cli.generate_options import GENERATE_OPTIONS

    return help_text(
        "graphstep generate",
        "Continue prompts with a model of graphstep train or of Hugging Face. All prompts are computed together; their "
        "texts come in the order of the prompts, and a table on standard error at the end.",
        GENERATE_OPTIONS,
    )


def _config(argv: Sequence[str]) -> int:
    from graphstep.cli.config import run

    return run(argv)


def _config_help() -> str:
    from graphstep.cli.config import FLAGS

    return help_text(
        "graphstep config",
        "Print what a command line of graphstep train amounts to, where each value comes from, and what is captured. "
        "Options of its own: " + "; ".join(f"{flag}: {text}" for flag, text in FLAGS.items()) + ".",
    )


def _migrate(argv: Sequence[str]) -> int:
    from graphstep.cli.migrate import run

    return run(argv)


def _migrate_help() -> str:
    from graphstep.cli.migrate import HELP

    return HELP


def _advise(argv: Sequence[str]) -> int:
    from graphstep.cli.advise import run

    return run(argv)


def _advise_help() -> str:
    from graphstep.cli.advise import HELP

    return HELP


def _plan(argv: Sequence[str]) -> int:
    # Wrong options are answered before torch is loaded, which takes seconds.
    from graphstep.cli.plan_options import read_plan_options

    options = read_plan_options(argv)
    config = None
    if options.target is None:
        config = from_argv(options.train, os.environ, for_training=True)
        print_notices(config.notices)
    from graphstep.cli.plan import run

    return run(options, config)


def _plan_help() -> str:
    from graphstep.cli.plan_options import TEXT

    return help_text("graphstep plan", TEXT)


def _serve(argv: Sequence[str]) -> int:
    # Wrong options are answered before torch is loaded, which takes seconds.
    from graphstep.cli.serve_options import read_serve_options

    options = read_serve_options(argv)
    print_notices(options.notices)
    from graphstep.cli.serve import run

    return run(options)


def _serve_help() -> str:
    from graphstep.cli.serve_options import SERVE_OPTIONS

    return help_text(
        "graphstep serve",
        "Offer a model over HTTP by OpenAI's interface: /v1/completions, /v1/chat/completions and /v1/models, with "
        "/health and /metrics. Listens on this machine alone, unless --host says otherwise.",
        SERVE_OPTIONS,
    )


def _doctor(argv: Sequence[str]) -> int:
    from graphstep.cli.doctor import run

    return run(argv)


def _doctor_help() -> str:
    from graphstep.cli.doctor import HELP

    return HELP


COMMANDS: Mapping[str, Command] = {
    "train": Command(summary="train a model and say what was captured", run=_train, help=_train_help),
    "generate": Command(summary="continue prompts with a model", run=_generate, help=_generate_help),
    "serve": Command(summary="offer a model over HTTP, by OpenAI's interface", run=_serve, help=_serve_help),
    "doctor": Command(summary="say what of a step cannot be captured, and why", run=_doctor, help=_doctor_help),
    "config": Command(summary="print the configuration a command line gives", run=_config, help=_config_help),
    "plan": Command(summary="measure eager steps, and say what capture would gain", run=_plan, help=_plan_help),
    "advise": Command(summary="say which options fit a scenario, and why", run=_advise, help=_advise_help),
    "migrate": Command(summary="write old options of CUDA graphs in their new form", run=_migrate, help=_migrate_help),
}
"""The commands, by name."""
