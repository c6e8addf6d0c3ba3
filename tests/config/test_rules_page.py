"""docs/rules.md is what the table of rules says."""

from __future__ import annotations

import re
from pathlib import Path

from graphstep.config.migrations import CONFLICTS, MIGRATIONS
from graphstep.config.rules import RULES, SUBJECTS
from graphstep.config.rules_page import rules_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == rules_page(), "run: graphstep config --rules > docs/rules.md"


def test_every_rule_has_an_entry_under_its_code() -> None:
    headings = re.findall(r"^### (.+)$", rules_page(), re.MULTILINE)
    assert sorted(headings) == sorted([rule.code for rule in RULES] + [conflict.code for conflict in CONFLICTS])
    assert all(f"`{row.code}`" in rules_page() for row in MIGRATIONS)


def test_the_subjects_hold_every_rule_once() -> None:
    assert len(RULES) == sum(len(rules) for _, rules in SUBJECTS)
