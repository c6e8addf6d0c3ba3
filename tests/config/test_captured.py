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
                "inference: not available yet; would be "
                "one graph a layer for up to 16 token counts (exponential), decode only",
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
                "inference: not available yet; would be "
                "one graph of the whole model for an automatic number of token counts (exponential), "
                "prefill as well",
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
                "inference: not available yet; would be "
                "one graph a layer for up to 16 token counts (exponential), decode only",
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
                "2 layers, in the order of the schedule, after 3 eager steps",
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
