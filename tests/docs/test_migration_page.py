"""docs/migration.md has every row of the table of migrations, and its examples are files that migrate."""

from __future__ import annotations

from pathlib import Path

from graphstep.config.migration import migrate_shell, migrate_yaml
from graphstep.config.migrations import MIGRATIONS, REMOVED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples" / "migration"


def test_every_row_is_on_the_page() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `--")]
    for migration in MIGRATIONS:
        row = next(row for row in rows if row.startswith(f"| `{migration.old}` |"))
        assert migration.new in row


def test_the_examples_migrate_completely() -> None:
    script = migrate_shell((EXAMPLES / "pretrain_gpt.sh").read_text(encoding="utf-8"))
    assert script.left == ()
    assert "    --cuda-graph-impl local\n" in script.after
    assert "    --cuda-graph-modules attn --inference-cuda-graph-scope block   # what" in script.after
    assert "    --mock-data \\\n    --cuda-graph-impl full_iteration \\\n" in script.after
    recipe = migrate_yaml((EXAMPLES / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe.left == ()
    assert "  cuda_graph_impl: transformer_engine  # graphs" in recipe.after
    assert "  cuda_graph_modules:\n    - attn\n" in recipe.after


def test_what_was_removed_is_told_from_what_migrates() -> None:
    assert not {migration.old for migration in MIGRATIONS} & set(REMOVED)
