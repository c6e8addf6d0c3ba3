"""Mixture of experts. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.choices import (
    FlexBackend,
    LoadBalancing,
    RouterDtype,
    ScoreFunction,
    TokenDispatcher,
    TokenDropPolicy,
)
from graphstep.config.layer_freq import as_layer_freq
from graphstep.config.section import Section
from graphstep.config.validation import settle


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(Section):
    """Experts, router, token dispatcher, and what makes their shapes static.

    Raises:
        ConfigError: values out of range or that contradict each other; all problems at once.
    """

    num_experts: int | None = None
    """Experts of a layer; None: no experts."""
    moe_layer_freq: int | tuple[int, ...] = 1
    """Every n-th layer has experts, or one 0 or 1 a layer."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert. None: that of the MLP."""
    moe_router_topk: int = 2
    """Experts a token goes to."""
    moe_router_load_balancing_type: LoadBalancing = "aux_loss"
    """How the load is balanced."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the balancing loss."""
    moe_z_loss_coeff: float | None = None
    """Weight of the loss on the size of router logits; None: none."""
    moe_router_pre_softmax: bool = False
    """Softmax before the experts are chosen instead of after."""
    moe_router_score_function: ScoreFunction = "softmax"
    """Turns router logits into scores."""
    moe_router_num_groups: int | None = None
    """Groups of neighbouring experts of which a token chooses some first; None: no groups."""
    moe_router_group_topk: int | None = None
    """Groups a token chooses; its experts are in them (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2)."""
    moe_router_topk_scaling_factor: float | None = None
    """What the weights of the chosen experts are multiplied by; None: 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance with a bias an expert instead of a loss."""
    moe_router_bias_update_rate: float = 1e-3
    """How far the bias of an expert moves in a step."""
    moe_router_dtype: RouterDtype | None = None
    """Number format of the router; None: that of the model."""
    moe_router_padding_for_quantization: bool = False
    """Pad the tokens of an expert to what fp8 and fp4 kernels need."""
    moe_input_jitter_eps: float | None = None
    """Noise on the input of the router; None: none."""
    moe_expert_capacity_factor: float | None = None
    """Tokens of an expert relative to a balanced load before tokens are dropped. None or negative: none is dropped."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert to its capacity: static shapes."""
    moe_token_drop_policy: TokenDropPolicy = "probs"
    """Which tokens are dropped."""
    moe_pad_experts_for_cuda_graph_inference: bool = False
    """In inference, while a graph is in use: pad, with a capacity that drops nothing."""
    moe_token_dispatcher_type: TokenDispatcher = "allgather"
    """How tokens get to their experts."""
    moe_flex_dispatcher_backend: FlexBackend = "deepep"
    """What the ``flex`` dispatcher runs on."""
    moe_grouped_gemm: bool = False
    """All experts in one matrix multiplication."""
    moe_use_grouped_tensor: bool = False
    """Weights of all experts in one tensor."""
    use_transformer_engine_op_fuser: bool = False
    """Fuse the operations of an MLP."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the shared expert; None: there is none."""
    moe_shared_expert_gate: bool = False
    """Weight what the shared expert gives with a sigmoid gate of its own."""
    moe_shared_expert_overlap: bool = False
    """Run the shared expert beside the exchange of tokens; it is outside of the router's graph then."""
    moe_latent_size: int | None = None
    """Width of compressed tokens that are exchanged; None: not compressed."""
    moe_permute_fusion: bool = False
    """Reorder tokens in one kernel."""
    moe_expert_rank_capacity_factor: float | None = None
    """Static budget of tokens of an expert rank relative to a balanced load; None: dynamic."""
    moe_paged_stash: bool = False
    """Keep the saved activations of the experts in pages."""
    moe_paged_stash_page_size: int = 64
    """Tokens of a page."""
    moe_paged_stash_buffer_size_factor_cuda: float = 1.10
    """Size of the stash on the device: positive times the average peak, negative times the measured peak."""
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0
    """Size of the stash in pinned host memory, likewise; 0: none."""
    moe_hybridep_pad_uneven_dispatch_inputs: bool = False
    """Pad to the largest input of the group, which is read back to the host: cannot be captured."""
    moe_ncclep_zero_copy: bool = False
    """Exchange tokens through persistent symmetric buffers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_layer_freq", as_layer_freq(self.moe_layer_freq))
        settle(self)
        factor = self.moe_expert_capacity_factor
        if factor is not None and factor < 0:
            object.__setattr__(self, "moe_expert_capacity_factor", None)

    @property
    def pads_experts(self) -> bool:
        """True if every expert takes a fixed number of tokens: padded up to its capacity, and dropped beyond it."""
        return self.moe_expert_capacity_factor is not None and self.moe_pad_expert_input_to_capacity
