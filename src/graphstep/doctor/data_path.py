"""Looks at the batches and at the loader that they come from."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from graphstep.capture.tree import Node, Value, flatten
from graphstep.doctor.findings import FindingList, Severity, SourceLine
from graphstep.doctor.kinds import KINDS
from graphstep.doctor.source import Sources, dotted


class DataPath:
    """Where findings about the data go, and the line to name for them.

    Args:
        findings: where they go.
        where: the step.
    """

    def __init__(self, findings: FindingList, where: SourceLine, sources: Sources) -> None:
        self._findings = findings
        self._where = where
        self._sources = sources

    def look_at_batches(self, batches: Sequence[Any], *, may_be_short: bool) -> None:
        """Compare batches with each other.

        Args:
            batches: some of them.
            may_be_short: that the last one has fewer entries is known.
        """
        flat = [flatten(batch) for batch in batches]
        if not flat:
            return
        first_tensors, first_structure = flat[0]
        for tensors, structure in flat[1:]:
            for path, mine, theirs in _differences(first_structure, structure, ""):
                detail = f"{path or 'the batch'}: {mine!r:.40}, then {theirs!r:.40}"
                self._add("GS-D001", self._where, "batch", detail)
                break
            for mine, theirs in zip(first_tensors, tensors, strict=False):
                if may_be_short and mine.shape[1:] == theirs.shape[1:]:
                    continue
                if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                    detail = f"{tuple(mine.shape)} {mine.dtype}, then {tuple(theirs.shape)} {theirs.dtype}"
                    self._add("GS-D005", self._where, "batch", detail.replace("torch.", ""))
                    break

    def look_at_loader(self, loader: DataLoader[Any], name: str, files: Sequence[str]) -> bool:
        """Look at how a loader was built; tells whether its last batch is short.

        Args:
            loader: of the batches.
            name: of the variable that holds it.
            files: where it may have been built.
        """
        where = self._built_at(name, files) or self._where
        size = loader.batch_size
        length = _length(loader)
        is_short = size is not None and not loader.drop_last and (length is None or length % size > 0)
        if size is not None and is_short:
            short = f"{length % size} of {length} entries are left for it" if length else "its length is not known"
            self._add("GS-D002", where, "DataLoader", f"batch_size={size}: {short}")
        if not loader.pin_memory:
            self._add("GS-D003", where, "DataLoader", "pin_memory=False")
        return is_short

    def _add(self, code: str, where: SourceLine, operation: str, detail: str) -> None:
        severity: Severity | None = None
        self._findings.add(KINDS[code], where, operation, detail=detail, part="data", severity=severity)

    def _built_at(self, name: str, files: Sequence[str]) -> SourceLine | None:
        """The line that builds the loader: the one whose result has its name, else the only one."""
        found = []
        for file in files:
            for node in ast.walk(self._sources.tree(file)):
                if _assigns_loader(node, name):
                    return SourceLine(file, node.lineno)
                if isinstance(node, ast.Call) and _builds(node):
                    found.append(SourceLine(file, node.lineno))
        return found[0] if found else None


def _assigns_loader(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _builds(node.value)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    )


def _builds(call: ast.Call) -> bool:
    return dotted(call.func).rpartition(".")[2] == "DataLoader"


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _differences(mine: Node | Value, theirs: Node | Value, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Values that are no tensors and differ."""
    if isinstance(mine, Value) or isinstance(theirs, Value):
        if mine != theirs:
            yield path, getattr(mine, "value", mine), getattr(theirs, "value", theirs)
        return
    if mine.kind is not theirs.kind or mine.names != theirs.names:
        yield path, mine.names, theirs.names
        return
    for name, left, right in zip(mine.names, mine.children, theirs.children, strict=True):
        yield from _differences(left, right, f"{path}[{name!r}]")


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch."""
    return [tensor for tensor in flatten(batch)[0] if isinstance(tensor, torch.Tensor)]
