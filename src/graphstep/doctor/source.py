"""The user's files as syntax trees: which functions ran, and which of their statements did not."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(slots=True)
class Sources:
    """Trees by file, read once. A file that cannot be read or parsed has an empty tree."""

    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def tree(self, file: str) -> ast.Module:
        """The tree of a file."""
        known = self._trees.get(file)
        if known is None:
            try:
                known = ast.parse("".join(linecache.getlines(file)), file)
            except (SyntaxError, ValueError):
                known = ast.Module(body=[], type_ignores=[])
            self._trees[file] = known
        return known

    def functions(self, codes: Iterable[CodeType]) -> Iterator[tuple[str, str, Function]]:
        """File, name and tree of functions that ran."""
        for code in sorted(codes, key=lambda each: (each.co_filename, each.co_firstlineno)):
            for node in ast.walk(self.tree(code.co_filename)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    if first == code.co_firstlineno:
                        yield code.co_filename, code.co_qualname, node


def not_run(function: Function, file: str, executed: set[tuple[str, int]]) -> Iterator[ast.AST]:
    """Expressions of statements in a function that did not run, but for what only raises an error."""
    body = function.body if isinstance(function.body, list) else []
    yield from _not_run(body, file, executed)


def _not_run(body: Iterable[ast.stmt], file: str, executed: set[tuple[str, int]]) -> Iterator[ast.AST]:
    for statement in body:
        if isinstance(statement, ast.Raise | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assert):
            continue
        inner = [each for name in ("body", "orelse", "finalbody") for each in getattr(statement, name, [])]
        inner += [each for handler in getattr(statement, "handlers", []) for each in handler.body]
        heads = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr | ast.withitem)]
        first = statement.lineno
        last = max([first, *(getattr(head, "end_lineno", first) or first for head in heads)])
        if not inner:
            last = statement.end_lineno or last
        has_run = any((file, line) in executed for line in range(first, last + 1))
        if not has_run and not _is_text(statement):
            yield from (node for head in (heads if inner else [statement]) for node in ast.walk(head))
        yield from _not_run(inner, file, executed)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def dotted(node: ast.AST) -> str:
    """``torch.cuda.stream`` of such an expression; a call or index in it is left out: ``x.item`` of ``x[0].item``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call | ast.Subscript):
        return f"{dotted(node.func if isinstance(node, ast.Call) else node.value)}()"
    return "?"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value that a call gives under a name."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """True for the literal."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value
