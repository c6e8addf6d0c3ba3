"""All that the page shows, as plain data."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphstep.coverage.profiling import StepMeasurement
from graphstep.coverage.tree import Coverage, module_tree
from graphstep.version import __version__


@dataclass(frozen=True, slots=True)
class Fact:
    """A line about the run."""

    name: str
    value: str


def coverage_document(
    report: dict[str, Any],
    *,
    model: nn.Module | None = None,
    before: StepMeasurement | None = None,
    after: StepMeasurement | None = None,
    facts: Sequence[Fact] = (),
    title: str = "CUDA graphs",
) -> dict[str, Any]:
    """Put a report, a model and measurements together.

    Args:
        report: as plain data, see :meth:`graphstep.CaptureReport.to_json`.
        model: what the regions belong to.
        before: of eager steps.
        after: of captured steps.
        facts: further lines about the run.
        title: heading of the page.
    """
    tree = module_tree(report, model)
    leaves = tree.innermost()
    device = next((p.device for p in model.parameters()), None) if model is not None else None
    return {
        "format": "graphstep-coverage-1",
        "title": title,
        "facts": [{"name": fact.name, "value": fact.value} for fact in (*_machine(device), *facts)],
        "report": report,
        "tree": tree.to_json(),
        "innermost": {state.value: sum(node.coverage is state for node in leaves) for state in Coverage},
        "memory": _memory(report, model),
        "before": before.to_json() if before is not None else None,
        "after": after.to_json() if after is not None else None,
    }


def _machine(device: torch.device | None) -> list[Fact]:
    name = platform.machine()
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return [
        Fact("device", f"{device.type if device is not None else 'unknown'} ({name})"),
        Fact("versions", f"graphstep {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
    ]


def _memory(report: dict[str, Any], model: nn.Module | None) -> list[dict[str, Any]]:
    rows = [{"kind": "pool", "name": pool["name"], "bytes": pool["bytes"]} for pool in report["pools"]]
    rest = report["pool_bytes"] - sum(pool["bytes"] for pool in report["pools"])
    if rest > 0:
        rows.append({"kind": "pool", "name": "all recordings" if not rows else "other recordings", "bytes": rest})
    rows.append({"kind": "static", "name": "static inputs", "bytes": report["static_bytes"]})
    rows.append({"kind": "workspace", "name": "workspaces of libraries", "bytes": report["workspace_bytes"]})
    if model is not None:
        weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        rows.append({"kind": "weights", "name": "parameters and buffers", "bytes": weights})
        places = [(p.grad, getattr(p, "main_grad", None)) for p in model.parameters()]
        gradients = [g for pair in places for g in pair if isinstance(g, torch.Tensor)]
        rows.append(
            {
                "kind": "gradients",
                "name": "gradients",
                "bytes": sum(g.numel() * g.element_size() for g in gradients),
            }
        )
    return rows
