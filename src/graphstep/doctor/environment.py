"""Looks at variables of the environment that NCCL, the allocator and the launches of CUDA read."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Final

from graphstep.config.environment import ALLOCATOR_VARIABLES, read_environment
from graphstep.doctor.findings import FindingList, SourceLine
from graphstep.doctor.kinds import KINDS
from graphstep.doctor.source import Sources, dotted, is_constant

_WAITS: Final = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_NO_CACHE: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_OFF: Final = ("", "0")


def look_at_environment(
    findings: FindingList, variables: Mapping[str, str], sources: Sources, files: Sequence[str], *, communicates: bool
) -> None:
    """Note settings that capture or replay suffer from, at the line that makes them or at the variable's name.

    Args:
        findings: where they go.
        variables: of the process.
        sources: reads the files.
        files: the user's.
        communicates: the step uses collectives, or its code names them.
    """
    environment, _ = read_environment(variables)
    registers = environment.nccl_graph_register != "0" and (communicates or environment.world_size > 1)
    if environment.expandable_segments and registers:
        name = next((each for each in ALLOCATOR_VARIABLES if "expandable" in variables.get(each, "")), "")
        _add(findings, "GS-E001", name, variables, sources, files)
    for name in _WAITS:
        if variables.get(name, "").strip() not in _OFF:
            _add(findings, "GS-E002", name, variables, sources, files)
    if variables.get(_NO_CACHE, "").strip() not in _OFF:
        _add(findings, "GS-E003", _NO_CACHE, variables, sources, files)


def names_collectives(sources: Sources, files: Sequence[str]) -> bool:
    """True if code of the user's names torch.distributed."""
    for file in files:
        for node in ast.walk(sources.tree(file)):
            if isinstance(node, ast.Attribute) and dotted(node).startswith("torch.distributed"):
                return True
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                if any("torch.distributed" in name for name in names):
                    return True
    return False


def _add(
    findings: FindingList,
    code: str,
    name: str,
    variables: Mapping[str, str],
    sources: Sources,
    files: Sequence[str],
) -> None:
    where = _set_at(name, sources, files) or SourceLine(f"environment variable {name}")
    findings.add(KINDS[code], where, f"{name}={variables.get(name, '')}")


def _set_at(name: str, sources: Sources, files: Sequence[str]) -> SourceLine | None:
    for file in files:
        for node in ast.walk(sources.tree(file)):
            if isinstance(node, ast.Assign) and any(_is_entry(target, name) for target in node.targets):
                return SourceLine(file, node.lineno)
            is_call = isinstance(node, ast.Call) and dotted(node.func) in ("os.environ.setdefault", "os.putenv")
            if isinstance(node, ast.Call) and is_call and node.args and is_constant(node.args[0], name):
                return SourceLine(file, node.lineno)
            if isinstance(node, ast.Dict):  # os.environ.update({...}), or a table that goes there
                for key in node.keys:
                    if key is not None and is_constant(key, name):
                        return SourceLine(file, key.lineno)
    return None


def _is_entry(target: ast.expr, name: str) -> bool:
    return (
        isinstance(target, ast.Subscript)
        and dotted(target.value) in ("os.environ", "environ")
        and is_constant(target.slice, name)
    )
