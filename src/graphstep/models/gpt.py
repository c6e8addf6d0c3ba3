"""The reference model: embedding, a stack of segmented layers, output head.

Shapes: B batch, S sequence, H hidden, D channels of a head, V vocabulary (padded).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphstep.config.layers import LayersConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.errors import ConfigError, Problem, UserInputError
from graphstep.models.auxiliary_losses import GradientScale, mark_loss
from graphstep.models.delayed_scaling import DelayedScaling
from graphstep.models.embedding import Embedding
from graphstep.models.head import OutputHead, token_cross_entropy
from graphstep.models.initialization import WeightInitializer, initialize_weights
from graphstep.models.layers import build_layers
from graphstep.models.moe import routers
from graphstep.models.rotary import RotaryTables


class GPTModel(nn.Module):
    """A decoder-only transformer in the manner of GPT-2 or Llama, as ``config`` says; with experts, or as a hybrid of
    Mamba, attention, MLP and expert layers, as ``moe`` and ``layers`` say.

    The forward suits CUDA graphs: it reads nothing back to the host, makes no tensor from Python values, changes no
    Python state, and its shapes follow from the shape of the tokens. It runs on the meta device as well.

    Args:
        config: sizes and choices; ``vocab_size`` must be set (padding it beyond the tokenizer's size is harmless).
        moe: experts, router, token dispatcher; None: no experts.
        layers: ``hybrid_layer_pattern`` says which layers there are; attention and MLP or experts in each if None.
        mamba: sizes of Mamba layers; those of Megatron-LM if None.
        generator: source of the weights, so that they depend on its seed only; the CPU's default generator if None.
            A CPU generator gives equal weights on every device, and in bfloat16 those of float32, rounded.
        fp8: recipe of the linear layers of attention and MLP, not of experts and Mamba layers, if they are to multiply
            in fp8. Each step has to be marked then, see :func:`graphstep.models.mark_first_microbatch`; sizes are
            multiples of 16.
        device: where the parameters live; PyTorch's default device if None. Nothing is drawn for ``meta``.
        dtype: of all parameters; PyTorch's default dtype if None.

    Raises:
        ConfigError: the vocabulary size is not known, or the configuration names something that does not exist or
            does not fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        moe: MoEConfig | None = None,
        layers: LayersConfig | None = None,
        mamba: MambaConfig | None = None,
        generator: torch.Generator | None = None,
        fp8: DelayedScaling | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not config.vocab_size:
            raise ConfigError(
                Problem(
                    code="model-vocab-size",
                    what="the vocabulary size of the model is not set",
                    where="ModelConfig.vocab_size",
                    fix="set it to the size of the tokenizer, rounded up as you like",
                )
            )
        self.config = config
        self.embedding = Embedding(config, device=device, dtype=dtype)
        self.rotary = RotaryTables(config, device=device) if config.position_embedding_type == "rope" else None
        scale = GradientScale(device=device)
        self.layers = nn.ModuleList(
            build_layers(config, moe=moe, layers=layers, mamba=mamba, scale=scale, fp8=fp8, device=device, dtype=dtype)
        )
        self.auxiliary_scale = scale if routers(self.layers) else None
        """What the losses of routers take their gradient from; None: there are no routers."""
        self.head = OutputHead(config, device=device, dtype=dtype)
        initialize_weights(
            self,
            WeightInitializer(std=config.init_method_std, num_layers=config.num_layers, generator=generator),
        )

    def num_parameters(self) -> int:
        """Count the trainable numbers; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens_BS: int64 [B, S], S at most ``max_position_embeddings`` unless the model has no positions.
            labels_BS: int64 [B, S], the token after each one, each below the true vocabulary size.

        Returns:
            Without labels, logits [B, S, V] in the dtype of the parameters, V the padded size. With labels, the mean
            cross entropy over all tokens: a float32 scalar in nats. The losses of routers are not in its value, and
            their gradients are in its gradient, scaled as this loss is.

        Raises:
            UserInputError: the sequence is longer than the model has positions for.
        """
        self._check_length(tokens_BS.shape[1])
        hidden_BSH = self.embedding(tokens_BS)
        # Cast once here, for all layers; where autocast gives the layers another dtype, they cast again.
        context = () if self.rotary is None else self.rotary(tokens_BS.shape[1], hidden_BSH.dtype)
        for layer in self.layers:
            hidden_BSH = layer(hidden_BSH, *context)
        logits_BSV: Tensor = self.head(hidden_BSH, self.embedding.weight)
        if labels_BS is None:
            return logits_BSV
        loss = token_cross_entropy(logits_BSV, labels_BS)
        return loss if self.auxiliary_scale is None else mark_loss(loss, self.auxiliary_scale)

    def _check_length(self, num_positions: int) -> None:
        limit = self.config.max_position_embeddings
        if num_positions > limit and self.config.position_embedding_type != "none":
            raise UserInputError(
                Problem(
                    code="model-sequence-too-long",
                    what=f"the sequence has {num_positions} tokens, the model has positions for {limit}",
                    where="GPTModel, argument tokens_BS [B, S]",
                    fix=f"shorten the sequence, or build the model with --max-position-embeddings {num_positions}",
                )
            )
