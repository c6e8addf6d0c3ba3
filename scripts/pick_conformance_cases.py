"""Pick what the conformance test needs out of recorded behaviour of Megatron-LM's argument validation.

    python scripts/pick_conformance_cases.py flags.jsonl

Writes ``tests/config/data/conformance.jsonl.gz``, the same bytes for the same input.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "tests" / "config" / "data" / "conformance.jsonl.gz"
KEPT = ("id", "family", "argv", "config_kwargs", "env", "outcome")
USUAL = {"te_version": "2.15.0", "gpu_arch": 9, "torch_memory_saver": False, "flashinfer_version": None}
NOT_COMPARED = ("te_rng_tracker", "config_use_te_rng_tracker")


def picked(case: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a case that the test uses."""
    kept = {key: case[key] for key in KEPT if case.get(key) not in (None, {})}
    assume = {key: value for key, value in case["assume"].items() if value != USUAL[key]}
    effective = {
        key: value
        for key, value in case.get("effective", {}).items()
        if key not in NOT_COMPARED and "stored" not in key
    }
    extra = {"assume": assume, "effective": effective, "inference": case.get("inference")}
    extra["migrations"] = sorted({m["code"] for m in case["migrations"] if not m["code"].startswith("te_rng_tracker")})
    return kept | {key: value for key, value in extra.items() if value}


def main() -> None:
    """Read the recording named on the command line and write the test's data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("recording", type=Path, help="flags.jsonl")
    cases = [json.loads(line) for line in parser.parse_args().recording.read_text(encoding="utf-8").splitlines()]
    text = "".join(json.dumps(picked(case), separators=(",", ":")) + "\n" for case in cases)
    TARGET.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(cases)} cases, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
