"""Options of Mamba layers."""

from __future__ import annotations

from graphstep.config.mamba import MambaConfig
from graphstep.config.options.option import Option, OptionGroup, positive

_mamba = OptionGroup("Mamba layers", "mamba", MambaConfig)

MAMBA_OPTIONS: tuple[Option, ...] = (
    _mamba.count("--mamba-state-dim", "numbers of state for each channel", "N"),
    _mamba.count("--mamba-head-dim", "channels of a head", "CHANNELS"),
    _mamba.count(
        "--mamba-num-groups",
        "groups of heads that share what goes into and out of the state; must divide the heads of a layer: 2 x hidden "
        "size / channels of a head, unless --mamba-num-heads says",
        "N",
    ),
    _mamba.count(
        "--mamba-num-heads", "heads of a layer", "N", type=positive, default_text="2 x hidden size / channels of a head"
    ),
)
