"""Options of experts."""

from __future__ import annotations

from graphstep.config.layer_freq import read_layer_freq
from graphstep.config.moe import MoEConfig
from graphstep.config.options.option import Option, OptionGroup, positive

_moe = OptionGroup("experts", "moe", MoEConfig)
_static = OptionGroup("experts with static shapes", "moe", MoEConfig)

MOE_OPTIONS: tuple[Option, ...] = (
    _moe.count("--num-experts", "experts of a layer", "N", type=positive, default_text="no experts"),
    _moe.option(
        "--moe-layer-freq",
        "every n-th layer has experts, or one 0 or 1 a layer, such as [0,1] or ([0]*3+[1]*9)",
        type=read_layer_freq,
        metavar="N|LIST",
    ),
    _moe.count(
        "--moe-ffn-hidden-size",
        "width inside an expert",
        "CHANNELS",
        type=positive,
        default_text="--ffn-hidden-size",
    ),
    _moe.count("--moe-router-topk", "experts a token goes to", "N"),
    _moe.word("--moe-router-load-balancing-type", "how the load is balanced"),
    _moe.share("--moe-aux-loss-coeff", "weight of the balancing loss"),
    _moe.share("--moe-z-loss-coeff", "weight of the loss on the size of router logits", default_text="none"),
    _moe.switch("--moe-router-pre-softmax", "softmax before the experts are chosen instead of after"),
    _moe.word("--moe-router-score-function", "turns router logits into scores"),
    _moe.count("--moe-router-num-groups", "groups of experts to choose from first", "N", default_text="no groups"),
    _moe.count("--moe-router-group-topk", "groups that the experts of a token are in", "N", default_text="all"),
    _moe.share("--moe-router-topk-scaling-factor", "factor on the weights of the chosen experts", default_text="none"),
    _moe.switch("--moe-router-enable-expert-bias", "balance with a bias an expert instead of a loss"),
    _moe.share("--moe-router-bias-update-rate", "how far the bias of an expert moves in a step"),
    _moe.word("--moe-router-dtype", "number format of the router", default_text="that of the model"),
    _moe.switch("--moe-router-padding-for-quantization", "pad the tokens of an expert to what fp8 and fp4 need"),
    _moe.share("--moe-input-jitter-eps", "noise on the input of the router", default_text="none"),
    _moe.word("--moe-token-dispatcher-type", "how tokens get to their experts"),
    _moe.word("--moe-flex-dispatcher-backend", "what the flex dispatcher runs on"),
    _moe.switch(
        "--moe-grouped-gemm",
        "all experts in one matrix multiplication; linear layers must have no biases (--disable-bias-linear), and a "
        "GPU needs --bf16 to have it in a graph",
    ),
    _moe.switch("--moe-use-grouped-tensor", "weights of all experts in one tensor"),
    _moe.switch("--use-transformer-engine-op-fuser", "fuse the operations of an MLP"),
    _moe.count(
        "--moe-shared-expert-intermediate-size",
        "width of the shared expert",
        "CHANNELS",
        type=positive,
        default_text="no shared expert",
    ),
    _moe.switch("--moe-shared-expert-gate", "weight the shared expert with a sigmoid gate"),
    _moe.switch("--moe-shared-expert-overlap", "run the shared expert beside the exchange of tokens"),
    _moe.count("--moe-latent-size", "width of compressed tokens", "CHANNELS", type=positive, default_text="not used"),
    _moe.switch("--moe-permute-fusion", "reorder tokens in one kernel"),
    _static.share(
        "--moe-expert-capacity-factor",
        "tokens of an expert relative to a balanced load, others are dropped; negative: none is dropped",
        default_text="none is dropped",
    ),
    _static.switch("--moe-pad-expert-input-to-capacity", "pad every expert to its capacity"),
    _static.word("--moe-token-drop-policy", "which tokens are dropped"),
    _static.switch("--moe-pad-experts-for-cuda-graph-inference", "in inference with graphs: pad, drop nothing"),
    _static.share(
        "--moe-expert-rank-capacity-factor",
        "static budget of tokens of an expert rank relative to a balanced load",
        default_text="dynamic",
    ),
    _static.switch("--moe-paged-stash", "keep the saved activations of the experts in pages"),
    _static.count("--moe-paged-stash-page-size", "size of a page", "TOKENS"),
    _static.share(
        "--moe-paged-stash-buffer-size-factor-cuda",
        "size on the device: positive times the average peak, negative times the measured peak",
    ),
    _static.share("--moe-paged-stash-buffer-size-factor-cpu", "size in pinned host memory, likewise; 0: none"),
    _static.switch(
        "--moe-hybridep-pad-uneven-dispatch-inputs",
        "pad to the largest input of the group, which is read back to the host",
    ),
    _static.switch("--moe-ncclep-zero-copy", "exchange tokens through persistent symmetric buffers"),
)
