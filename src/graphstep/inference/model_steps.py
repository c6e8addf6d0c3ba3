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
from graphstep.inference.mamba_steps import mix_step
from graphstep.inference.metadata import StepTensors
from graphstep.inference.step import Step
from graphstep.models import MLP, Attention, Float8Linear, GPTModel
from graphstep.models.mamba import MambaLayer
from graphstep.models.moe import MoEBlock, MoELayer

Rotary = tuple[Tensor, ...]
"""Cosines and sines [T, D] of the tokens' positions; empty without rotary embedding."""


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


_Part = Callable[[Tensor, StepContext], Tensor]


class ModelSteps:
    """Front, layers and head of a model, each a function of tensors at fixed addresses.

    Dropout does not take place, whatever mode the model is in; its routers have to be in evaluation mode.

    Args:
        model: is read and never changed.
        cache: of that model.
        kernels: how to attend.

    Raises:
        ConfigError: layers that cannot be run step by step; all problems at once.
    """

    def __init__(self, model: GPTModel, cache: InferenceCache, kernels: AttentionKernels) -> None:
        self.model = model
        self.cache = cache
        self.kernels = kernels
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
        for number in range(self.num_layers):
            hidden_TH = self.layer(number, hidden_TH, context)
        return self.head(hidden_TH, tensors)

    def front(self, tensors: StepTensors) -> tuple[Tensor, Rotary]:
        """Embed the tokens, and look up the angles of their positions."""
        embedding, rotary = self.model.embedding, self.model.rotary
        tokens_T = tensors.words.index_select(0, tensors.token_sources)
        hidden_TH = functional.embedding(tokens_T, embedding.weight)
        if embedding.position_weight is not None:
            hidden_TH = hidden_TH + functional.embedding(tensors.positions, embedding.position_weight)
        if rotary is None:
            return hidden_TH, ()
        cos_TD, sin_TD = rotary.table.index_select(1, tensors.positions).to(hidden_TH.dtype).unbind()
        return hidden_TH, (cos_TD, sin_TD)

    def layer(self, number: int, hidden_TH: Tensor, context: StepContext) -> Tensor:
        """Run one layer; its keys, values and states go to the cache."""
        for part in self._layers[number]:
            hidden_TH = part(hidden_TH, context)
        return hidden_TH

    def head(self, hidden_TH: Tensor, tensors: StepTensors) -> Tensor:
        """Logits of each request's last token."""
        last_RH = hidden_TH.index_select(0, tensors.last_tokens)
        logits_RV: Tensor = self.model.head(last_RH, self.model.embedding.weight)
        return logits_RV

    def _parts(self, layer: nn.Module, name: str, problems: list[Problem]) -> tuple[_Part, ...]:
        """The residual updates of a layer, in order."""
        parts: list[_Part] = []
        attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
        if isinstance(attention, Attention):
            parts.append(self._attention(layer.get_submodule("attention_norm"), attention))
        if isinstance(mlp, MLP):
            parts.append(_mlp(layer.get_submodule("mlp_norm"), mlp))
        if isinstance(layer, MoELayer):
            problem = experts_problem(layer.moe, name)
            if problem is not None:
                problems.append(problem)
            parts.append(_experts(layer.moe_norm, layer.moe))
        if isinstance(layer, MambaLayer):
            parts.append(self._mixer(layer))
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

    def _attention(self, norm: nn.Module, attention: Attention) -> _Part:
        index = self._num_attentions
        self._num_attentions += 1
        heads, groups = attention.num_heads, attention.num_groups

        def attend(hidden_TH: Tensor, context: StepContext) -> Tensor:
            pages, tensors = self.cache.pages[index], context.tensors
            qkv_TND = attention.qkv(norm(hidden_TH)).unflatten(-1, (heads + 2 * groups, attention.channels))
            qkv_TND = attention.normalise_heads(qkv_TND)
            q_TND = self.kernels.rotate_and_write(
                qkv_TND, context.rotary, attention.rotary_channels, pages, tensors.slots
            )
            y_TND = self.kernels.attend(q_TND, pages, tensors, context.num_blocks)
            update_TH: Tensor = attention.out(y_TND.flatten(1))
            return hidden_TH + update_TH

        return attend

    def _mixer(self, layer: MambaLayer) -> _Part:
        index = self._num_mixers
        self._num_mixers += 1

        def mix(hidden_TH: Tensor, context: StepContext) -> Tensor:
            states = self.cache.states[index]
            return hidden_TH + mix_step(layer.mixer, layer.mixer_norm(hidden_TH), states, context.tensors, context.step)

        return mix


def _mlp(norm: nn.Module, mlp: MLP) -> _Part:
    def transform(hidden_TH: Tensor, _context: StepContext) -> Tensor:
        update_TH: Tensor = mlp(norm(hidden_TH))
        return hidden_TH + update_TH

    return transform


def _experts(norm: nn.Module, block: MoEBlock) -> _Part:
    def transform(hidden_TH: Tensor, context: StepContext) -> Tensor:
        return hidden_TH + run_experts(block, norm(hidden_TH), is_captured=context.step is None)

    return transform
