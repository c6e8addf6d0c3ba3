"""What a configuration captures, in words."""

from __future__ import annotations

from collections.abc import Iterator

from graphstep.config.derived import EXPERT_MODULES
from graphstep.config.layer_freq import moe_layers
from graphstep.config.layer_pattern import pattern_layers
from graphstep.config.run import RunConfig
from graphstep.config.static_experts import drops_and_pads, dynamic_experts, needs_half_precision
from graphstep.config.switches import CapturePolicy, CudaGraphConfig, CudaGraphImpl, InferenceCudaGraphScope


def describe_capture(config: RunConfig) -> tuple[str, ...]:
    """Return one line for training, validation, optimizer and inference each, and one for experts if there are any."""
    return tuple(_lines(config))


def layers_with(config: RunConfig, module: str) -> int:
    """Return the number of layers that have a part of this name, as ``--cuda-graph-modules`` knows it."""
    pattern = config.layers.hybrid_layer_pattern
    if pattern is not None:
        letter = {"mamba": "M", "attn": "*", "mlp": "-"}.get(module, "E")
        return pattern_layers(pattern).count(letter)
    if module == "mamba":
        return 0
    if module == "attn":
        return config.model.num_layers
    experts = 0
    if config.moe.num_experts is not None:
        experts = sum(moe_layers(config.moe.moe_layer_freq, config.model.num_layers))
    return experts if module in EXPERT_MODULES else config.model.num_layers - experts


def _lines(config: RunConfig) -> Iterator[str]:
    yield f"training: {_training(config)}"
    if config.moe.num_experts is not None and layers_with(config, "moe") and not _captures_nothing(config):
        yield f"experts: {_experts(config)}"
    yield f"validation: {_validation(config)}"
    yield f"optimizer: {_optimizer(config)}"
    yield f"inference: {_inference(config)}"


def _training(config: RunConfig) -> str:
    graphs = config.graphs
    eager = _eager_training(config)
    if eager:
        return eager
    after = f", after {_times(graphs.warmup_steps, 'eager step')}"
    if graphs.impl is CudaGraphImpl.full_iteration:
        microbatches = _times(config.training.num_microbatches, "microbatch", "microbatches")
        rest = ", clipping and optimizer" if graphs.optimizer else ""
        return f"forward and backward of {microbatches}{rest} as one graph{after}"
    kind = "a forward and a backward graph"
    merged = {0: ", neighbouring layers merged as far as can be", 1: ""}.get(
        graphs.merge_layers, f", up to {graphs.merge_layers} neighbouring layers merged"
    )
    if graphs.impl is CudaGraphImpl.transformer_engine:
        return f"{kind} for each microbatch in flight of {_parts(config)}{merged}, in the order of the schedule{after}"
    # The first step is run and observed; warmup runs of each region come after it and leave no trace.
    rest = "; what cannot be captured runs eagerly" if graphs.policy is CapturePolicy.auto else ""
    return f"{kind} of {_parts(config)}{merged}, in the order of the first step, after that step{rest}"


def _eager_training(config: RunConfig) -> str:
    """Return why no graph is made for training; empty if one is."""
    graphs = config.graphs
    if config.loop.skip_train:
        return "skipped"
    if graphs.impl is CudaGraphImpl.none:
        return "eager, nothing is captured"
    if _is_switched_off(graphs):
        return "eager, nothing is captured: --cuda-graph-policy off"
    if _left_out(config) and graphs.impl is CudaGraphImpl.full_iteration:
        return "nothing can be captured: an iteration has all experts in it"
    if _left_out(config) and layers_with(config, "moe") == config.model.num_layers:
        return "nothing can be captured: every layer has experts in it"
    return ""


def _captures_nothing(config: RunConfig) -> bool:
    graphs = config.graphs
    return config.loop.skip_train or graphs.impl is CudaGraphImpl.none or _is_switched_off(graphs)


def _experts(config: RunConfig) -> str:
    options = config.options()
    reason = dynamic_experts(options)
    if reason:
        is_kept_out = _captures_parts(config.graphs) or _may_be_left_out(config.graphs)
        return f"eager, because {reason}" if is_kept_out else f"cannot be in graphs, because {reason}"
    if config.graphs.modules and "moe" not in config.graphs.modules:
        return "eager beside the graphs; their shapes are static, so that module moe or whole layers take them in"
    if drops_and_pads(options):
        return "in graphs, each padded to its capacity; tokens beyond it are dropped"
    only = " (on the CPU only: on a GPU that needs --bf16)" if needs_half_precision(options) else ""
    dropped = "no token" if config.moe.moe_expert_capacity_factor is None else "what is beyond the capacity"
    return f"in graphs, and {dropped} is dropped: the rows of each are known on the device alone{only}"


def _captures_parts(graphs: CudaGraphConfig) -> bool:
    return bool(graphs.modules) and graphs.impl is not CudaGraphImpl.full_iteration


def _may_be_left_out(graphs: CudaGraphConfig) -> bool:
    return graphs.policy is CapturePolicy.auto and graphs.impl is not CudaGraphImpl.transformer_engine


def _left_out(config: RunConfig) -> str:
    """Return what keeps layers with experts out of graphs that would take them in; empty if nothing does."""
    has_experts = config.moe.num_experts is not None and layers_with(config, "moe") > 0
    return dynamic_experts(config.options()) if has_experts and not _captures_parts(config.graphs) else ""


def _is_switched_off(graphs: CudaGraphConfig) -> bool:
    return graphs.impl is not CudaGraphImpl.none and graphs.policy is CapturePolicy.off


def _parts(config: RunConfig) -> str:
    if not _captures_parts(config.graphs):
        num_left_out = layers_with(config, "moe") if _left_out(config) else 0
        rest = ", those with experts left out" if num_left_out else ""
        return f"each of {_times(config.model.num_layers - num_left_out, 'whole layer')}{rest}"
    counts = {module: layers_with(config, module) for module in config.graphs.modules}
    found = [f"{module} in {_times(count, 'layer')}" for module, count in counts.items() if count]
    together = ", parts that follow each other in one" if len(found) > 1 else ""
    return ", ".join(found) + together if found else "nothing"


def _optimizer(config: RunConfig) -> str:
    graphs = config.graphs
    is_whole = graphs.impl is CudaGraphImpl.full_iteration
    if not graphs.optimizer or graphs.policy is CapturePolicy.off or (is_whole and _left_out(config)):
        return "eager"
    where = "in the graph of the training step" if is_whole else "the step as a graph of its own"
    return f"{where}, after {_times(graphs.warmup_steps, 'eager step')}"


def _validation(config: RunConfig) -> str:
    if config.training.eval_iters == 0:
        return "none"
    is_whole = config.graphs.impl is CudaGraphImpl.full_iteration and not _is_switched_off(config.graphs)
    return "the forward as one graph" if is_whole and not _left_out(config) else "eager"


def _inference(config: RunConfig) -> str:
    scope, options = config.graphs.inference_scope, config.inference
    if scope is InferenceCudaGraphScope.none or _is_switched_off(config.graphs):
        return "eager"
    extent = "of the whole model" if scope is InferenceCudaGraphScope.block else "a layer"
    number = config.num_inference_graphs
    counts = "an automatic number of token counts" if number == -1 else f"up to {_times(number or 0, 'token count')}"
    spacing = options.inference_dynamic_batching_cuda_graph_sizing_distribution
    prefill = "decode only"
    if options.use_cuda_graphs_for_non_decode_steps:
        ceiling = options.inference_cuda_graph_max_tokens
        prefill = "prefill as well" if options.inference_cuda_graph_all_prefills else f"prefill up to {ceiling} tokens"
    return f"one graph {extent} for {counts} ({spacing}), {prefill}, in graphstep generate and serve"


def _times(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
