"""The page of rules, made from the table: ``graphstep config --rules`` prints it, and it is ``docs/rules.md``."""

from __future__ import annotations

from collections.abc import Iterator

from graphstep.config.migrations import CONFLICTS, MIGRATIONS
from graphstep.config.rules import SUBJECTS, Rule

_INTRODUCTION = """# Rules

What options have to obey, made from the table that the command line, files, the dataclasses and keyword arguments are
checked by (`graphstep config --rules`). A *problem* is refused with exit code 2, together with all others; a *notice*
is said once, and the run goes on. Names in braces stand for values.
"""
_MIGRATIONS = """## Old options

Options and values of older Megatron-LM versions are read as new ones, with one notice each. `graphstep migrate`
rewrites command lines, scripts and files.
"""


def rules_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([_INTRODUCTION, *_migrations(), *_subjects()]).rstrip() + "\n"


def _migrations() -> Iterator[str]:
    yield _MIGRATIONS
    yield "| old | new | code |"
    yield "|---|---|---|"
    for row in MIGRATIONS:
        yield f"| `{row.old}` | {f'`{row.new}`' if row.new else 'leave it out'} | `{row.code}` |"
    yield ""
    yield "Mixes that can mean two things are refused:"
    yield ""
    for conflict in CONFLICTS:
        yield from _entry(conflict.code, conflict.what, conflict.fix, f"{conflict.where} · problem")


def _subjects() -> Iterator[str]:
    for subject, rules in SUBJECTS:
        yield f"## {subject}\n"
        for rule in rules:
            yield from _entry(rule.code, rule.what, rule.fix_on_page or rule.fix, f"{rule.where} · {_kind(rule)}")


def _kind(rule: Rule) -> str:
    kind = "notice" if rule.is_notice else "problem"
    return f"{kind} in graphstep train" if rule.for_training else kind


def _entry(code: str, what: str, fix: str, where: str) -> Iterator[str]:
    yield f"### {code}\n"
    yield f"{where}\n"
    yield f"{what[:1].upper()}{what[1:]}. Fix: {fix}.\n"
