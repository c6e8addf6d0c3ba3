"""Options of CUDA graphs: the switches."""

from __future__ import annotations

from graphstep.config.migrations import OLD_MODULES
from graphstep.config.options.option import Option, OptionGroup, integer, number
from graphstep.config.switches import (
    GRAPH_OPTION_NAMES,
    CapturePolicy,
    CudaGraphConfig,
    CudaGraphImpl,
    CudaGraphModule,
    InferenceCudaGraphScope,
    MismatchPolicy,
)
from graphstep.config.training import TrainingConfig

_graphs = OptionGroup("CUDA graphs", "graphs", CudaGraphConfig, GRAPH_OPTION_NAMES)
_proof = OptionGroup("CUDA graphs", "training", TrainingConfig)

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
    _graphs.option(
        "--cuda-graph-policy",
        "what becomes of a part that cannot be captured; auto: it runs eagerly, with a warning and the reason in the "
        "report (local, full_iteration, optimizer; with transformer_engine an error); required: an error; off: nothing "
        "is captured",
        choices=tuple(CapturePolicy),
    ),
    _graphs.option(
        "--cuda-graph-on-mismatch",
        "what happens when shapes, types or modes of a call are none of those captured; error: stop, with all "
        "differences; eager: run the call eagerly and count it; recapture: capture them as well, see "
        "--cuda-graph-capture-after (local, full_iteration; with transformer_engine, which captures once, the same as "
        "eager)",
        choices=tuple(MismatchPolicy),
    ),
    _graphs.count(
        "--cuda-graph-capture-after",
        "steps in which further shapes, types or modes must be seen before they are captured as well (local, with "
        "recapture)",
        "STEPS",
    ),
    _graphs.count(
        "--cuda-graph-max-signatures",
        "sets of shapes, types and modes that each part keeps graphs for, at most; local: the least used is evicted; "
        "transformer_engine: further ones run eagerly; full_iteration: graphs in all, at least 2, one for training and "
        "one for validation, of which the one used longest ago is dropped",
        "N",
    ),
    _graphs.count(
        "--cuda-graph-merge-layers",
        "neighbouring captured layers launched as one graph; 0: as many as can be (local, transformer_engine)",
        "LAYERS",
    ),
    _graphs.switch(
        "--cuda-graph-debug",
        "overwrite static memory when it is no longer valid, and check addresses before every replay (local, "
        "transformer_engine); slow",
    ),
    _proof.option(
        "--cuda-graph-verify",
        "before training, run that many steps by replays and eagerly, on poisoned memory, and compare all that they "
        "leave behind; stops at a difference, with the first module that differs; 0: off",
        type=integer,
        metavar="STEPS",
    ),
    _proof.option(
        "--cuda-graph-shadow-interval",
        "every so many steps, run one microbatch (full_iteration: the step) eagerly as well, and log what differs by "
        "module; changes nothing in the run; 0: off",
        type=integer,
        metavar="STEPS",
    ),
    _proof.option(
        "--cuda-graph-verify-rtol",
        "how far both may be from eager, relative to its values, for kernels that differ from run to run; 0: every bit "
        "counts",
        type=number,
        metavar="X",
    ),
    _proof.option("--cuda-graph-verify-atol", "the same in absolute terms", type=number, metavar="X"),
)
