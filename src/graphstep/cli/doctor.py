"""``graphstep doctor``: what of a step a graph cannot capture or would get wrong, with the line and the fix."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphstep.config.suggest import suggestion
from graphstep.errors import ConfigError, Problem

_VALUES = ("--batches", "--runs", "--sarif", "--fail-on")
_SWITCHES = ("--json", "--codes")
_LEVELS = ("error", "warning", "note", "never")

HELP = """\
usage: graphstep doctor [options] TARGET
       graphstep doctor [options] -- [options of graphstep train]

Run a step a few times on this machine, with a GPU or without, and say what of it a CUDA graph cannot capture, would
repeat wrongly, or makes slow: code, line, reason and fix. Nothing is captured.

TARGET is one of
  file.py:function      a step: called with each entry of the list batches of the file, or without arguments;
                        or a set-up: takes no arguments, and returns the step, or (step, batches)
  module:function       the same in a module that Python can import; a class or object of nn.Module will do, too
  FOLDER, config.json   a model of Hugging Face: a small one with random weights is built from its configuration
Without TARGET, the options after -- describe a model of graphstep train, such as -- --num-layers 4
--cuda-graph-impl local.

options:
  --batches NAME        the variable with the batches (default: batches)
  --runs N              observed runs, at least 2 (default: 3); there is one before them
  --json                print one JSON object
  --sarif FILE          write the findings in SARIF 2.1.0 as well; -: print that alone
  --fail-on LEVEL       error, warning (default), note or never: the least severity that counts for the exit code
  --codes               print the page of all codes, docs/findings.md, and nothing else

Exit codes: 0 nothing that counts, 1 an error, 3 a warning (or note) and no error, 2 bad input or a step that fails.
"""


@dataclass(kw_only=True, slots=True)
class DoctorOptions:
    """What a command line says; see ``HELP``."""

    target: str | None = None
    train: Sequence[str] | None = None
    batches: str = "batches"
    runs: int = 3
    json: bool = False
    sarif: str | None = None
    fail_on: str = "warning"
    codes: bool = False


def run(argv: Sequence[str]) -> int:
    """Diagnose and print.

    Args:
        argv: see ``HELP``.

    Returns:
        Exit code: 0, 1 or 3.

    Raises:
        UserInputError: bad options, no such target, or a target that fails.
    """
    options = read_doctor_options(argv)
    if options.codes:
        from graphstep.doctor.findings_page import findings_page

        print(findings_page(), end="")
        return 0
    from graphstep.doctor.examination import examine
    from graphstep.doctor.findings import Severity
    from graphstep.doctor.load_target import load_target

    # What the target prints must not stand in what programs read.
    with contextlib.redirect_stdout(sys.stderr), _own_words_hidden(options.target or "graphstep doctor"):
        if options.train is not None:
            from graphstep.doctor.train_options import options_target

            target = options_target(options.train, os.environ)
        else:
            target = load_target(options.target or "", batches=options.batches)
        diagnosis = examine(target, num_runs=options.runs)
    if options.sarif is not None:
        from graphstep.doctor.sarif import as_sarif

        text = json.dumps(as_sarif(diagnosis, Path.cwd()), indent=2)
        if options.sarif == "-":
            print(text)
        else:
            Path(options.sarif).write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    elif options.sarif != "-":
        from rich.console import Console

        from graphstep.doctor.table import print_diagnosis

        print_diagnosis(diagnosis, Console())
    return diagnosis.exit_code(None if options.fail_on == "never" else Severity(options.fail_on))


@contextlib.contextmanager
def _own_words_hidden(target: str) -> Iterator[None]:
    """A script that reads its command line sees none, as if it had been started by itself."""
    kept = sys.argv
    sys.argv = [target.partition(".py:")[0] + ".py" if ".py:" in target else target]
    try:
        yield
    finally:
        sys.argv = kept


def read_doctor_options(argv: Sequence[str]) -> DoctorOptions:
    """Read the words of a command line.

    Raises:
        ConfigError: all that is wrong with them.
    """
    options, problems = DoctorOptions(), list[Problem]()
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            options.train, words = words, []
        elif name in _SWITCHES and not equals:
            setattr(options, name.removeprefix("--"), True)
        elif name in _VALUES:
            text = value if equals else (words.pop(0) if words else "")
            problems += _set(options, name, text)
        elif name.startswith("--"):
            fix = suggestion(name, (*_VALUES, *_SWITCHES), "options of graphstep train stand after --")
            problems.append(Problem("unknown-option", f"there is no option {name}", name, fix))
        elif options.target is None:
            options.target = word
        else:
            what = f"there are two targets: {options.target} and {word}"
            problems.append(Problem("doctor-target", what, word, "name one, and call the command for each"))
    if options.target is not None and options.train is not None:
        what = "there is a target, and there are options of graphstep train"
        problems.append(Problem("doctor-target", what, options.target, "give one of them"))
    if options.target is None and options.train is None and not options.codes and not problems:
        fix = "name one, such as train.py:step; graphstep doctor --help tells more"
        problems.append(Problem("doctor-target", "there is no target", "graphstep doctor", fix))
    if options.json and options.sarif == "-":
        problems.append(Problem("doctor-output", "both --json and --sarif print", "--sarif", "write one to a file"))
    if problems:
        raise ConfigError(problems)
    return options


def _set(options: DoctorOptions, name: str, text: str) -> list[Problem]:
    if name == "--runs":
        if text.isascii() and text.isdigit() and 2 <= int(text[:6]) <= 1000:
            options.runs = int(text)
            return []
        return [Problem("malformed-value", f"{name}: expected a number from 2 to 1000, got {text!r}", name, "--runs 3")]
    if name == "--fail-on":
        if text in _LEVELS:
            options.fail_on = text
            return []
        fix = suggestion(text, _LEVELS, "use one of these")
        return [Problem("unknown-choice", f"{name}: expected one of {', '.join(_LEVELS)}, got {text!r}", name, fix)]
    if not text:
        return [Problem("malformed-value", f"{name}: a value is missing", name, f"write {name} and what it is")]
    what = _unwritable(text) if name == "--sarif" and text != "-" else ""
    if not what:
        setattr(options, name.removeprefix("--"), text)
    return [Problem("doctor-output", what, name, "name a file in a folder that there is")] if what else []


def _unwritable(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        return f"{path} is a folder"
    return "" if path.parent.is_dir() else f"there is no folder {path.parent}"
