from __future__ import annotations

import math

import pytest
import torch

from graphstep.errors import ConfigError
from graphstep.verification.compare import Tolerance, Tolerances, difference, same_bits

EXACT = Tolerance()


def test_equal_bits_are_no_difference() -> None:
    values = torch.tensor([0.0, -0.0, math.nan, math.inf])
    assert difference("t", values, values.clone(), EXACT) is None
    assert same_bits(values, values.clone())


def test_the_largest_error_and_its_place() -> None:
    eager = torch.zeros(2, 3)
    replayed = eager.clone()
    replayed[0, 1], replayed[1, 2] = 0.25, -2.0
    found = difference("t", eager, replayed, EXACT)
    assert found is not None
    assert (found.max_error, found.index, found.num_different, found.num_elements) == (2.0, (1, 2), 2, 6)
    assert (found.eager, found.replayed) == ("0", "-2")
    assert str(found) == "t[1, 2]: eager has 0, the replay -2, 2 of 6 entries differ"


@pytest.mark.parametrize(
    ("eager", "replayed", "error"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), 0.0),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]), math.inf),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), math.inf),
        (torch.tensor([3, 4]), torch.tensor([3, 6]), 2.0),
        (torch.tensor([True, True]), torch.tensor([True, False]), 1.0),
        (torch.tensor([1j, 2j]), torch.tensor([1j, 5j]), 3.0),
        (torch.ones(2, dtype=torch.bfloat16), torch.tensor([1, 1.5], dtype=torch.bfloat16), 0.5),
    ],
)
def test_differences_of_all_kinds(eager: torch.Tensor, replayed: torch.Tensor, error: float) -> None:
    found = difference("t", eager, replayed, EXACT)
    assert found is not None
    assert (found.max_error, found.index, found.num_different) == (error, (1,), 1)


def test_bits_of_views_and_conjugates_are_those_of_their_values() -> None:
    values = torch.randn(4, 6, dtype=torch.complex64)
    assert difference("t", values.t().conj(), values.conj().t().contiguous().clone(), EXACT) is None


def test_other_shapes_and_missing_tensors() -> None:
    found = difference("t", torch.ones(2, 3), torch.ones(3, 2), EXACT)
    assert found is not None
    assert str(found) == "t: eager has (2, 3) float32, the replay (3, 2) float32"
    missing = difference("t", torch.ones(2), None, EXACT)
    assert missing is not None
    assert (missing.replayed, missing.max_error) == ("none", math.inf)
    assert missing.to_json()["max_error"] is None
    assert difference("t", None, None, EXACT) is None


def test_a_tolerance_counts_for_each_entry() -> None:
    eager, replayed = torch.tensor([1.0, 100.0]), torch.tensor([1.0, 100.5])
    within = difference("t", eager, replayed, Tolerance(rtol=1e-2))
    beyond = difference("t", eager, torch.tensor([1.5, 100.0]), Tolerance(rtol=1e-2))
    assert within is not None
    assert beyond is not None
    assert (within.is_within, beyond.is_within) == (True, False)
    nan = difference("t", eager, torch.tensor([1.0, math.nan]), Tolerance(rtol=1e9))
    assert nan is not None
    assert not nan.is_within


def test_the_tolerance_of_a_module_is_that_of_its_pattern() -> None:
    own = Tolerance(atol=0.5)
    tolerances = Tolerances(EXACT, {"layers.*.experts": own})
    assert tolerances.of("layers.3.experts") is tolerances.of("layers.12.experts.up") is own
    assert tolerances.of("layers.3") is tolerances.of("head") is EXACT
    assert str(tolerances) == "layers.*.experts: rtol 0, atol 0.5"


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf])
def test_a_tolerance_is_a_number(number: float) -> None:
    with pytest.raises(ConfigError, match="finite number that is not negative"):
        Tolerance(atol=number)
