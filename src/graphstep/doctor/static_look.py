"""Reads the user's functions for what their run does not show: branches that were not taken, and work on a GPU."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import CodeType, MappingProxyType
from typing import Final

from graphstep.doctor.findings import FindingList, Severity, SourceLine
from graphstep.doctor.kinds import KINDS
from graphstep.doctor.source import Function, Sources, dotted, is_constant, keyword, not_run

_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "item": "GS-H001",
        "tolist": "GS-H005",
        "cpu": "GS-H004",
        "numpy": "GS-H004",
        "nonzero": "GS-S001",
        "unique": "GS-S003",
        "unique_consecutive": "GS-S003",
        "masked_select": "GS-S004",
        "synchronize": "GS-H010",
        "empty_cache": "GS-C002",
        "manual_seed": "GS-R003",
        "manual_seed_all": "GS-R003",
        "register_forward_hook": "GS-Y007",
        "register_full_backward_hook": "GS-Y007",
    }
)
"""Methods and functions by their last name."""

_FUNCTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "print": "GS-Y005",
        "gc.collect": "GS-C002",
        "torch.equal": "GS-H008",
        "torch.allclose": "GS-H008",
        "torch.save": "GS-H009",
        "torch.tensor": "GS-T001",
        "random.random": "GS-R001",
        "random.randint": "GS-R001",
        "random.uniform": "GS-R001",
        "random.choice": "GS-R001",
        "np.random.rand": "GS-R001",
        "np.random.randn": "GS-R001",
        "np.random.randint": "GS-R001",
        "np.random.uniform": "GS-R001",
        "time.time": "GS-Y006",
        "time.perf_counter": "GS-Y006",
        "dist.barrier": "GS-H010",
        "torch.distributed.barrier": "GS-H010",
    }
)
_MADE_ANEW: Final = frozenset(
    {
        *("np.random.default_rng", "numpy.random.default_rng", "np.random.RandomState", "random.Random"),
        *("os.urandom", "uuid.uuid1", "uuid.uuid4", "random.SystemRandom"),
        *("secrets.choice", "secrets.randbelow", "secrets.randbits", "secrets.token_bytes", "secrets.token_hex"),
    }
)
"""What no state tells of afterwards."""
_LEGACY: Final = frozenset(
    {"Tensor", "torch.Tensor"}
    | {
        f"torch.{kind}Tensor"
        for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Bool")
    }
)
"""Classes of tensors that are called. No hook of torch or of Python sees that."""
_STREAMS: Final = frozenset({"torch.cuda.stream", "cuda.stream", "torch.cuda.StreamContext"})


class StaticLook:
    """Reads functions of which a part ran."""

    def __init__(self, findings: FindingList, sources: Sources) -> None:
        self._findings = findings
        self._sources = sources

    def read(self, functions: set[CodeType], executed: set[tuple[str, int]]) -> None:
        """Note what they would do that they have not done."""
        for file, name, function in self._sources.functions(functions):
            for node in not_run(function, file, executed):
                if isinstance(node, ast.Call):
                    self._call(node, file, name)
            for node in ast.walk(function):
                if isinstance(node, ast.With | ast.AsyncWith):
                    self._with(node, function, file, name)
                elif isinstance(node, ast.Call):
                    self._names_cpu(node, file, name)
                    if dotted(node.func) in _LEGACY and node.args:
                        self._legacy(node, file, name, has_run=(file, node.lineno) in executed)
                    if dotted(node.func) in _MADE_ANEW:
                        self._add("GS-R001", node, file, name, f"{dotted(node.func)}()")

    def _call(self, call: ast.Call, file: str, name: str) -> None:
        full = dotted(call.func)
        code = _FUNCTIONS.get(full) or (_METHODS.get(call.func.attr) if isinstance(call.func, ast.Attribute) else None)
        if code is None and is_constant(keyword(call, "retain_graph"), True):
            code = "GS-W010"
        if code is not None:
            self._add(code, call, file, name, f"{full}()", has_run=False)

    def _with(self, node: ast.With | ast.AsyncWith, function: Function, file: str, name: str) -> None:
        for item in node.items:
            opened = item.context_expr
            if isinstance(opened, ast.Call) and dotted(opened.func) in _STREAMS and opened.args:
                side = ast.unparse(opened.args[0])
                begin, end = node.lineno, node.end_lineno or node.lineno
                missing = []
                if not _waits(function, of=None, by=side, until=begin):
                    missing.append("it does not wait for the stream around it")
                if not _waits(function, of=side, by=None, after=end):
                    missing.append("the stream around it does not wait for it")
                if missing:
                    detail = f"{side}: {' and '.join(missing)}"
                    self._add("GS-C001", node, file, name, "torch.cuda.stream", detail=detail)

    def _legacy(self, call: ast.Call, file: str, name: str, *, has_run: bool) -> None:
        holds_values = isinstance(call.args[0], ast.List | ast.Tuple | ast.ListComp)
        code = "GS-T001" if holds_values else "GS-T002"
        self._add(code, call, file, name, f"{dotted(call.func)}()", has_run=has_run)

    def _names_cpu(self, call: ast.Call, file: str, name: str) -> None:
        is_move = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
        given = [*(call.args[:1] if is_move else []), keyword(call, "device")]
        if any(_is_cpu(value) for value in given):
            self._add(
                "GS-T005",
                call,
                file,
                name,
                f"{dotted(call.func)}({ast.unparse(call.args[0]) if is_move and call.args else 'device'}...)",
            )

    def _add(
        self, code: str, node: ast.stmt | ast.expr, file: str, name: str, operation: str, *, detail: str = "",
        has_run: bool = True,
    ) -> None:  # fmt: skip
        kind = KINDS[code]
        severity = kind.severity
        if not has_run:
            severity = max(severity, Severity.warning, key=lambda each: each.rank)
            detail = detail or "in a branch that this run did not take"
        where = SourceLine(file, node.lineno, name)
        self._findings.add(kind, where, operation, detail=detail, severity=severity, has_run=has_run)


def _is_cpu(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Call) and dotted(node.func) in ("torch.device", "device") and node.args:
        node = node.args[0]
    return is_constant(node, "cpu")


def _waits(function: Function, *, of: str | None, by: str | None, after: int = 0, until: int = 1 << 30) -> bool:
    """True if the function has ``by.wait_stream(of)`` between two lines; ``None`` stands for any stream."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in ("wait_stream", "wait_event") or not after < node.lineno <= until:
            continue
        is_by = by is None or ast.unparse(node.func.value) == by
        is_of = of is None or node.func.attr == "wait_event" or any(ast.unparse(each) == of for each in node.args)
        if is_by and is_of:
            return True
    return False
