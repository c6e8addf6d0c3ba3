"""The page of all findings, made from the kinds: ``graphstep doctor --codes``, and ``docs/findings.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from graphstep.doctor.findings import Kind
from graphstep.doctor.kinds import KINDS, SUBJECTS

PRELUDE: Final = """\
import random

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
layer = nn.Linear(4, 4)
batches = [torch.randn(8, 4) for _ in range(4)]
"""
"""What stands above each example."""
HERE: Final = "# here"
"""Ends the lines of an example that the finding is about."""

_INTRODUCTION: Final = f"""# Findings of the doctor

Every code that [`graphstep doctor`](doctor.md) can report, made from the table that it uses
(`graphstep doctor --codes`). A code never changes its meaning. *Capture fails*: CUDA or torch refuses. *Silently
wrong*: a replay computes something else than the eager step, and no error tells. *Slow* and *memory*: right, at a
price.

Each code has a program that has it, on the lines that end with `{HERE}`, and the same program without it. A test runs
them all. Above each of them stands:

```python
{PRELUDE.rstrip()}
```
"""


def findings_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([_INTRODUCTION, *_overview(), *_entries()]).rstrip() + "\n"


def _overview() -> Iterator[str]:
    yield "| code | what | severity | effect |"
    yield "|---|---|---|---|"
    for kind in KINDS.values():
        yield f"| [{kind.code}](#{kind.code.lower()}) | {kind.title} | {kind.severity} | {kind.effect} |"
    yield ""


def _entries() -> Iterator[str]:
    for subject, kinds in SUBJECTS.items():
        yield f"## {subject}"
        yield ""
        for kind in kinds:
            yield from _entry(kind)


def _entry(kind: Kind) -> Iterator[str]:
    yield f"### {kind.code}"
    yield ""
    yield f"**{kind.title[0].upper()}{kind.title[1:]}** ({kind.severity}, {kind.effect}). {kind.why}"
    yield ""
    yield f"Fix: {kind.fix}."
    yield ""
    for title, program in (("Broken", kind.broken), ("Mended", kind.mended)):
        yield f"{title}:"
        yield ""
        yield "```python"
        yield program.strip()
        yield "```"
        yield ""
