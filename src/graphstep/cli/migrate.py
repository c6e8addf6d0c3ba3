"""``graphstep migrate``: write old options of CUDA graphs in their new form. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from graphstep.cli.problems import print_notices, printable, say
from graphstep.config.migration import Rewrite, migrate_argv, migrate_shell, migrate_yaml
from graphstep.config.suggest import suggestion
from graphstep.config.text_files import decoded, encoded, read_text, replace_file
from graphstep.config.validation import Notice
from graphstep.errors import ConfigError, Problem

IN_PLACE, CHECK, KIND = "--in-place", "--check", "--kind"
_OWN = (IN_PLACE, CHECK, KIND)
_KINDS = ("shell", "yaml")
_YAML_SUFFIXES = (".yaml", ".yml")
_OTHER_SUFFIXES = (".toml", ".json", ".py", ".ini", ".cfg")
_EXIT_OK, _EXIT_WOULD_CHANGE = 0, 1

HELP = """\
usage: graphstep migrate [options] FILE ...
       graphstep migrate [options] [--] COMMAND LINE

Write old options of CUDA graphs (--enable-cuda-graph, --external-cuda-graph, --cuda-graph-scope and its values full,
full_iteration, full_iteration_inference) in their new form (--cuda-graph-impl, --cuda-graph-modules,
--inference-cuda-graph-scope). Nothing else is touched.

FILE is a shell script or a YAML file, and the difference is shown; - is standard input, and the new text goes to
standard output. A command line begins with its first option that is not listed here, or with --; it is printed in its
new form, and the difference on standard error. What cannot be rewritten safely is left alone and reported with its
line. Forms that contradict each other are refused, and then nothing is written.

options:
  --in-place         write the files; each is replaced in one step
  --check            write nothing; exit with 1 if something would change, or old options are left alone
  --kind shell|yaml  what the files are (default: told by the end of their names)

exit codes: 0 done, 1 something would change or is left alone (--check), 2 bad input
"""


@dataclass(frozen=True, slots=True)
class _Request:
    files: tuple[str, ...]
    command: tuple[str, ...]
    is_in_place: bool
    is_check: bool
    kind: str


def run(argv: Sequence[str]) -> int:
    """Migrate a command line or files.

    Args:
        argv: see ``HELP``.

    Returns:
        Exit code: 0, or 1 with ``--check`` if something would change or old options are left alone.

    Raises:
        ConfigError: bad options, files that cannot be read, ambiguous mixes; all at once, and nothing is written.
    """
    request = _read(argv)
    if request.command:
        new, rewrite = migrate_argv(request.command)
        say(printable(rewrite.diff()), end="")
        if not request.is_check:
            print(printable(shlex.join(new)))
        rewrites = [rewrite]
    else:
        rewrites = _migrate_files(request)
    if sys.stdout is not None:  # None: the shell closed it
        sys.stdout.flush()
    for rewrite in rewrites:
        print_notices([_with_place(notice) for notice in (*rewrite.changes, *rewrite.left)])
    return _check(rewrites) if request.is_check else _EXIT_OK


def _with_place(notice: Notice) -> Notice:
    """Return a notice that begins with its place: in a command line an option, which it may begin with anyway."""
    option = notice.where.partition("=")[0]
    return notice if notice.what.startswith(f"{option} ") else replace(notice, what=f"{notice.where}: {notice.what}")


def _check(rewrites: Sequence[Rewrite]) -> int:
    """Return the exit code of ``--check``; say so where old options that need a hand are a part of its reason."""
    num_left = sum(len(rewrite.left) for rewrite in rewrites)
    if num_left:
        options = "1 old option is" if num_left == 1 else f"{num_left} old options are"
        print_notices([Notice("check-left", f"{CHECK}: {options} left alone", "", "write the new form by hand")])
    return _EXIT_WOULD_CHANGE if num_left or any(rewrite.is_changed for rewrite in rewrites) else _EXIT_OK


def _migrate_files(request: _Request) -> list[Rewrite]:
    rewrites: list[Rewrite] = []
    problems: list[Problem] = []
    for path in request.files:
        try:
            rewrites.append(_migrate_file(path, request.kind))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    for path, rewrite in zip(request.files, rewrites, strict=True):
        is_filter = path == "-" and not request.is_check
        if is_filter:
            say(printable(rewrite.diff()), end="")
            if sys.stdout is not None:  # None: the shell closed it
                sys.stdout.flush()
                sys.stdout.buffer.write(encoded(rewrite.after))
            continue
        print(printable(rewrite.diff()), end="")
        if request.is_in_place and rewrite.is_changed:
            replace_file(path, rewrite.after)
    return rewrites


def _migrate_file(path: str, kind: str) -> Rewrite:
    if path == "-":
        if sys.stdin is None:
            raise ConfigError(Problem("migrate-stdin", "standard input is closed", "-", "name a file"))
        text, source = decoded(sys.stdin.buffer.read()), "standard input"
    else:
        text, source = read_text(path), path
    suffix = next((s for s in (*_YAML_SUFFIXES, *_OTHER_SUFFIXES) if path.lower().endswith(s)), "")
    if not kind and suffix in _OTHER_SUFFIXES:
        fix = "name a shell script or a YAML file; --kind shell or --kind yaml reads it as such"
        raise ConfigError(Problem("migrate-kind", f"{suffix} files cannot be rewritten", path, fix))
    is_yaml = kind == "yaml" or (not kind and suffix in _YAML_SUFFIXES)
    return migrate_yaml(text, source) if is_yaml else migrate_shell(text, source)


def _read(argv: Sequence[str]) -> _Request:
    plain: list[str] = []
    given: list[str] = []
    problems: list[Problem] = []
    kind = ""
    is_command = False
    words = list(argv)
    while words and not is_command:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if word in (IN_PLACE, CHECK):
            given.append(word)
        elif option == KIND:
            given.append(KIND)
            kind = value if equals else (words.pop(0) if words else "")
        elif word.startswith("-") and word != "-":
            meant = "" if word == "--" else _nearly_own(option)
            is_command = not meant
            if meant:
                what, fix = f"there is no option {option}", f"did you mean {meant}?"
                problems.append(Problem("unknown-option", what, option, fix))
            elif word != "--":
                plain.append(word)
        else:
            plain.append(word)
    plain += words
    if KIND in given and kind not in _KINDS:
        what = f"{KIND}: expected one of {', '.join(_KINDS)}, got {kind!r}"
        problems.append(Problem("unknown-choice", what, KIND, suggestion(kind, _KINDS, "use one of these")))
    problems += _contradictions(plain, given, is_command)
    if problems:
        raise ConfigError(problems)
    files, command = ((), tuple(plain)) if is_command else (tuple(plain), ())
    return _Request(files, command, IN_PLACE in given, CHECK in given, kind)


def _nearly_own(option: str) -> str:
    """Return the option of this command that a misspelled one stands for; empty: it belongs to a command line."""
    own = {name.strip("-"): name for name in _OWN}
    close = get_close_matches(option.strip("-"), own, n=1, cutoff=0.75)
    return own[close[0]] if close else ""


def _contradictions(plain: Sequence[str], given: Sequence[str], is_command: bool) -> Iterator[Problem]:
    if not plain:
        fix = "name files, or give a command line"
        yield Problem("migrate-nothing", "there is nothing to migrate", "graphstep migrate", fix)
    for option in (IN_PLACE, KIND):
        if is_command and option in given:
            yield Problem(
                "migrate-no-file", f"{option} is for files, and this is a command line", option, "leave it out"
            )
    if not is_command and (plain.count("-") > 1 or ("-" in plain and IN_PLACE in given)):
        what = "standard input can be read once, and cannot be written in place"
        yield Problem("migrate-stdin", what, "-", f"name a file, or leave {IN_PLACE} out")
    if IN_PLACE in given and CHECK in given:
        what = f"{IN_PLACE} writes and {CHECK} does not"
        yield Problem("migrate-contradiction", what, f"{IN_PLACE}, {CHECK}", "use one of the two")
