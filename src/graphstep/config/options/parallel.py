"""Options of the ranks."""

from __future__ import annotations

from graphstep.config.options.option import Option, OptionGroup, positive
from graphstep.config.parallel import ParallelConfig

_parallel = OptionGroup("ranks", "parallel", ParallelConfig)

PARALLEL_OPTIONS: tuple[Option, ...] = (
    _parallel.count("--tensor-model-parallel-size", "ranks that share each matrix", "RANKS"),
    _parallel.count("--pipeline-model-parallel-size", "stages of the pipeline", "STAGES"),
    _parallel.count(
        "--num-virtual-stages-per-pipeline-rank",
        "model chunks of a stage, for the interleaved schedule",
        "CHUNKS",
        type=positive,
        default_text="1, without interleaving",
    ),
    _parallel.count("--context-parallel-size", "ranks that share a sequence", "RANKS"),
    _parallel.count("--expert-model-parallel-size", "ranks that share the experts", "RANKS"),
    _parallel.count(
        "--expert-tensor-parallel-size",
        "ranks that share each matrix of an expert",
        "RANKS",
        type=positive,
        default_text="--tensor-model-parallel-size",
    ),
    _parallel.count(
        "--tensor-parallel-num-weight-shards",
        "ranks that keep a share of each weight and gather it when it is needed",
        "RANKS",
    ),
    _parallel.switch("--sequence-parallel", "split tokens of norms and dropout among the ranks of a tensor group"),
    _parallel.switch("--hybrid-context-parallel", "choose the context-parallel size by the length of each sequence"),
    _parallel.switch("--use-distributed-optimizer", "share the optimizer state among data-parallel ranks"),
    _parallel.switch("--use-precision-aware-optimizer", "optimizer state in a number format of its own"),
    _parallel.switch("--use-megatron-fsdp", "share parameters, gradients and optimizer state"),
    _parallel.switch("--megatron-fsdp-cuda-graph-mode", "make that sharing fit graphs; on where both are used"),
    _parallel.switch("--overlap-grad-reduce", "reduce gradients while the backward goes on"),
    _parallel.switch("--overlap-param-gather", "gather parameters while the forward goes on"),
    _parallel.switch(
        "--overlap-moe-expert-parallel-comm",
        "run the backward of one microbatch beside the forward of another to hide the exchange of tokens",
    ),
    _parallel.switch("--delay-wgrad-compute", "compute weight gradients after input gradients"),
    _parallel.switch("--fake-process-group", "pretend that the other ranks exist, for measurements"),
)
