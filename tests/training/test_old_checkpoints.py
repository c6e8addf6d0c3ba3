"""Checkpoints of Megatron-LM: read without running what is pickled in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphstep.errors import CheckpointError
from graphstep.training.old_checkpoints import read_switches

# Writes checkpoints in a process that has Megatron-LM's modules, or what looks like them.
WRITER = """
import argparse, enum, os, pathlib, sys, types, numpy, torch

names = "megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.enums"
for name in names:
    sys.modules[name] = types.ModuleType(name)
enums = sys.modules[names[-1]]
members = "full_iteration attn mlp moe moe_router moe_preprocess mamba full_iteration_inference"
for name, words in (("CudaGraphScope", members), ("AttnBackend", "flash fused auto")):
    setattr(enums, name, enum.Enum(name, words, module=enums.__name__))
args = argparse.Namespace(
    num_layers=2, cuda_graph_impl="local", attention_backend=enums.AttnBackend.auto, save=pathlib.PurePosixPath("x"),
    params_dtype=torch.bfloat16,
    cuda_graph_scope=[enums.CudaGraphScope.attn, enums.CudaGraphScope.full_iteration_inference],
)
state = {"args": args, "iteration": 3, "model": {"w": torch.ones(4)}, "rng_state": [{"np": numpy.random.get_state()}]}
os.chdir(sys.argv[1])
torch.save(state, "number.pt")
torch.save(state, "protocol.pt", pickle_protocol=4)
# As some releases of Python 3.11 do by themselves:
enums.CudaGraphScope.__reduce_ex__ = lambda self, protocol: (getattr, (type(self), self.name))
torch.save(state, "name.pt")
"""

READER = """
import json, os, sys, torch
from graphstep.training.old_checkpoints import read_switches
before = set(torch.serialization.get_safe_globals())
os.chdir(sys.argv[1])
for path in ("number.pt", "name.pt"):
    found = read_switches(path)
    print(json.dumps({
        "options": dict(found.options), "notices": [n.code for n in found.notices],
        "is_clean": set(torch.serialization.get_safe_globals()) == before,
        "modules": [name for name in sys.modules if name.startswith("megatron")],
    }))
"""


def python(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def test_a_pickled_scope_migrates_and_leaves_nothing_behind(tmp_path: Path) -> None:
    python(WRITER, str(tmp_path))
    found = [json.loads(line) for line in python(READER, str(tmp_path)).splitlines()]
    assert found == 2 * [
        {
            "options": {
                "cuda_graph_impl": "local",
                "cuda_graph_modules": ["attn"],
                "inference_cuda_graph_scope": "block",
            },
            "notices": ["old-cuda-graph-scope", "old-module-full-iteration-inference"],
            "is_clean": True,
            "modules": [],
        }
    ]
    with pytest.raises(CheckpointError):  # torch reads protocol 2 only
        read_switches(tmp_path / "protocol.pt")


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise SystemExit('code of the checkpoint ran')",))


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"args": {"cuda_graph_impl": "local", "harm": _Harmful()}}, path)
    assert dict(read_switches(path).options) == {"cuda_graph_impl": "local"}


class _Shell:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("exit 1",))


def test_no_error_advises_to_run_what_is_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"args": {"harm": _Shell()}}, path)
    with pytest.raises(CheckpointError, match="which was not run") as caught:
        read_switches(path)
    assert "weights_only" not in str(caught.value)


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    text, empty, other, cut = (tmp_path / name for name in ("text", "empty", "other", "cut"))
    text.write_text("x" * 100)
    empty.touch()
    torch.save({"model": {}}, other)
    cut.write_bytes(other.read_bytes()[:100])
    for path in (text, empty, other, cut, tmp_path, tmp_path / "none"):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(CheckpointError) as caught:
            read_switches(path)
        assert caught.value.problems[0].where == str(path)
        assert set(torch.serialization.get_safe_globals()) == before
