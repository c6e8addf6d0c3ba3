"""Options of recomputation and offloading."""

from __future__ import annotations

from graphstep.config.choices import OFFLOAD_MODULES, RECOMPUTE_MODULES
from graphstep.config.memory import MemoryConfig
from graphstep.config.options.option import Option, OptionGroup, positive, text

_recompute = OptionGroup("recomputation", "memory", MemoryConfig)
_offload = OptionGroup("offloading", "memory", MemoryConfig)

MEMORY_OPTIONS: tuple[Option, ...] = (
    _recompute.word("--recompute-granularity", "recompute whole layers or named parts", default_text="nothing"),
    _recompute.word("--recompute-method", "which layers full recomputes", default_text="none; full needs it"),
    _recompute.count(
        "--recompute-num-layers",
        "layers of a chunk, or of a stage",
        "N",
        type=positive,
        default_text="none; full needs it",
    ),
    _recompute.option(
        "--recompute-modules",
        "parts that selective recomputes: " + ", ".join(RECOMPUTE_MODULES),
        nargs="+",
        type=text,
        splits_commas=True,
        metavar="MODULE",
        default_text="core_attn",
    ),
    _offload.count("--cpu-offloading-num-layers", "layers whose activations and weights are kept on the CPU", "N"),
    _offload.switch("--fine-grained-activation-offloading", "keep the inputs of --offload-modules on the CPU"),
    _offload.option(
        "--offload-modules",
        "parts whose inputs are kept on the CPU: " + ", ".join(OFFLOAD_MODULES),
        nargs="+",
        type=text,
        splits_commas=True,
        metavar="MODULE",
        default_text="none",
    ),
    _offload.count(
        "--fine-grained-offloading-max-inflight-offloads",
        "copies that may be under way at once",
        "N",
        default_text="any number",
    ),
    _offload.switch("--delay-offload-until-cuda-graph", "copy after the replay of a graph (transformer_engine)"),
    _offload.share("--activation-offload-fraction", "share of the layers that are offloaded", "SHARE"),
    _offload.count("--min-offloaded-tensor-size", "smallest tensor that is offloaded", "ELEMENTS"),
    _offload.switch("--optimizer-cpu-offload", "keep the optimizer state on the CPU"),
)
