"""Read a configuration from a YAML or a TOML file.

Keys are the names of options with underscores (``cuda_graph_impl``). They may stand in sections named as those of
``RunConfig`` (``model``, ``training``, ``graphs``), where a field of the section has its short name as well (``impl``).
A file goes through the same checks as a command line. A command line with ``--config FILE`` wins over the file:
default < file < option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphstep.config.arguments import configure
from graphstep.config.environment import Machine
from graphstep.config.keywords import ALIASES, read_keywords
from graphstep.config.migrations import FULL_ITERATION, FULL_ITERATION_INFERENCE
from graphstep.config.options import OPTIONS, Option
from graphstep.config.parsing import Reading
from graphstep.config.run import RunConfig
from graphstep.config.suggest import suggestion
from graphstep.config.text_files import read_text
from graphstep.config.yaml_reader import compose_yaml, construct_yaml
from graphstep.errors import ConfigError, Problem

if TYPE_CHECKING:
    from yaml.nodes import Node

SECTION_NAMES = frozenset(option.section for option in OPTIONS if option.section is not None)
_SHORT_NAMES: Mapping[tuple[str, str], str] = {(str(o.section), o.target): o.dest for o in OPTIONS if o.section}
_TABLE: Mapping[str, Option] = {option.dest: option for option in OPTIONS}
_NAMES_OF_FLAGS: Mapping[str, str] = {spelling: option.dest for option in OPTIONS for spelling in option.spellings}
_OFF_NAMES: Mapping[str, str] = {
    flag.removeprefix("--").replace("-", "_"): option.dest for option in OPTIONS for flag in option.off_flags
}
"""Names of spellings that turn a switch off: true there is false for the switch."""
_OTHER_NAMES = frozenset({*ALIASES, "cpu_offloading"})
# fmt: off
_GROUPS: tuple[frozenset[str], ...] = (
    frozenset({"cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"}),
    frozenset({"cuda_graph_modules", "cuda_graph_scope"}),
    frozenset({"inference_cuda_graph_scope"}),
    frozenset({"moe_router_padding_for_quantization", "moe_router_padding_for_fp8"}),
    frozenset({"hybrid_layer_pattern", "hybrid_override_pattern"}),
)
# fmt: on
"""Names of which one, given later, takes the place of all."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    """As written in the file, without its section."""
    section: str
    value: Any
    line: int
    """0 where it is not known."""


@dataclass(kw_only=True, slots=True)
class FileReading:
    """What a file says."""

    path: str
    """The file."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values by option name."""
    wrong: set[str] = field(default_factory=set)
    """Names whose values cannot be read."""
    lines: dict[str, int] = field(default_factory=dict)
    """Where values stand, by option name; 0 where that is not known."""
    problems: list[Problem] = field(default_factory=list)
    """Everything that cannot be read, each with its place."""

    def place(self, name: str) -> str:
        """Return file and line of a value."""
        line = self.lines.get(name, 0)
        return f"{self.path}:{line}" if line else self.path

    def located(self, problem: Problem) -> Problem:
        """Return a problem of the rules with the place of the first of its options that the file gives."""
        for flag in re.split(r",\s*", problem.where):
            name = _NAMES_OF_FLAGS.get(flag, "")
            if name in self.lines:
                return replace(problem, where=f"{self.place(name)}: {problem.where}")
        return problem


def values_from_file(path: str | os.PathLike[str]) -> FileReading:
    """Read a file; never raises for what stands in it.

    Args:
        path: a file whose name ends in ``.yaml``, ``.yml`` or ``.toml``.

    Returns:
        Values by option name, their lines, and all problems.
    """
    reading = FileReading(path=os.fspath(path))
    try:
        entries = list(_entries(reading))
    except ConfigError as error:
        reading.problems += error.problems
        return reading
    flat = {entry.name: entry.value for entry in entries}
    for entry in entries:
        name = _SHORT_NAMES.get((entry.section, entry.name), entry.name)
        name = ALIASES.get(name, name)
        value = entry.value
        if name in _OFF_NAMES and name not in _TABLE:
            name, value = _OFF_NAMES[name], not value if isinstance(value, bool) else value
        place = f"{reading.path}:{entry.line}" if entry.line else reading.path
        if name in SECTION_NAMES and not entry.section and name not in _TABLE:
            what = f"{name} is a section, and holds keys and values"
            reading.problems.append(Problem("section-value", what, place, f"put them below {name}, or leave it out"))
            continue
        if name not in _TABLE and name not in _OTHER_NAMES:
            fix = suggestion(entry.name, [*_TABLE, *SECTION_NAMES], "graphstep train --help lists the options")
            reading.problems.append(Problem("unknown-key", f"there is no option {entry.name}", place, fix))
            continue
        if name in reading.lines:
            what = f"{name} is given more than once"
            reading.problems.append(Problem("given-twice", what, place, "leave the others out"))
            continue
        reading.lines[name] = entry.line
        _take(reading, name, _typed(name, value), place, flat)
    return reading


def from_file(
    path: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    *,
    machine: Machine | None = None,
    for_training: bool = False,
) -> RunConfig:
    """Return the configuration that a file asks for. Old options are migrated, with one notice each.

    Args:
        path: a file whose name ends in ``.yaml``, ``.yml`` or ``.toml``. YAML needs the extra ``yaml``.
        env: environment variables that rules look at; those of this process if None, as they are now.
        machine: what the configuration is for; nothing is known if None.
        for_training: refuse what ``graphstep train`` cannot do yet.

    Raises:
        ConfigError: everything that is wrong with the file or with what it asks for, at once, with lines where they are
            known.
    """
    env = os.environ if env is None else env
    return configure_with_file(path, Reading(), env=env, machine=machine, for_training=for_training)


def configure_with_file(
    path: str | os.PathLike[str],
    given: Reading,
    *,
    env: Mapping[str, str] | None,
    machine: Machine | None,
    for_training: bool,
) -> RunConfig:
    """Return the configuration that a command line and a file ask for together.

    Args:
        path: the file.
        given: what the command line says; it gets what only the file says.
        env: environment variables; None: rules about the environment are left out.
        machine: what the configuration is for.
        for_training: refuse what ``graphstep train`` cannot do yet.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    file = values_from_file(path)
    origins = merge(file, given)
    try:
        return configure(given, env=env, origins=origins, machine=machine, for_training=for_training)
    except ConfigError as error:
        located = [file.located(problem) for problem in error.problems]
        raise ConfigError(located, notices=error.notices) from error


def merge(file: FileReading, given: Reading) -> dict[str, str]:
    """Put the values of a file behind those of a command line.

    Args:
        file: what the file says.
        given: what the command line says; gets the values that it does not give itself, and the problems.

    Returns:
        Where values came from, by name: ``file``.
    """
    covered = set(given.values) | given.wrong
    modules = {*given.values.get("cuda_graph_modules", ()), *given.values.get("cuda_graph_scope", ())}
    if FULL_ITERATION in modules:
        covered.add("cuda_graph_impl")
    if FULL_ITERATION_INFERENCE in modules:
        covered.add("inference_cuda_graph_scope")
    for group in _GROUPS:
        covered |= group if not group.isdisjoint(covered) else frozenset()
    taken = {name: value for name, value in file.values.items() if name not in covered}
    given.values.update(taken)
    given.wrong |= file.wrong - covered
    given.problems += file.problems
    return dict.fromkeys(taken, "file")


def _take(reading: FileReading, name: str, value: Any, place: str, flat: Mapping[str, Any]) -> None:
    given = {name: value}
    if name == "cpu_offloading":
        given["cpu_offloading_num_layers"] = flat.get("cpu_offloading_num_layers")
    found = read_keywords(given)
    reading.problems += [replace(problem, where=place) for problem in found.problems]
    reading.wrong |= found.wrong
    reading.values |= {key: item for key, item in found.values.items() if key == name}


def _typed(name: str, value: Any) -> Any:
    """Read what YAML takes for something else: ``1e-4``, which is text there, and the word ``off``, which is false."""
    option = _TABLE.get(name)
    if option is not None and value is False and "off" in option.choices:
        return "off"
    if option is None or not isinstance(value, str) or option.nargs != 1 or "str" in option.annotation:
        return value
    try:
        return option.type(value)
    except ValueError:
        return value


def _entries(reading: FileReading) -> Iterator[_Entry]:
    suffix = os.path.splitext(reading.path)[1].lower()
    if suffix in (".yaml", ".yml"):
        return _yaml_entries(reading)
    if suffix == ".toml":
        return _toml_entries(reading)
    what = f"the name of a configuration ends in .yaml, .yml or .toml, not in {suffix or 'nothing'}"
    raise ConfigError(Problem("file-kind", what, reading.path, "rename the file"))


def _yaml_entries(reading: FileReading) -> Iterator[_Entry]:
    documents = compose_yaml(read_text(reading.path), reading.path)
    if len(documents) > 1:
        what = f"expected one document, found {len(documents)}"
        raise ConfigError(Problem("file-shape", what, reading.path, "put everything into one document"))
    for document in documents:
        if document.id != "mapping":
            raise ConfigError(_not_a_mapping(reading.path))
        yield from _yaml_mapping(reading, document, "")


def _yaml_mapping(reading: FileReading, node: Node, section: str) -> Iterator[_Entry]:
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if key.id != "scalar":
            what = "a key is one word"
            fix = "write lines such as cuda_graph_impl: local"
            reading.problems.append(Problem("file-shape", what, f"{reading.path}:{line}", fix))
        elif value.id != "mapping":
            try:
                yield _Entry(name, section, construct_yaml(value, reading.path), line)
            except ConfigError as error:
                reading.problems += error.problems
        elif name == "<<" or (not section and name in SECTION_NAMES):
            yield from _yaml_mapping(reading, value, section or ("" if name == "<<" else name))
        else:
            reading.problems.append(_unknown_section(name, section, f"{reading.path}:{line}"))


def _toml_entries(reading: FileReading) -> Iterator[_Entry]:
    import tomllib

    text = read_text(reading.path)
    try:
        content = tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        where = f"{reading.path}:{found[1]}" if found else reading.path
        problem = Problem("toml-syntax", f"this is no TOML: {error}", where, "correct the file")
        raise ConfigError(problem) from error
    except RecursionError as error:
        raise ConfigError(Problem("toml-syntax", "nested too deeply", reading.path, "correct the file")) from error
    lines = _toml_lines(text)
    for name, value in content.items():
        if not isinstance(value, dict):
            yield _Entry(name, "", value, lines.get(("", name), 0))
        elif name in SECTION_NAMES:
            for key, item in value.items():
                line = lines.get((name, key), 0)
                if isinstance(item, dict):
                    where = f"{reading.path}:{line}" if line else reading.path
                    reading.problems.append(_unknown_section(key, name, where))
                else:
                    yield _Entry(key, name, item, line)
        else:
            line = lines.get((name, ""), 0)
            where = f"{reading.path}:{line}" if line else reading.path
            reading.problems.append(_unknown_section(name, "", where))


def _toml_lines(text: str) -> dict[tuple[str, str], int]:
    """Return where keys stand, by section and name; the section itself has the name ``""``."""
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(r"\s*\[\s*\"?([\w-]+)\"?\s*\]", line):
            section = header[1]
            found.setdefault((section, ""), number)
        elif key := re.match(r"\s*\"?([\w-]+)\"?\s*(?:\.\s*\"?([\w-]+)\"?\s*)?=", line):
            found.setdefault((key[1], key[2]) if key[2] else (section, key[1]), number)
    return found


def _unknown_section(name: str, section: str, where: str) -> Problem:
    if section:
        what = f"{section}.{name} holds keys of its own"
        return Problem("unknown-section", what, where, f"put them into {section}, without a section in it")
    fix = suggestion(name, SECTION_NAMES, f"the sections are {', '.join(sorted(SECTION_NAMES))}")
    return Problem("unknown-section", f"there is no section {name}", where, fix)


def _not_a_mapping(path: str) -> Problem:
    return Problem("file-shape", "expected keys and values", path, "write lines such as cuda_graph_impl: local")
