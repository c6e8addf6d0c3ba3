"""What is captured, in words."""

from __future__ import annotations

import pytest

from graphstep.config import from_argv
from graphstep.config.captured import describe_capture, layers_with


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            "",
            (
                "training: eager, nothing is captured",
                "validation: eager",
                "optimizer: eager",
                "inference: eager",
            ),
        ),
        (
            "--cuda-graph-impl local --num-layers 3 --eval-iters 0 --decode-only-cuda-graphs",
            (
                "training: a forward and a backward graph of each of 3 whole layers, in the order of the first step, "
                "after that step",
                "validation: none",
                "optimizer: eager",
                "inference: one graph a layer for up to 16 token counts (exponential), decode only, in graphstep "
                "generate and serve",
            ),
        ),
        (
            "--cuda-graph-impl local --inference-cuda-graph-scope block --inference-cuda-graph-all-prefills "
            "--inference-dynamic-batching-num-cuda-graphs -1 --cuda-graph-warmup-steps 1",
            (
                "training: a forward and a backward graph of each of 4 whole layers, in the order of the first step, "
                "after that step",
                "validation: eager",
                "optimizer: eager",
                "inference: one graph of the whole model for an automatic number of token counts (exponential), "
                "prefill as well, in graphstep generate and serve",
            ),
        ),
        (
            "--cuda-graph-impl local --cuda-graph-policy auto --cuda-graph-merge-layers 2 --eval-iters 0 "
            "--decode-only-cuda-graphs",
            (
                "training: a forward and a backward graph of each of 4 whole layers, up to 2 neighbouring layers "
                "merged, in the order of the first step, after that step; what cannot be captured runs eagerly",
                "validation: none",
                "optimizer: eager",
                "inference: one graph a layer for up to 16 token counts (exponential), decode only, in graphstep "
                "generate and serve",
            ),
        ),
        (
            "--cuda-graph-impl local --cuda-graph-policy off --cuda-graph-merge-layers 0",
            (
                "training: eager, nothing is captured: --cuda-graph-policy off",
                "validation: eager",
                "optimizer: eager",
                "inference: eager",
            ),
        ),
        (
            "--cuda-graph-impl transformer_engine --hybrid-layer-pattern M*-M --cuda-graph-modules attn mamba "
            "--optimizer-cuda-graph",
            (
                "training: a forward and a backward graph for each microbatch in flight of attn in 1 layer, mamba in "
                "2 layers, parts that follow each other in one, in the order of the schedule, after 3 eager steps",
                "validation: eager",
                "optimizer: the step as a graph of its own, after 3 eager steps",
                "inference: eager",
            ),
        ),
        (
            "--cuda-graph-impl full_iteration --skip-train",
            (
                "training: skipped",
                "validation: the forward as one graph",
                "optimizer: eager",
                "inference: eager",
            ),
        ),
    ],
)
def test_capture_in_words(argv: str, lines: tuple[str, ...]) -> None:
    assert describe_capture(from_argv(argv.split(), {})) == lines


def test_layers_are_counted() -> None:
    config = from_argv(["--num-layers", "5", "--num-experts", "4", "--moe-layer-freq", "2"], {})
    counts = {module: layers_with(config, module) for module in ("attn", "mlp", "moe", "moe_router", "mamba")}
    assert counts == {"attn": 5, "mlp": 2, "moe": 3, "moe_router": 3, "mamba": 0}


GROUPED = "in graphs, and no token is dropped: the rows of each are known on the device alone"
ONE_AFTER_ANOTHER = "experts that run one after another learn their numbers of tokens on the host"
PARTS = "--cuda-graph-modules attn moe_router moe_preprocess"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--moe-grouped-gemm --bf16", GROUPED),
        ("--moe-grouped-gemm", f"{GROUPED} (on the CPU only: on a GPU that needs --bf16)"),
        (
            "",
            "cannot be in graphs, because experts that run one after another learn their numbers of tokens on the host",
        ),
        (PARTS, "eager, because experts that run one after another learn their numbers of tokens on the host"),
        (
            f"{PARTS} --moe-grouped-gemm --bf16",
            "eager beside the graphs; their shapes are static, so that module moe or whole layers take them in",
        ),
        (
            "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
            "in graphs, each padded to its capacity; tokens beyond it are dropped",
        ),
        (
            "--moe-grouped-gemm --bf16 --moe-expert-capacity-factor 1",
            "in graphs, and what is beyond the capacity is dropped: the rows of each are known on the device alone",
        ),
        ("--cuda-graph-policy auto", f"eager, because {ONE_AFTER_ANOTHER}"),
        (
            "--moe-grouped-gemm --bf16 --expert-model-parallel-size 2",
            "cannot be in graphs, because ranks exchange numbers of tokens that they learn on the host",
        ),
        (
            "--moe-grouped-gemm --bf16 --moe-token-dispatcher-type flex",
            "cannot be in graphs, because the flex dispatcher learns numbers of tokens on the host",
        ),
        (
            "--moe-grouped-gemm --device cuda",
            "cannot be in graphs, because the grouped matrix multiplication of a GPU reads its offsets on the host "
            "unless it is one of bf16",
        ),
    ],
)
def test_experts_in_words(argv: str, line: str) -> None:
    words = ["--num-experts", "4", "--cuda-graph-impl", "local", *argv.split()]
    assert describe_capture(from_argv(words, {"WORLD_SIZE": "2"}))[1] == f"experts: {line}"


NO_GRAPH = "nothing can be captured: "
AFTER = "in the order of the first step, after that step"


@pytest.mark.parametrize(
    ("argv", "training", "validation"),
    [
        ("local", f"{NO_GRAPH}every layer has experts in it", "eager"),
        (
            "local --moe-layer-freq 2",
            f"a forward and a backward graph of each of 2 whole layers, those with experts left out, {AFTER}",
            "eager",
        ),
        ("local --moe-grouped-gemm", f"a forward and a backward graph of each of 4 whole layers, {AFTER}", "eager"),
        (
            "transformer_engine --hybrid-layer-pattern *E-",
            "a forward and a backward graph for each microbatch in flight of each of 2 whole layers, those with "
            "experts left out, in the order of the schedule, after 3 eager steps",
            "eager",
        ),
        (
            "full_iteration --no-check-for-nan-in-loss-and-grad",
            f"{NO_GRAPH}an iteration has all experts in it",
            "eager",
        ),
        (
            "full_iteration --no-check-for-nan-in-loss-and-grad --hybrid-layer-pattern *-",
            "forward and backward of 1 microbatch as one graph, after 3 eager steps",
            "the forward as one graph",
        ),
        ("none", "eager, nothing is captured", "eager"),
        (
            "transformer_engine --moe-grouped-gemm --cuda-graph-merge-layers 0",
            "a forward and a backward graph for each microbatch in flight of each of 4 whole layers, neighbouring "
            "layers merged as far as can be, in the order of the schedule, after 3 eager steps",
            "eager",
        ),
        (
            "transformer_engine --moe-grouped-gemm --cuda-graph-policy off",
            "eager, nothing is captured: --cuda-graph-policy off",
            "eager",
        ),
    ],
)
def test_layers_whose_experts_cannot_be_captured(argv: str, training: str, validation: str) -> None:
    lines = describe_capture(from_argv(["--num-experts", "4", "--cuda-graph-impl", *argv.split()], {}))
    assert lines[0] == f"training: {training}"
    assert f"validation: {validation}" in lines


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("none", "the step as a graph of its own, after 3 eager steps"),
        ("none --cuda-graph-policy off", "eager"),
        ("local --cuda-graph-policy off", "eager"),
        ("local --cuda-graph-policy auto", "the step as a graph of its own, after 3 eager steps"),
        ("full_iteration --cuda-graph-policy auto", "eager"),
        ("full_iteration --cuda-graph-policy off", "eager"),
        ("full_iteration --moe-grouped-gemm", "in the graph of the training step, after 3 eager steps"),
    ],
)
def test_where_the_optimizer_steps(argv: str, line: str) -> None:
    nan = "--no-check-for-nan-in-loss-and-grad --optimizer-cuda-graph --num-experts 4 --cuda-graph-impl"
    assert f"optimizer: {line}" in describe_capture(from_argv([*nan.split(), *argv.split()], {}))


@pytest.mark.parametrize("argv", ["", "--cuda-graph-impl local --hybrid-layer-pattern M*", "--skip-train"])
def test_no_line_about_experts_where_none_is_captured(argv: str) -> None:
    lines = describe_capture(from_argv(["--num-experts", "4", *argv.split()], {}))
    assert not any(line.startswith("experts") for line in lines)
