"""What the code of a forward tells without running it: submodules in turn, and variables that it still needs."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

from torch import nn

_PARTS: Final = re.compile("LOAD|STORE|DELETE")


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of a module's forward, without decorators; ``None`` if it is not written in Python."""
    found: Any = module.__dict__.get("forward", type(module).forward)
    # A wrapper that a library puts on the instance keeps the forward that it stands for under such a name.
    found = module.__dict__.get("_old_forward", found)
    return getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None)


def submodules_in_turn(module: nn.Module) -> list[nn.Module]:
    """The children of a module in the order in which its forward names them first; those that it does not name last."""
    code = forward_code(module)
    named = [] if code is None else [i.argval for i in dis.get_instructions(code) if "LOAD_ATTR" in i.opname]
    children = dict(module.named_children())
    order = [name for name in dict.fromkeys(map(str, named)) if name in children]
    return [children[name] for name in dict.fromkeys([*order, *children])]


def live_names(code: CodeType, position: int) -> set[str]:
    """Local variables that the code may still read after the instruction at a position, rather too many of them."""
    found: set[str] = set()
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
