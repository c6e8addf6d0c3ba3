"""Options of layers, kernels, number formats, and of the loop around them."""

from __future__ import annotations

from graphstep.config.layers import LayersConfig
from graphstep.config.loop import LoopConfig
from graphstep.config.options.option import Option, OptionGroup, positive, text
from graphstep.config.precision import PrecisionConfig

_layers = OptionGroup("layers and kernels", "layers", LayersConfig)
_precision = OptionGroup("number formats", "precision", PrecisionConfig)
_loop = OptionGroup("loop", "loop", LoopConfig)

ARCHITECTURE_OPTIONS: tuple[Option, ...] = (
    _layers.option(
        "--hybrid-layer-pattern",
        "one letter a layer: M Mamba, * attention, - MLP, E experts; gives the number of layers",
        type=text,
        metavar="PATTERN",
        default_text="attention and MLP in each layer",
    ),
    _layers.count("--mtp-num-layers", "layers that predict tokens further ahead", "N", type=positive),
    _layers.switch("--multi-latent-attention", "attention with compressed keys and values"),
    _layers.word("--transformer-impl", "whose kernels; graphstep has its own for each word"),
    _layers.switch("--cross-entropy-loss-fusion", "compute the loss in one kernel"),
    _layers.word("--cross-entropy-fusion-impl", "whose kernel that is"),
    _layers.switch(
        "",
        "do not add weight gradients inside the matrix multiplication",
        off="--no-gradient-accumulation-fusion",
        dest="gradient_accumulation_fusion",
    ),
    _layers.switch("--te-rng-tracker", "accepted; generators can always be replayed by a graph here"),
    _layers.switch("--inference-rng-tracker", "accepted; generators can always be replayed by a graph here"),
    _precision.switch("--fp16", "fp16 parameters with loss scaling"),
    _precision.share("--loss-scale", "constant loss scale of fp16", default_text="dynamic"),
    _precision.word("--fp8-format", "format of fp8 matrix multiplications", default_text="no fp8"),
    _precision.word("--fp8-recipe", "how fp8 scales are chosen"),
    _precision.switch("--fp8-param-gather", "keep and gather parameters in fp8"),
    _precision.word("--fp4-format", "format of fp4 matrix multiplications", default_text="no fp4"),
    _precision.word("--fp4-recipe", "how fp4 scales are chosen"),
    _loop.word("--optimizer", "which optimizer"),
    _loop.switch("--skip-train", "validate and test only"),
    _loop.word("--dataloader-type", "order of the data", default_text="chosen by the task"),
    _loop.switch("--calculate-per-token-loss", "average the loss over tokens instead of microbatches"),
    _loop.switch("--check-for-large-grads", "stop when a gradient is unexpectedly large"),
    _loop.switch("--check-for-spiky-loss", "look for jumps of the loss"),
    _loop.switch("--log-num-zeros-in-grad", "count zeros in the gradients"),
    _loop.count("--timing-log-level", "0 to 2: how much is timed; from 1 on timers wait for the device", "LEVEL"),
)
