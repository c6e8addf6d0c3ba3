from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphstep.models import Segment, SegmentedModule


class Chain(SegmentedModule):
    """Doubles, then splits in two, then joins with the context."""

    def __init__(self, *, join: bool = True) -> None:
        super().__init__()
        self.join = join

    def segments(self) -> tuple[Segment, ...]:
        first = Segment("", "double", lambda hidden, shift: 2 * hidden, ())
        second = Segment("moe_router", "split", lambda hidden, shift: (hidden + shift, hidden - shift), ())
        third = Segment("mlp", "join", lambda left, right, shift: left * right + shift, ())
        return (first, second, third) if self.join else (first, second)


def test_segments_run_one_after_another_and_may_carry_several_tensors() -> None:
    hidden, shift = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    torch.testing.assert_close(Chain()(hidden, shift), (4 * hidden**2 - 9) + 3)


def test_last_segment_returns_one_tensor() -> None:
    with pytest.raises(TypeError, match="must return one tensor, got 2"):
        Chain(join=False)(torch.ones(2), torch.ones(()))


def test_segments_have_to_be_listed() -> None:
    with pytest.raises(NotImplementedError, match="SegmentedModule has to list its segments"):
        SegmentedModule()(torch.ones(1))


def test_a_module_hook_sees_the_whole_layer() -> None:
    seen: list[Tensor] = []
    layer: nn.Module = Chain()
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    result = layer(torch.ones(2), torch.ones(()))
    assert seen == [result]
