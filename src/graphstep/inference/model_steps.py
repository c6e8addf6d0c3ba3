"""The forward of a model over the tokens of a step, from the parts of its modules; the training forward is not used.

Shapes: T tokens, R requests, H hidden, V vocabulary, N query heads, G query groups, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from graphstep.errors import ConfigError, Problem
from graphstep.inference.attention import AttentionKernels
from graphstep.inference.cache import InferenceCache
from graphstep.inference.dropless import experts_problem, run_experts
from graphstep.inference.fusions import Fusions, has_hooks
from graphstep.inference.mamba_steps import mix_step
from graphstep.inference.metadata import StepTensors
from graphstep.inference.step import Step
from graphstep.models import MLP, Attention, Float8Linear, GPTModel
from graphstep.models.mamba import MambaLayer
from graphstep.models.moe import MoEBlock, MoELayer

Rotary = tuple[Tensor, ...]
"""Cosines and sines [T, D] of the tokens' positions; empty without rotary embedding."""
Residual = tuple[Tensor, Tensor | None]
"""The residual stream [T, H], and an update [T, H] that is still to be added: with the next normalisation."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer of a step is given beside its hidden states."""

    tensors: StepTensors
    rotary: Rotary
    step: Step | None
    """What the host knows of the step; ``None`` where a graph is made, which has to serve others too."""

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the longest sequence, where the host may use that."""
        return None if self.step is None else max(map(len, self.step.block_tables), default=1)


_Update = Callable[[Tensor, StepContext], Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """One update of the residual stream."""

    norm: nn.Module
    update: _Update
    """From the normalised stream."""


class ModelSteps:
    """Front, layers and head of a model, each a function of tensors at fixed addresses.

    Dropout does not take place, whatever mode the model is in; its routers have to be in evaluation mode.

    Args:
        model: is read and never changed.
        cache: of that model.
        kernels: how to attend.
        fusions: how to do what stands around the products.

    Raises:
        ConfigError: layers that cannot be run step by step; all problems at once.
    """

    def __init__(self, model: GPTModel, cache: InferenceCache, kernels: AttentionKernels, fusions: Fusions) -> None:
        self.model = model
        self.cache = cache
        self.kernels = kernels
        self.fusions = fusions
        self._num_attentions = self._num_mixers = 0
        problems = [
            Problem(
                code="inference-fp8",
                what=f"{name} multiplies in fp8 with scales that every step changes: padding would take part in them",
                where=name,
                fix="build the model without fp8; its weights are the same",
            )
            for name, module in model.named_modules()
            if isinstance(module, Float8Linear)
        ]
        self._layers = [self._parts(layer, f"layers.{number}", problems) for number, layer in enumerate(model.layers)]
        if problems:
            raise ConfigError(problems)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def has_states(self) -> bool:
        """Are there layers with recurrent states? Their prompts are computed outside of graphs."""
        return self._num_mixers > 0

    def forward(self, tensors: StepTensors, step: Step | None) -> Tensor:
        """Logits [R, V] after each request's last token in the step.

        Args:
            tensors: of the bucket that is computed.
            step: ``None`` inside a capture.
        """
        hidden_TH, rotary = self.front(tensors)
        context = StepContext(tensors, rotary, step)
        residual: Residual = (hidden_TH, None)
        for number in range(self.num_layers):
            residual = self.layer(number, residual, context)
        return self.head(residual, tensors)

    def front(self, tensors: StepTensors) -> tuple[Tensor, Rotary]:
        """Embed the tokens, and look up the angles of their positions."""
        embedding, rotary = self.model.embedding, self.model.rotary
        table = None if rotary is None else rotary.table
        hidden_TH, angles = self.fusions.look_up(tensors, embedding.weight, table)
        if embedding.position_weight is not None:
            hidden_TH = hidden_TH + functional.embedding(tensors.positions, embedding.position_weight)
        return hidden_TH, angles

    def layer(self, number: int, residual: Residual, context: StepContext) -> Residual:
        """Run one layer; its keys, values and states go to the cache."""
        for part in self._layers[number]:
            hidden_TH, normalised_TH = self.fusions.add_and_normalise(*residual, part.norm)
            residual = hidden_TH, part.update(normalised_TH, context)
        return residual

    def head(self, residual: Residual, tensors: StepTensors) -> Tensor:
        """Logits of each request's last token."""
        hidden_TH, update_TH = residual
        if update_TH is not None:
            hidden_TH = hidden_TH + update_TH
        bucket = tensors.bucket
        if not bucket.is_decode_only or bucket.tokens != bucket.requests:
            hidden_TH = hidden_TH.index_select(0, tensors.last_tokens)
        logits_RV: Tensor = self.model.head(hidden_TH, self.model.embedding.weight)
        return logits_RV

    def _parts(self, layer: nn.Module, name: str, problems: list[Problem]) -> tuple[_Part, ...]:
        """The residual updates of a layer, in order."""
        parts: list[_Part] = []
        attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
        if isinstance(attention, Attention):
            parts.append(_Part(layer.get_submodule("attention_norm"), self._attention(attention)))
        if isinstance(mlp, MLP):
            parts.append(_Part(layer.get_submodule("mlp_norm"), self._mlp(mlp)))
        if isinstance(layer, MoELayer):
            problem = experts_problem(layer.moe, name)
            if problem is not None:
                problems.append(problem)
            parts.append(_Part(layer.moe_norm, _experts(layer.moe)))
        if isinstance(layer, MambaLayer):
            parts.append(_Part(layer.mixer_norm, self._mixer(layer)))
        if not parts:
            problems.append(
                Problem(
                    code="inference-layer",
                    what=f"a layer of type {type(layer).__name__} cannot be run step by step",
                    where=name,
                    fix="use the layers of graphstep.models",
                )
            )
        return tuple(parts)

    def _attention(self, attention: Attention) -> _Update:
        index = self._num_attentions
        self._num_attentions += 1
        heads, groups = attention.num_heads, attention.num_groups

        def attend(x_TH: Tensor, context: StepContext) -> Tensor:
            pages, tensors = self.cache.pages[index], context.tensors
            qkv_TND = attention.qkv(x_TH).unflatten(-1, (heads + 2 * groups, attention.channels))
            qkv_TND = attention.normalise_heads(qkv_TND)
            q_TND = self.kernels.rotate_and_write(
                qkv_TND, context.rotary, attention.rotary_channels, pages, tensors.slots
            )
            y_TND = self.kernels.attend(q_TND, pages, tensors, context.num_blocks)
            update_TH: Tensor = attention.out(y_TND.flatten(1))
            return update_TH

        return attend

    def _mixer(self, layer: MambaLayer) -> _Update:
        index = self._num_mixers
        self._num_mixers += 1

        def mix(x_TH: Tensor, context: StepContext) -> Tensor:
            return mix_step(layer.mixer, x_TH, self.cache.states[index], context.tensors, context.step)

        return mix

    def _mlp(self, mlp: MLP) -> _Update:
        def transform(x_TH: Tensor, _context: StepContext) -> Tensor:
            if mlp.gated and type(mlp) is MLP and not has_hooks(mlp):
                x_TH = mlp.down(self.fusions.gate(mlp.up(x_TH)))
            else:
                x_TH = mlp(x_TH)
            return x_TH

        return transform


def _experts(block: MoEBlock) -> _Update:
    return lambda x_TH, context: run_experts(block, x_TH, is_captured=context.step is None)
