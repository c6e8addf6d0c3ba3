"""The configuration answers fast: it loads no torch."""

from __future__ import annotations

import subprocess
import sys


def loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


def test_config_loads_no_torch_and_no_numpy() -> None:
    modules = loaded_by("from graphstep.config import from_argv\nfrom_argv(['--cuda-graph-impl', 'local'])")
    assert "graphstep.config" in modules
    assert not {"torch", "numpy", "rich", "argparse"} & modules


def test_the_command_line_loads_no_torch() -> None:
    statement = "import graphstep.cli.main as m, io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()): {}"
    for call in (
        "m.main(['config'])",
        "m.main(['config', '--json'])",
        "m.main(['train', '--help'])",
        "m.main(['train', '-x'])",
    ):
        assert "torch" not in loaded_by(statement.format(call))
