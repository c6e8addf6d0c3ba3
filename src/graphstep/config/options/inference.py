"""Options of inference and reinforcement learning."""

from __future__ import annotations

from graphstep.config.inference import InferenceConfig
from graphstep.config.options.option import Option, OptionGroup, integer, positive
from graphstep.config.rl import RLConfig

_inference = OptionGroup("inference", "inference", InferenceConfig)
_rl = OptionGroup("reinforcement learning", "rl", RLConfig)
_LEVELS = ("0", "1")

INFERENCE_OPTIONS: tuple[Option, ...] = (
    _inference.switch("--inference-dynamic-batching", "requests join and leave a running batch"),
    _inference.count(
        "--inference-dynamic-batching-num-cuda-graphs",
        "largest number of token counts that graphs are captured for; -1: chosen automatically",
        "N",
    ),
    _inference.count(
        "--inference-dynamic-batching-cuda-graph-mixed-prefill-count",
        "prefill requests of a shape that mixes prefill and decode; 0: decode only",
        "N",
    ),
    _inference.word(
        "--inference-dynamic-batching-cuda-graph-sizing-distribution",
        "halve token counts from one to the next, or space them equally",
    ),
    _inference.switch("--decode-only-cuda-graphs", "no graphs for steps with prefill"),
    _inference.switch("--inference-cuda-graph-all-prefills", "graphs for all prefill steps"),
    _inference.count(
        "--inference-cuda-graph-max-tokens",
        "most tokens of a shape that mixes prefill and decode; never below what decoding needs",
        "TOKENS",
    ),
    _inference.count(
        "--inference-dynamic-batching-max-requests",
        "most requests of a batch",
        "N",
        type=positive,
        default_text="from the memory there is",
    ),
    _inference.count(
        "--inference-dynamic-batching-max-tokens",
        "most tokens of a step",
        "TOKENS",
        type=positive,
        default_text="chosen automatically",
    ),
    _inference.count("--inference-dynamic-batching-block-size", "block of the key-value cache", "TOKENS"),
    _inference.share("--inference-dynamic-batching-buffer-size-gb", "memory of the key-value cache", "GB"),
    _inference.option(
        "--inference-dynamic-batching-unified-memory-level",
        "1: key-value cache in managed memory, whose addresses never change",
        type=integer,
        choices=_LEVELS,
    ),
    _inference.word("--inference-dynamic-batching-sampling-backend", "who draws tokens; flashinfer is never captured"),
    _inference.count("--num-speculative-tokens", "tokens that are guessed ahead in each decode step", "N"),
    _inference.count(
        "--inference-batch-times-seqlen-threshold",
        "split batches larger than this into microbatches of the pipeline; -1: never",
        "TOKENS",
    ),
    _inference.switch("--enable-chunked-prefill", "split long prompts over several steps"),
    _inference.switch("--batch-invariant-mode", "results do not depend on the other requests of a batch"),
    _rl.switch("--perform-rl-step", "train with reinforcement learning"),
    _rl.switch("--rl-training-cuda-graphs", "graphs in training, too"),
    _rl.switch("--rl-persist-cuda-graphs", "keep inference graphs while training instead of capturing them again"),
    _rl.word(
        "--rl-kv-cache-management-mode",
        "while training: keep the key-value cache, move it to the CPU, or recompute it",
    ),
    _rl.option(
        "--rl-inference-model-unified-memory-level",
        "1: weights of the inference model in managed memory, whose addresses never change",
        type=integer,
        choices=_LEVELS,
    ),
    _rl.switch("--rl-offload-inference-model-weights-when-idle", "move those weights to the CPU while training"),
    _rl.switch("--rl-offload-optimizer-during-inference", "move the optimizer state to the CPU during rollouts"),
)
