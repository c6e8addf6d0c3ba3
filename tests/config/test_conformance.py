"""Outcome and effective values are those of Megatron-LM's own validation, but for the differences listed here.

Where the cases come from: ``tests/config/data/README.md``. What users are told: ``docs/compatibility.md``.
"""

from __future__ import annotations

import enum
import functools
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from graphstep.config import CudaGraphModule, Machine, RunConfig, from_argv, from_options
from graphstep.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data" / "conformance.jsonl.gz"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"

COMMON = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--train-iters 2 --lr 1e-4 --mock-data"
)
BASES = {
    "dense": f"--num-layers 2 {COMMON}",
    "moe": f"--num-layers 2 --num-experts 4 {COMMON}",
    "hybrid": f"--hybrid-layer-pattern M*-M {COMMON}",
}
BASE_KEYWORDS = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
EVERYTHING = Machine(torch_memory_saver=True, flashinfer_version="0.6.4")
USUAL = {"te_version": "2.15.0", "gpu_arch": 9, "torch_memory_saver": False}

# Row of the table of differences in docs/compatibility.md -> the cases that differ for its reason.
DIFFERENCES: dict[int, tuple[str, ...]] = {
    1: ("argparse-dense-0250717a8d",),
    3: ("migration-dense-bbb47de003", "migration-dense-66b0a0838f"),
    4: ("argparse-dense-fa92fdaba4", "argparse-dense-d9102b1281"),
    5: (
        "full_iteration-dense-b6e62f56cb",
        "full_iteration-moe-a6412fcea1",
        "full_iteration-hybrid-217f6ac899",
        "full_iteration-dense-38695d4f02",
        "full_iteration-dense-2e85726a29",
    ),
    7: (
        "modules-dense-d0679a2fc7",
        "modules-dense-02697e91b0",
        "modules-moe-d0e178073a",
        "modules-moe-8c0004dcc2",
        "modules-dense-2a08f5c02e",
        "migration-dense-eb63bc47f0",
        "migration-dense-b05426339d",
        "migration-moe-4965a7064e",
        "migration-moe-61c14df2a2",
        "migration-moe-e6a488cb76",
        "migration-moe-f2c71d2c05",
        "config-dense-6c81d82ef4",
        "config-dense-3cfffb6a30",
        "modules-hybrid-8f70bd52d7",
    ),
    8: (
        "modules-hybrid-3b758681eb",
        "modules-hybrid-99d46cad56",
        "modules-hybrid-9cc4b4e986",
    ),
    10: (
        "env-dense-b56ddc0d05",
        "env-dense-58f3f90628",
    ),
    11: (
        "offload-dense-ddf182f1ed",
        "offload-dense-7d3edd8be1",
        "warmup-dense-b726297779",
        "warmup-dense-4ff3052f54",
        "warmup-dense-97c049012e",
        "warmup-dense-348ebb13a2",
        "warmup-dense-89b2b1c7a5",
        "config-dense-2d3ffebd4d",
        "moe_static-moe-1ede892784",
        "moe_static-moe-5b1ab7b22d",
        "moe_static-moe-327d0ec806",
        "moe_static-moe-22d6e2a95e",
        "moe_static-moe-c3a632f54b",
        "moe_static-moe-9dde6d15e9",
        "moe_static-moe-207984343f",
        "moe_static-moe-a073184251",
        "moe_static-moe-882520d2d3",
        "moe_static-moe-9449bd34fa",
        "moe_static-dense-d14f7e55e5",
        "moe_static-dense-f2f9c672b1",
    ),
}
ROW_OF = {case: row for row, cases in DIFFERENCES.items() for case in cases}


class CudaGraphScope(enum.Enum):
    """Megatron-LM's old enum, of which old checkpoints hold members."""

    full_iteration, attn, mlp, moe, moe_router, moe_preprocess, mamba, full_iteration_inference = range(1, 9)


@functools.cache
def cases() -> list[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        kind, _, name = value["$enum"].partition(".")
        return CudaGraphModule(name) if kind == "CudaGraphModule" else CudaGraphScope[name]
    return [decoded(item) for item in value] if isinstance(value, list) else value


@functools.cache
def answers() -> list[tuple[dict[str, Any], RunConfig | ConfigError]]:
    return [(case, configured(case)) for case in cases()]


def configured(case: dict[str, Any]) -> RunConfig | ConfigError:
    machine = Machine(**(USUAL | case.get("assume", {})))
    try:
        if "argv" in case:
            return from_argv([*BASES[case["family"]].split(), *case["argv"]], case.get("env", {}), machine=machine)
        keywords = {name: decoded(value) for name, value in case["config_kwargs"].items()}
        return from_options(BASE_KEYWORDS | keywords, machine=machine)
    except ConfigError as error:
        return error


def effective(config: RunConfig) -> dict[str, Any]:
    return {
        "cuda_graph_impl": config.graphs.impl.value,
        "cuda_graph_modules": sorted(module.value for module in config.graphs.modules),
        "inference_cuda_graph_scope": None if config.graphs.inference_scope is None else config.graphs.inference_scope,
        "cuda_graph_warmup_steps": config.graphs.warmup_steps,
        "cuda_graph_use_single_mempool": config.graphs.use_single_mempool,
        "cuda_graph_retain_backward_graph": config.graphs.retain_backward_graph,
        "optimizer_cuda_graph": config.graphs.optimizer,
        "check_for_nan_in_loss_and_grad": config.training.check_for_nan_in_loss_and_grad,
    }


def inference(config: RunConfig) -> dict[str, Any]:
    options = config.inference
    return {
        "num_cuda_graphs": config.num_inference_graphs,
        "use_cuda_graphs_for_non_decode_steps": options.use_cuda_graphs_for_non_decode_steps,
        "cuda_graph_all_prefills": options.inference_cuda_graph_all_prefills,
        "cuda_graph_max_tokens": options.inference_cuda_graph_max_tokens,
        "cuda_graph_mixed_prefill_count": options.inference_dynamic_batching_cuda_graph_mixed_prefill_count,
        "cuda_graph_sizing_distribution": options.inference_dynamic_batching_cuda_graph_sizing_distribution,
        "unified_memory_level": options.inference_dynamic_batching_unified_memory_level,
        "kv_cache_management_mode": config.rl.rl_kv_cache_management_mode,
        "static_kv_memory_pointers": config.has_static_kv_memory,
    }


def difference(case: dict[str, Any], config: RunConfig | ConfigError) -> str:
    """Say how our answer to a case differs from the recorded one; empty if it does not."""
    if isinstance(config, ConfigError):
        return "" if case["outcome"] == "error" else "refused: " + "; ".join(p.code for p in config.problems)
    if case["outcome"] == "error":
        return "accepted"
    ours = {"effective": effective(config), "inference": inference(config)}
    pairs = [(name, value, ours[part][name]) for part in ours for name, value in case.get(part, {}).items()]
    return "; ".join(f"{name}: {theirs!r}, ours {mine!r}" for name, theirs, mine in pairs if theirs != mine)


CODES = {
    "cuda_graph_scope -> cuda_graph_modules": "old-cuda-graph-scope",
    "enable_cuda_graph -> cuda_graph_impl=local": "old-enable-cuda-graph",
    "external_cuda_graph -> cuda_graph_impl=transformer_engine": "old-external-cuda-graph",
    "cuda_graph_modules: full -> []": "old-module-full",
    "cuda_graph_modules: full_iteration -> cuda_graph_impl=full_iteration": "old-module-full-iteration",
    "cuda_graph_modules: full_iteration_inference -> inference_cuda_graph_scope=block": (
        "old-module-full-iteration-inference"
    ),
    "cuda_graph_modules: full_iteration_inference -> dropped (cuda_graph_impl=none)": (
        "old-module-full-iteration-inference-without-effect"
    ),
}


def test_cases_agree_or_differ_for_a_listed_reason() -> None:
    all_cases = cases()
    assert len(all_cases) > 1000
    assert {case["id"] for case in all_cases} >= ROW_OF.keys()
    found = {case["id"]: difference(case, config) for case, config in answers()}
    faults = {name: text for name, text in found.items() if bool(text) != (name in ROW_OF)}
    assert faults == {}


def test_each_migration_is_one_notice() -> None:
    for case, config in answers():
        if "argv" in case and isinstance(config, RunConfig):
            old = sorted(notice.code for notice in config.notices if notice.code.startswith("old-"))
            assert old == sorted(CODES[code] for code in case.get("migrations", ())), case["id"]


def test_a_printed_configuration_of_a_case_parses_to_itself() -> None:
    for case, config in answers():
        if isinstance(config, RunConfig):
            assert from_argv(config.to_argv(), case.get("env", {}), machine=EVERYTHING) == config


def test_the_differences_are_those_that_users_are_told() -> None:
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", COMPATIBILITY.read_text(encoding="utf-8"), re.M)]
    assert rows == list(range(1, 16))
    assert DIFFERENCES.keys() <= set(rows)


@pytest.mark.parametrize("name", ["num_moe_experts", "cuda_graph_scope", "enable_cuda_graph"])
def test_names_of_the_transformer_configuration_are_known(name: str) -> None:
    assert isinstance(from_options({name: None}), RunConfig)


# Rows of which no recorded case is an example: a line, and the codes of its problems and of its notices.
EXAMPLES = {
    1: ("--cuda-graph-impl local --cuda-graph-modules atn", {"unknown-choice"}, set()),
    2: ("--perform-rl-step --rl-persist-cuda-graphs --enable-cuda-graph", set(), {"old-enable-cuda-graph"}),
    6: ("--cuda-graph-modules moe", set(), {"wrong-modules-without-graphs"}),
    7: ("--cuda-graph-impl local --cuda-graph-modules attn mamba", set(), {"no-layer-for-mamba"}),
    9: (
        "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router moe_preprocess --num-experts 4 "
        "--moe-token-dispatcher-type alltoall --fp8-format hybrid --moe-router-padding-for-quantization",
        {"preprocess-reads-counts"},
        set(),
    ),
    12: (
        "--cuda-graph-impl local --cuda-graph-modules moe_router --num-experts 4",
        set(),
        {"modules-completed"},
    ),
    13: ("--cuda-graph-modules full_iteration attn", {"old-full-iteration-mixed"}, set()),
    14: (
        "--perform-rl-step --rl-persist-cuda-graphs --cuda-graph-impl transformer_engine",
        set(),
        {"rl-no-inference-graphs"},
    ),
    15: (
        "--cuda-graph-impl local --cuda-graph-modules moe --num-experts 4 --moe-grouped-gemm --bf16",
        set(),
        set(),
    ),
}


@pytest.mark.parametrize(("line", "problems", "notices"), EXAMPLES.values(), ids=map(str, EXAMPLES))
def test_an_example_of_a_row(line: str, problems: set[str], notices: set[str]) -> None:
    if problems:
        with pytest.raises(ConfigError) as caught:
            from_argv(line.split(), {})
        assert {problem.code for problem in caught.value.problems} == problems
    else:
        assert {notice.code for notice in from_argv(line.split(), {}).notices} == notices


def test_every_row_has_a_case_or_an_example() -> None:
    assert DIFFERENCES.keys() | EXAMPLES.keys() == set(range(1, 16))
