"""Options of CUDA graphs: the switches."""

from __future__ import annotations

from graphstep.config.migrations import OLD_MODULES
from graphstep.config.options.option import Option, OptionGroup, integer
from graphstep.config.switches import (
    GRAPH_OPTION_NAMES,
    CudaGraphConfig,
    CudaGraphImpl,
    CudaGraphModule,
    InferenceCudaGraphScope,
)

_graphs = OptionGroup("CUDA graphs", "graphs", CudaGraphConfig, GRAPH_OPTION_NAMES)

GRAPH_OPTIONS: tuple[Option, ...] = (
    _graphs.option(
        "--cuda-graph-impl",
        "none: eager; local: graphs a layer, in the order of the first step; transformer_engine: graphs a layer and "
        "microbatch, in the order of the schedule; full_iteration: forward and backward of a whole step as one graph",
        choices=tuple(CudaGraphImpl),
    ),
    _graphs.option(
        "--cuda-graph-modules",
        "parts of a layer to capture (local, transformer_engine), separated by spaces or commas: "
        + ", ".join(CudaGraphModule),
        nargs="+",
        choices=(*CudaGraphModule, *OLD_MODULES),
        splits_commas=True,
        metavar="MODULE",
        default_text="whole layers",
    ),
    _graphs.option(
        "--inference-cuda-graph-scope",
        "what one inference graph covers",
        choices=tuple(InferenceCudaGraphScope),
        default_text="layer for local, else none",
    ),
    _graphs.option(
        "--cuda-graph-warmup-steps",
        "eager steps before the capture; with local, eager runs of each part just before its capture",
        type=integer,
        metavar="STEPS",
    ),
    _graphs.switch(
        "--cuda-graph-use-single-mempool",
        "one memory pool for training, validation and optimizer graph",
        off="--no-cuda-graph-use-single-mempool",
    ),
    _graphs.switch(
        "--cuda-graph-retain-backward-graph",
        "keep the autograd graph alive while a backward is captured (local, transformer_engine)",
    ),
    _graphs.switch("--optimizer-cuda-graph", "capture the optimizer step as well"),
)
