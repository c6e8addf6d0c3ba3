"""Two ranks verify together: what one of them finds stops both, and their collectives meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from graphstep.verification.ranks import num_ranks, on_any_rank

ROOT = Path(__file__).resolve().parents[2]
needs_gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="torch was built without gloo"
)


def verified_by_two(faults: Sequence[str], folder: Path) -> list[list[Any]]:
    """For each fault what the two ranks have found."""
    script = ROOT / "tests" / "verification" / "two_ranks.py"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    jobs = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(folder / "ranks"), *faults],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    found = []
    for job in jobs:
        out, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
        found.append([json.loads(line) for line in out.splitlines()[-len(faults) :]])
    return [list(pair) for pair in zip(*found, strict=True)]


@needs_gloo
def test_a_difference_on_one_rank_stops_both(tmp_path: Path) -> None:
    plain, drifting = verified_by_two(["Plain", "DriftingBuffer"], tmp_path)
    for equal, num_steps, num_replays, first, notes in plain:
        assert (equal, num_steps, num_replays, first, notes) == (True, 3, 15, None, [])
    assert [(equal, num_steps) for equal, num_steps, *_ in drifting] == [(False, 1), (False, 1)]
    assert [first for *_, first, _ in drifting] == [["", "other tensor"], ["module.blocks.1", "buffer"]]
    assert all("modules are not looked into" in notes[0] for *_, notes in drifting)


def test_one_rank_decides_alone() -> None:
    assert num_ranks() == 1
    assert on_any_rank(True, torch.device("cpu"))
    assert not on_any_rank(False, torch.device("cpu"))
