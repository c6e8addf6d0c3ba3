"""Rules of this code base that a parser can see. CONTRIBUTING.md gives the reasons."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "graphstep"
FILES = sorted(PACKAGE.rglob("*.py"))

Fault = tuple[int, str]
Rule = Callable[[ast.Module], Iterator[Fault]]

# Which parts of the package each part may import, type-only imports included. Everybody may import what is in BASE.
# An entry "models.segments" allows that module alone.
BASE = ("errors", "version", "cache_folder")
RECORDING = ("config", "engine", "capture", "coverage", "native")
STEPPING = (*RECORDING, "models", "moe", "parallel", "strategies", "checkpoint_folders")
BELOW_STRATEGIES = ("cut_forward", "forward_code", "recording", "structure", "unused_cache")
LOOPS = (*STEPPING, "verification", "training", "inference", "rl")
IMPORTS_ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "version": (),
    "cache_folder": (),
    "checkpoint_folders": (),
    "config": (),
    "engine": ("config",),
    "native": (),
    "coverage": ("models.segments",),
    "capture": ("config", "engine", "coverage", "native.interface"),
    "models": ("config", "engine.torch_private"),
    "moe": ("config", "models"),
    "parallel": ("config", "models"),
    # What models of others are like is below the strategies; the callback, which attaches, is above them.
    "strategies": (*RECORDING, "models.segments", *(f"hugging_face.{name}" for name in BELOW_STRATEGIES)),
    "hugging_face": (*RECORDING, "strategies"),
    "verification": (*RECORDING, "strategies"),
    "training": (*STEPPING, "verification"),
    "inference": STEPPING,
    "server": ("config", "inference"),
    "rl": LOOPS,
    "planning": LOOPS,
    "doctor": LOOPS,
    "bench": LOOPS,
    "integrations": LOOPS,
    "cli": (*LOOPS, "server", "planning", "doctor", "bench", "integrations"),
    "__main__": ("cli",),
}
WITHOUT_LIBRARIES = ("errors", "version", "config")
HEAVY_LIBRARIES = {"torch", "numpy", "safetensors", "tokenizers", "tensorboard", "starlette", "uvicorn"}

MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    *("list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "count", "local"),
    *("ContextVar", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"),
}
CONSTANT_ANNOTATIONS = {"Final", "Mapping", "Sequence", "Set", "tuple", "frozenset", "TypeAlias"}
MUTATING_METHODS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard"),
    *("sort", "reverse", "appendleft", "popleft"),
}


def last_name(node: ast.AST | None) -> str:
    """`Final` of `typing.Final[...]`; the annotation inside `ClassVar[...]`."""
    if isinstance(node, ast.Subscript):
        return last_name(node.slice) if last_name(node.value) == "ClassVar" else last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_mutable(value: ast.AST | None) -> bool:
    return isinstance(value, MUTABLE_LITERALS) or (
        isinstance(value, ast.Call) and last_name(value.func) in MUTABLE_CALLS
    )


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import: of modules and classes, not of functions."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from statements(handler.body)


def assignments(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str, ast.AST | None, str]]:
    """Assignments that run at import: statement, name, value, annotation."""
    for statement in statements(body):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield statement, last_name(target), statement.value, ""
        elif isinstance(statement, ast.AnnAssign):
            yield statement, last_name(statement.target), statement.value, last_name(statement.annotation)


def no_global_statement(tree: ast.Module) -> Iterator[Fault]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"`global {', '.join(node.names)}`: give the state to an object"


def no_mutable_module_or_class_state(tree: ast.Module) -> Iterator[Fault]:
    for statement, name, value, annotation in assignments(tree.body):
        if is_mutable(value) and name != "__all__" and annotation not in CONSTANT_ANNOTATIONS:
            yield statement.lineno, f"`{name}` is mutable: annotate a constant as Final or Mapping, or make it a tuple"


def constant_tables_stay_constant(tree: ast.Module) -> Iterator[Fault]:
    tables = {name for _, name, value, _ in assignments(tree.body) if is_mutable(value)}
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            name = node.value.id if isinstance(node.value, ast.Name) else ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
            name = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if name in tables:
            yield node.lineno, f"`{name}` is a table of the module and is changed here"


def no_bare_except(tree: ast.Module) -> Iterator[Fault]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare `except:`: name the exception"


def no_assert(tree: ast.Module) -> Iterator[Fault]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "`assert`: raise an error of graphstep.errors"


def future_annotations(tree: ast.Module) -> Iterator[Fault]:
    code = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    found = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" and node.names[0].name == "annotations"
        for node in code
    )
    only_constants = all(isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) for node in code)
    if not found and not only_constants:
        yield 1, "`from __future__ import annotations` is missing"


RULES: tuple[Rule, ...] = (
    no_global_statement,
    no_mutable_module_or_class_state,
    constant_tables_stay_constant,
    no_bare_except,
    no_assert,
    future_annotations,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule: Rule) -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in FILES
        for line, what in rule(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("rule", "source", "num_faults"),
    [
        (no_global_statement, "def f():\n    global x", 1),
        (no_mutable_module_or_class_state, "x = []\ny: dict[str, int] = {}\nz = collections.deque()", 3),
        (no_mutable_module_or_class_state, "class A:\n    x = {1}\n    y: ClassVar[list[int]] = list()", 2),
        (no_mutable_module_or_class_state, "if a:\n    x = [1]\ntry:\n    pass\nexcept E:\n    y = {}", 2),
        (no_mutable_module_or_class_state, "x: Final = {}\ny: Mapping[int, int] = {}\n__all__ = []\nz = (1, 2)", 0),
        (no_mutable_module_or_class_state, "class A:\n    x: ClassVar[Mapping[int, int]] = {}\n    y: int = 3", 0),
        (no_mutable_module_or_class_state, "def f():\n    x = []\n    class A:\n        y = []", 0),
        (constant_tables_stay_constant, "T: Final = {}\ndef f():\n    T[1] = 2\n    T.update(a=1)\n    del T[1]", 3),
        (constant_tables_stay_constant, "T: Final = {}\ndef f(t):\n    t[1] = T[2]\n    return T.get(1)", 0),
        (no_bare_except, "try:\n    pass\nexcept:\n    pass", 1),
        (no_bare_except, "try:\n    pass\nexcept ValueError:\n    pass", 0),
        (no_assert, "assert x", 1),
        (future_annotations, "import os", 1),
        (future_annotations, '"""Text."""\n\nfrom __future__ import annotations\n', 0),
        (future_annotations, '"""Text."""\n__version__ = "1"', 0),
    ],
)
def test_rule_sees(rule: Rule, source: str, num_faults: int) -> None:
    assert len(list(rule(ast.parse(source)))) == num_faults


def test_files_are_short() -> None:
    folders = [ROOT / name for name in ("tests", "benchmarks", "examples", "scripts")]
    paths = [*FILES, *(path for folder in folders for path in folder.rglob("*.py"))]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: length for path, length in lengths.items() if length > 500} == {}


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a file imports, anywhere in it."""
    package = ("graphstep", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_imports_point_downwards() -> None:
    faults = []
    for path in FILES:
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue  # the public names: imported when first used, from anywhere
        if part not in IMPORTS_ALLOWED:
            faults.append(f"{path.relative_to(ROOT)}: `{part}` has no entry in the table of this test")
            continue
        allowed = (part, *BASE, *IMPORTS_ALLOWED[part])
        for line, name in imported_modules(path):
            library, _, target = name.partition(".")
            if library == "graphstep" and target:
                if not any(f"{target}.".startswith(f"{entry}.") for entry in allowed):
                    faults.append(f"{path.relative_to(ROOT)}:{line}: `{part}` may not import `{target}`")
            elif part in WITHOUT_LIBRARIES and library in HEAVY_LIBRARIES:
                faults.append(f"{path.relative_to(ROOT)}:{line}: `{part}` may not import `{library}`")
    assert faults == []


def tracked_text_files() -> Iterator[tuple[str, str]]:
    # The option makes git answer also where the checkout belongs to another user, as in some containers.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            yield name, data.decode("utf-8")


# Written in pieces, so that this file does not contain what it forbids.
REGISTRY_HOSTS = re.compile("|".join(re.escape(f"{host}.org") for host in ("pypi", "pythonhosted", "pytorch")))
MACHINE_PATHS = re.compile(r"(?<![\w./~-])/(?:" + "|".join(("work", "tmp", "root", "home")) + r")/\w")


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="only a git checkout knows its tracked files"
)
def test_tracked_files_name_no_machine() -> None:
    faults = []
    for name, text in tracked_text_files():
        for number, line in enumerate(text.splitlines(), 1):
            if REGISTRY_HOSTS.search(line):
                faults.append(f"{name}:{number}: names a package registry: {line.strip()}")
            if not name.startswith("tests/") and MACHINE_PATHS.search(line):
                faults.append(f"{name}:{number}: names a path of one machine: {line.strip()}")
    assert faults == []


def test_forbidden_words_are_seen() -> None:
    assert REGISTRY_HOSTS.search("see https://download.pytorch" + ".org/whl")
    assert MACHINE_PATHS.search('open("/' + 'work/x")')
    assert MACHINE_PATHS.search("cd /" + "tmp/run")
    assert not MACHINE_PATHS.search("src/" + "work/file, https://example.com/" + "home/page, ./" + "tmp/x")
