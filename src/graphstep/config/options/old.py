"""Old options, which are read as new ones: see ``migrations.py``."""

from __future__ import annotations

from graphstep.config.migrations import OLD_MODULES
from graphstep.config.options.option import Option
from graphstep.config.switches import CudaGraphModule

_GROUP = "old options"

OLD_OPTIONS: tuple[Option, ...] = (
    Option(
        dest="enable_cuda_graph",
        flags=("--enable-cuda-graph",),
        nargs=0,
        default=False,
        annotation="bool",
        group=_GROUP,
        help="write --cuda-graph-impl local",
    ),
    Option(
        dest="external_cuda_graph",
        flags=("--external-cuda-graph",),
        nargs=0,
        default=False,
        annotation="bool",
        group=_GROUP,
        help="write --cuda-graph-impl transformer_engine",
    ),
    Option(
        dest="cuda_graph_scope",
        flags=("--cuda-graph-scope",),
        nargs="+",
        default=(),
        choices=(*CudaGraphModule, *OLD_MODULES),
        splits_commas=True,
        annotation="tuple[CudaGraphModule, ...]",
        metavar="MODULE",
        group=_GROUP,
        default_text="whole layers",
        help="write --cuda-graph-modules",
    ),
    Option(
        dest="moe_router_padding_for_fp8",
        flags=("--moe-router-padding-for-fp8",),
        nargs=0,
        default=False,
        annotation="bool",
        group=_GROUP,
        help="write --moe-router-padding-for-quantization",
    ),
    Option(
        dest="hybrid_override_pattern",
        flags=("--hybrid-override-pattern",),
        annotation="str | None",
        metavar="PATTERN",
        group=_GROUP,
        default_text="none",
        help="write --hybrid-layer-pattern",
    ),
)
