"""Old options and values, and what they are called now: one table for the parser, files and ``graphstep migrate``.

Shape of the data: a flat mapping of what the user *gave*, under Megatron-LM's attribute names, nothing filled in:
``{"enable_cuda_graph": True, "cuda_graph_scope": ("full",)}``. Switches are ``bool``; options of several words are
tuples of words, commas already split; options of one word are that word. What was not given is not in the mapping.

``MIGRATIONS`` is the table. A row has a stable ``code``, the ``old`` and the ``new`` form as a user types them, the
text of its ``notice``, the names it ``reads``, ``applies`` (does this mapping hold the old form?) and ``rewrite``
(returns the mapping without it). ``CONFLICTS`` are mixes of old and new that can mean two things: they are refused, not
guessed. ``migrate`` runs both, and is what everybody calls. Rows run once, in the order of the table, so that
``--enable-cuda-graph --cuda-graph-scope full`` gives three notices. Migrating twice equals migrating once.

The rewriter of scripts finds the words of ``OLD_NAMES`` and ``NEW_NAMES`` in a command, calls ``migrate`` on their
values, and writes back the names whose values differ.

Source: Megatron-LM's deprecated options ``--enable-cuda-graph``, ``--external-cuda-graph``, ``--cuda-graph-scope``, and
the deprecated values of ``--cuda-graph-modules``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphstep.errors import Problem

Given = Mapping[str, Any]

FULL, FULL_ITERATION, FULL_ITERATION_INFERENCE = "full", "full_iteration", "full_iteration_inference"
OLD_MODULES: tuple[str, ...] = (FULL, FULL_ITERATION, FULL_ITERATION_INFERENCE)
"""Old values of ``--cuda-graph-modules`` and ``--cuda-graph-scope``: none of them is a part of a layer."""

_IMPL, _MODULES, _SCOPE = "cuda_graph_impl", "cuda_graph_modules", "inference_cuda_graph_scope"
_ENABLE, _EXTERNAL, _OLD_SCOPE = "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope"


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """An old form, and the new one."""

    code: str
    """Stable short name."""
    old: str
    """What a user typed, such as ``--enable-cuda-graph``."""
    new: str
    """What to type instead; empty: nothing."""
    notice: str
    """What the user is told, in one sentence; how to write it now follows from ``new``."""
    reads: tuple[str, ...]
    """Names that it looks at or writes."""
    applies: Callable[[Given], bool]
    """Is the old form there?"""
    rewrite: Callable[[Given], dict[str, Any]]
    """Returns the mapping with the new form instead."""

    @property
    def fix(self) -> str:
        """What to type now."""
        return f"write {self.new}" if self.new else "leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """A mix of old and new forms that can mean two things."""

    code: str
    """Stable short name."""
    where: str
    """The options."""
    broken: Callable[[Given], bool]
    """Is the mix there? Looked at before anything is rewritten."""
    what: str
    """What contradicts what."""
    fix: str
    """The change to make."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Migrated:
    """The outcome of :func:`migrate`."""

    values: Mapping[str, Any]
    """What was given, in the new form; as it was where there are problems."""
    applied: tuple[Migration, ...]
    """The rows that applied, in order; none where there are problems. A row has no new form if it wrote nothing, as for
    a switch that is off, or if a later row replaced it: module full_iteration, the implementation of
    ``--enable-cuda-graph``."""
    problems: tuple[Problem, ...]
    """Mixes that can mean two things."""


def migrate(given: Given) -> Migrated:
    """Return the new form of what was given.

    Args:
        given: flat values, see the top of the file. Names that no row knows pass through.
    """
    problems = tuple(
        Problem(conflict.code, conflict.what, conflict.where, conflict.fix)
        for conflict in CONFLICTS
        if conflict.broken(given)
    )
    if problems:
        return Migrated(values=dict(given), applied=(), problems=problems)
    values, applied = dict(given), list[tuple[Migration, dict[str, Any]]]()
    for row in MIGRATIONS:
        if row.applies(values):
            before, values = values, row.rewrite(values)
            applied.append((row, {name: value for name, value in values.items() if before.get(name) != value}))
    rows = tuple(row if _lasts(written, values) else replace(row, new="") for row, written in applied)
    return Migrated(values=values, applied=rows, problems=())


def _lasts(written: Given, final: Given) -> bool:
    """Has a row written something that is still there in the end? Of a list, some of it."""
    return bool(written) and all(
        name in final and (final[name] == v or isinstance(v, tuple)) for name, v in written.items()
    )


def old_impl(given: Given) -> str:
    """Return the implementation that the old switches or the new option ask for."""
    if given.get(_ENABLE):
        return "local"
    if given.get(_EXTERNAL):
        return "transformer_engine"
    return str(given.get(_IMPL) or "none")


def _words(given: Given) -> tuple[str, ...]:
    """Return the modules, under the old name or the new one."""
    return tuple(given.get(_OLD_SCOPE) or given.get(_MODULES) or ())


def _without(given: Given, *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


def _switch(name: str, impl: str) -> Callable[[Given], dict[str, Any]]:
    return lambda given: {**_without(given, name), **({_IMPL: impl} if given[name] else {})}


def _rename(old: str, new: str) -> Callable[[Given], dict[str, Any]]:
    # An empty new value counts as not given.
    return lambda given: {**_without(given, old), **({new: given[old]} if given[old] else {})}


def _drop(word: str, more: Mapping[str, Any] | None = None) -> Callable[[Given], dict[str, Any]]:
    def rewrite(given: Given) -> dict[str, Any]:
        left = tuple(module for module in given[_MODULES] if module != word)
        return {**_without(given, _MODULES), **({_MODULES: left} if left else {}), **(more or {})}

    return rewrite


def _has(word: str) -> Callable[[Given], bool]:
    return lambda given: word in (given.get(_MODULES) or ())


MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        code="old-enable-cuda-graph",
        old="--enable-cuda-graph",
        new="--cuda-graph-impl local",
        notice="--enable-cuda-graph is the old form of --cuda-graph-impl local",
        reads=(_ENABLE, _IMPL),
        applies=lambda given: _ENABLE in given,
        rewrite=_switch(_ENABLE, "local"),
    ),
    Migration(
        code="old-external-cuda-graph",
        old="--external-cuda-graph",
        new="--cuda-graph-impl transformer_engine",
        notice="--external-cuda-graph is the old form of --cuda-graph-impl transformer_engine",
        reads=(_EXTERNAL, _IMPL),
        applies=lambda given: _EXTERNAL in given,
        rewrite=_switch(_EXTERNAL, "transformer_engine"),
    ),
    Migration(
        code="old-cuda-graph-scope",
        old="--cuda-graph-scope",
        new="--cuda-graph-modules",
        notice="--cuda-graph-scope is the old name of --cuda-graph-modules",
        reads=(_OLD_SCOPE, _MODULES),
        applies=lambda given: _OLD_SCOPE in given,
        rewrite=_rename(_OLD_SCOPE, _MODULES),
    ),
    Migration(
        code="old-module-full",
        old="--cuda-graph-modules full",
        new="",
        notice="module full is the old name of whole layers, which are captured when no module is named",
        reads=(_MODULES,),
        applies=_has(FULL),
        rewrite=_drop(FULL),
    ),
    Migration(
        code="old-module-full-iteration",
        old="--cuda-graph-modules full_iteration",
        new="--cuda-graph-impl full_iteration",
        notice="module full_iteration is the old form of --cuda-graph-impl full_iteration",
        reads=(_MODULES, _IMPL),
        applies=_has(FULL_ITERATION),
        rewrite=_drop(FULL_ITERATION, {_IMPL: "full_iteration"}),
    ),
    Migration(
        code="old-module-full-iteration-inference",
        old="--cuda-graph-modules full_iteration_inference",
        new="--inference-cuda-graph-scope block",
        notice="module full_iteration_inference is the old form of --inference-cuda-graph-scope block",
        reads=(_MODULES, _IMPL, _SCOPE),
        applies=lambda given: _has(FULL_ITERATION_INFERENCE)(given) and old_impl(given) == "local",
        rewrite=_drop(FULL_ITERATION_INFERENCE, {_SCOPE: "block"}),
    ),
    Migration(
        code="old-module-full-iteration-inference-without-effect",
        old="--cuda-graph-modules full_iteration_inference",
        new="",
        notice="module full_iteration_inference has no effect with --cuda-graph-impl none: nothing is captured",
        reads=(_MODULES, _IMPL),
        applies=_has(FULL_ITERATION_INFERENCE),
        rewrite=_drop(FULL_ITERATION_INFERENCE),
    ),
    Migration(
        code="old-moe-router-padding-for-fp8",
        old="--moe-router-padding-for-fp8",
        new="--moe-router-padding-for-quantization",
        notice="--moe-router-padding-for-fp8 is the old name of --moe-router-padding-for-quantization",
        reads=("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"),
        applies=lambda given: "moe_router_padding_for_fp8" in given,
        rewrite=_rename("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"),
    ),
    Migration(
        code="old-hybrid-override-pattern",
        old="--hybrid-override-pattern",
        new="--hybrid-layer-pattern",
        notice="--hybrid-override-pattern is the old name of --hybrid-layer-pattern",
        reads=("hybrid_override_pattern", "hybrid_layer_pattern"),
        applies=lambda given: "hybrid_override_pattern" in given,
        rewrite=_rename("hybrid_override_pattern", "hybrid_layer_pattern"),
    ),
)
"""The table. Each row is looked at once, from top to bottom."""

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        code="old-two-implementations",
        where="--enable-cuda-graph, --external-cuda-graph",
        broken=lambda given: bool(given.get(_ENABLE)) and bool(given.get(_EXTERNAL)),
        what="--enable-cuda-graph asks for local and --external-cuda-graph for transformer_engine",
        fix="write --cuda-graph-impl with one of the two",
    ),
    Conflict(
        code="old-and-new-implementation",
        where="--enable-cuda-graph, --external-cuda-graph, --cuda-graph-impl",
        broken=lambda given: (
            bool(given.get(_ENABLE) or given.get(_EXTERNAL)) and (given.get(_IMPL) or "none") != "none"
        ),
        what="an old switch and --cuda-graph-impl both name the implementation",
        fix="keep --cuda-graph-impl, and leave --enable-cuda-graph and --external-cuda-graph out",
    ),
    Conflict(
        code="old-and-new-modules",
        where="--cuda-graph-scope, --cuda-graph-modules",
        broken=lambda given: _OLD_SCOPE in given and bool(given.get(_MODULES)),
        what="--cuda-graph-scope and --cuda-graph-modules are the old and the new name of one option",
        fix="put all modules behind --cuda-graph-modules",
    ),
    Conflict(
        code="old-full-mixed",
        where="--cuda-graph-modules",
        broken=lambda given: FULL in _words(given) and len(_words(given)) > 1,
        what="module full means whole layers: it stands alone",
        fix="name the modules without full, or leave --cuda-graph-modules out for whole layers",
    ),
    Conflict(
        code="old-full-iteration-mixed",
        where="--cuda-graph-modules",
        broken=lambda given: FULL_ITERATION in _words(given) and len(set(_words(given))) > 1,
        what="module full_iteration means one graph for everything: it cannot stand beside other modules",
        fix="write --cuda-graph-impl full_iteration without modules, or --cuda-graph-impl local with them",
    ),
    Conflict(
        code="old-full-iteration-implementation",
        where="--cuda-graph-modules, --cuda-graph-impl",
        broken=lambda given: FULL_ITERATION in _words(given) and old_impl(given) == "transformer_engine",
        what="module full_iteration asks for the implementation of that name, and transformer_engine is asked for too",
        fix="write --cuda-graph-impl full_iteration, or leave the module out",
    ),
    Conflict(
        code="old-full-iteration-scope",
        where="--cuda-graph-modules, --inference-cuda-graph-scope",
        broken=lambda given: FULL_ITERATION in _words(given) and (given.get(_SCOPE) or "none") != "none",
        what="module full_iteration means --cuda-graph-impl full_iteration, which makes no inference graphs",
        fix="leave --inference-cuda-graph-scope out, or use --cuda-graph-impl local without the module",
    ),
    Conflict(
        code="old-full-iteration-inference-implementation",
        where="--cuda-graph-modules, --cuda-graph-impl",
        broken=lambda given: FULL_ITERATION_INFERENCE in _words(given) and old_impl(given) not in ("none", "local"),
        what="module full_iteration_inference asks for inference graphs, which only --cuda-graph-impl local makes",
        fix="use --cuda-graph-impl local --inference-cuda-graph-scope block, or leave the module out",
    ),
    Conflict(
        code="old-full-iteration-inference-scope",
        where="--cuda-graph-modules, --inference-cuda-graph-scope",
        broken=lambda given: FULL_ITERATION_INFERENCE in _words(given) and (given.get(_SCOPE) or "block") != "block",
        what="module full_iteration_inference means --inference-cuda-graph-scope block, and another scope is given",
        fix="keep --inference-cuda-graph-scope, and leave the module out",
    ),
)
"""Mixes that are refused, and why."""

OLD_NAMES: Mapping[str, str] = {
    "--enable-cuda-graph": _ENABLE,
    "--external-cuda-graph": _EXTERNAL,
    "--cuda-graph-scope": _OLD_SCOPE,
    "--moe-router-padding-for-fp8": "moe_router_padding_for_fp8",
    "--hybrid-override-pattern": "hybrid_override_pattern",
}
"""Old options as typed, and their names."""

NEW_NAMES: Mapping[str, str] = {
    "--cuda-graph-impl": _IMPL,
    "--cuda-graph-modules": _MODULES,
    "--inference-cuda-graph-scope": _SCOPE,
    "--moe-router-padding-for-quantization": "moe_router_padding_for_quantization",
    "--hybrid-layer-pattern": "hybrid_layer_pattern",
}
"""Options that old ones turn into, as typed, and their names."""

REMOVED: Mapping[str, str] = {
    "--inference-full-iteration-cuda-graph": "write --cuda-graph-impl local --inference-cuda-graph-scope block",
    "module_scoped": "write --inference-cuda-graph-scope layer",
}
"""Options and values that are gone without a migration, and what to type instead."""
