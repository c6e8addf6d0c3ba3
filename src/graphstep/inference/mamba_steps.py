"""A Mamba layer over the tokens of a step: decode requests one token each, prompts one after the other.

Shapes: T tokens, H hidden; rows of the states are slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphstep.errors import CaptureError
from graphstep.inference.metadata import StepTensors
from graphstep.inference.step import Step
from graphstep.models.mamba import Mamba2


def mix_step(
    mixer: Mamba2, x_TH: Tensor, states: tuple[Tensor, Tensor], tensors: StepTensors, step: Step | None
) -> Tensor:
    """The update of the residual stream [T, H]; the states of the step's requests go on. Zero for padding tokens.

    Args:
        mixer: of the layer.
        x_TH: normalised hidden states.
        states: of all slots, see `InferenceCache.states`.
        tensors: of the step.
        step: the lengths of its prompts; ``None``: there are none.

    Raises:
        CaptureError: a graph for prompts, whose lengths would be those of its capture.
    """
    bucket = tensors.bucket
    if step is None and not bucket.is_decode_only:
        raise CaptureError(
            "the prompts of a model with recurrent states differ in length from step to step",
            where=str(bucket),
            fix="make graphs for decode steps only (--decode-only-cuda-graphs)",
        )
    num_decode = bucket.decode if step is None else step.shape.decode
    updates = [_decode(mixer, x_TH[:num_decode], states, tensors)] if num_decode else []
    row = num_decode
    if step is not None:
        for index in range(num_decode, len(step.requests)):
            length, slot = step.lengths[index], step.state_slots[index]
            own = states[0][slot : slot + 1], states[1][slot : slot + 1]
            advance = mixer.forward_with_state if step.starts[index] == 0 else mixer.forward_from_state
            updates.append(advance(x_TH[None, row : row + length], *own)[0])
            row += length
    if row < x_TH.shape[0]:
        updates.append(x_TH.new_zeros(x_TH.shape[0] - row, x_TH.shape[1]))
    return updates[0] if len(updates) == 1 else torch.cat(updates)


def _decode(mixer: Mamba2, x_RH: Tensor, states: tuple[Tensor, Tensor], tensors: StepTensors) -> Tensor:
    slots = tensors.state_slots[: x_RH.shape[0]]
    conv, ssm = (state.index_select(0, slots) for state in states)
    update_RH: Tensor = mixer.step(x_RH, conv, ssm)
    for state, new in zip(states, (conv, ssm), strict=True):
        state.index_copy_(0, slots, new)
    return update_RH
