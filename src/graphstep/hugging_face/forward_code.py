"""What the code of a forward tells without running it: submodules in turn, and variables that it still needs."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final

from torch import nn

_PARTS: Final = re.compile("LOAD|STORE|DELETE")
_MAKING: Final = ("BINARY", "UNARY", "COMPARE", "BUILD", "FORMAT", "CONTAINS", "IS_OP", "LIST_EXTEND")
"""Instructions that put something new in the place of what they take."""


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of a module's forward, without decorators; ``None`` if it is not written in Python."""
    found: Any = module.__dict__.get("forward", type(module).forward)
    # A wrapper that a library puts on the instance keeps the forward that it stands for under such a name.
    found = module.__dict__.get("_old_forward", found)
    return getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None)


def submodules_in_turn(module: nn.Module) -> list[nn.Module]:
    """The children of a module in the order in which its forward calls them first; those that it does not call last."""
    code = forward_code(module)
    called = [] if code is None else _Stack().run(code).called
    children = dict(module.named_children())
    order = [name for name in dict.fromkeys(called) if name in children]
    return [children[name] for name in dict.fromkeys([*order, *children])]


def live_names(code: CodeType, position: int) -> set[str]:
    """Local variables that the code may still need after the call at a position, rather too many of them.

    Those are the ones that are read later, and those whose values wait on the stack, as ``x`` in ``x + f(y)``.
    """
    found = {name for kind, name in filter(None, _Stack().run(code, position).labels[:-1]) if kind == "variable"}
    written: set[str] = set()
    is_straight = True
    for instruction in dis.get_instructions(code):
        if instruction.offset <= position:
            continue
        if instruction.is_jump_target:
            is_straight = False
        if "JUMP" in instruction.opname or instruction.opname == "FOR_ITER":
            if isinstance(instruction.argval, int) and instruction.argval <= position:
                return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
            is_straight = False
        for action, name in _accesses(instruction):
            if action == "LOAD":
                found |= {name} - written
            elif is_straight:
                written.add(name)
    return found


def _accesses(instruction: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Reads and writes of local variables, in order; one instruction may do two."""
    name = instruction.opname
    if not any(kind in name for kind in ("_FAST", "_DEREF", "LOAD_CLOSURE")):
        return
    values = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    yield from zip(_PARTS.findall(name), map(str, values), strict=False)


@dataclass(slots=True)
class _Stack:
    """Where the values on the stack come from, as far as the code tells without its jumps."""

    labels: list[tuple[str, str] | None] = field(default_factory=list)
    """For each place the variable or attribute that was put there."""
    called: list[str] = field(default_factory=list)
    """Names of attributes, in the order of their calls."""

    def run(self, code: CodeType, until: int | None = None) -> _Stack:
        """Follow the instructions, up to the one at a position."""
        for instruction in dis.get_instructions(code):
            if until is not None and instruction.offset > until:
                break
            self._follow(instruction)
        return self

    def _follow(self, instruction: dis.Instruction) -> None:
        name = instruction.opname
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._resize(-1)
            self.labels += [("attribute", str(instruction.argval))] * (1 + effect)
            return
        accesses = list(_accesses(instruction))
        for action, variable in accesses:
            if action == "LOAD":
                self.labels.append(("variable", variable))
            elif action == "STORE":
                self._resize(-1)
        if accesses:
            return
        if name.startswith("CALL") and not name.startswith("CALL_INTRINSIC"):
            # What is called lies where the result will, or above it: a place beside it is for ``self``.
            place = len(self.labels) + effect - 1
            callee = [each for each in self.labels[max(0, place) : place + 2] if each is not None]
            if callee and callee[0][0] == "attribute":
                self.called.append(callee[0][1])
            self._resize(effect - 1)
            self._resize(1)
            return
        self._resize(effect)
        if name.startswith(_MAKING):
            self._resize(-1)
            self._resize(1)

    def _resize(self, change: int) -> None:
        if change < 0:
            del self.labels[max(0, len(self.labels) + change) :]
        else:
            self.labels += [None] * change
