from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphstep.engine import CudaEngine, Engine, TapeEngine
from graphstep.inference.requests import NOT_FINITE, DrawNeeds, draw_key
from graphstep.inference.sampling import Drawn, DrawSettings, _best, _choose, sample, uniform, unpack

RANDOM = DrawNeeds(is_random=True)
FILTERED = DrawNeeds(is_random=True, is_filtered=True)
ALL = DrawNeeds(is_random=True, is_filtered=True, has_logprobs=True, num_top=3)


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = CudaEngine() if request.param == "cuda" else TapeEngine()
    yield engine
    engine.close()


def settings(
    rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, position: int = 0
) -> DrawSettings:
    """One setting for all rows, whose seeds count up."""
    return DrawSettings(
        torch.tensor([draw_key(seed + row) for row in range(rows)]),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), position, dtype=torch.int32),
    )


def rows(settings: DrawSettings, chosen: list[int]) -> DrawSettings:
    return DrawSettings(*(value[chosen] for value in settings))


def frequencies(logits: Tensor, *, needs: DrawNeeds = FILTERED, num: int = 20_000, **others: float) -> Tensor:
    tokens = sample(logits.expand(num, -1), settings(num, **others), needs).tokens  # type: ignore[arg-type]
    return tokens.bincount(minlength=logits.shape[-1]) / num


def test_temperature_0_takes_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 1.0, 1.0, 5.0]])
    for needs in (DrawNeeds(), ALL):
        assert sample(logits, settings(2, temperature=0), needs).tokens.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_as_frequent_as_they_are_likely(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -torch.inf, 0.5])
    expected = (logits / temperature).softmax(-1)
    found = frequencies(logits, needs=RANDOM, temperature=temperature)
    # Four standard deviations of 20,000 draws.
    assert (found - expected).abs().max() < 4 * (0.25 / 20_000) ** 0.5
    assert found[4] == 0


def test_positions_are_independent_of_each_other() -> None:
    logits = torch.zeros(20_000, 4)
    now = sample(logits, settings(20_000), RANDOM).tokens
    then = sample(logits, settings(20_000, position=1), RANDOM).tokens
    pairs = (now * 4 + then).bincount(minlength=16) / 20_000
    assert (pairs - 1 / 16).abs().max() < 4 * (1 / 16 / 20_000) ** 0.5


def test_top_k_keeps_the_first_of_equal_ones() -> None:
    found = frequencies(torch.tensor([1.0, 2.0, 1.0, 1.0]), top_k=2)
    expected = torch.tensor([1.0, 2.0]).softmax(-1)
    assert torch.allclose(found[:2], expected, atol=0.015)
    assert found[2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.45, [0]), (0.55, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2, 3]), (1e-30, [0])],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: list[int]) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found = frequencies(probabilities.flip(0).log(), top_p=top_p).flip(0)
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert torch.allclose(found, expected, atol=0.015)
    assert found[expected == 0].sum() == 0


def test_tokens_without_weight_are_never_chosen() -> None:
    weights = torch.tensor([[0, 2, 0, 1, 0]]).expand(5, -1)
    chosen = _choose(weights, torch.tensor([0.0, 0.6, 2 / 3, 0.99, 1 - 2**-53], dtype=torch.float64))
    assert chosen.tolist() == [1, 1, 3, 3, 3]


def test_top_p_is_a_part_of_what_top_k_leaves() -> None:
    # Half and half are left, and the first alone reaches 0.5 of it, while it has only 0.4 of all.
    found = frequencies(torch.tensor([0.4, 0.4, 0.2]).log(), top_k=2, top_p=0.49)
    assert found.tolist() == [1, 0, 0]


def test_top_k_larger_than_the_vocabulary() -> None:
    assert (frequencies(torch.zeros(3), top_k=2**31 - 1) > 0.3).all()


logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=5, max_size=5)
row_settings = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 5.0]), st.sampled_from([1.0, 0.9, 0.2]), st.integers(0, 6), st.integers(0, 2**40)
)


@given(st.lists(st.tuples(logit_rows, row_settings), min_size=1, max_size=8), st.randoms())
def test_tokens_do_not_depend_on_the_batch(drawn: list[tuple[list[float], tuple[float, ...]]], random: object) -> None:
    logits = torch.tensor([row for row, _ in drawn])
    temperatures, top_ps, top_ks, seeds = zip(*(each for _, each in drawn), strict=True)
    chosen = DrawSettings(
        torch.tensor([draw_key(int(seed)) for seed in seeds]),
        torch.tensor(temperatures),
        torch.tensor(top_ps),
        torch.tensor(top_ks, dtype=torch.int32),
        torch.arange(len(drawn)),
    )
    together = sample(logits, chosen, ALL).tokens
    backwards = list(reversed(range(len(drawn))))
    assert sample(logits[backwards], rows(chosen, backwards), FILTERED).tokens.tolist() == together[backwards].tolist()
    for row, (temperature, top_p, top_k, _) in enumerate(t for _, t in drawn):
        needs = DrawNeeds(is_random=temperature > 0, is_filtered=top_p < 1 or top_k > 0)
        alone = sample(logits[row : row + 1], rows(chosen, [row]), needs).tokens
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_of_long_rows(dtype: torch.dtype) -> None:
    """Long rows are looked through in parts; of equal ones the first is taken nevertheless, and NaN is seen."""
    logits = torch.randn(5, 2**13, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, [40, 7000, 30]] = 9.0
    logits[2] = 1.0
    logits[3, 5000] = torch.nan
    expected = logits.max(dim=-1)
    best, places = _best(logits)
    assert best[[0, 1, 2, 4]].equal(expected.values[[0, 1, 2, 4]])
    assert best[3].isnan()
    assert places.tolist() == expected.indices.tolist()
    assert places[1:3].tolist() == [30, 0]
    wide = torch.cat([logits, logits + 100], dim=1)[:, : 2**13]  # as where columns pad the vocabulary
    assert _best(wide)[1].equal(places)


@pytest.mark.parametrize("needs", [RANDOM, FILTERED, ALL])
def test_tokens_do_not_depend_on_how_many_rows_are_drawn_together(
    needs: DrawNeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(7, 20)
    chosen = settings(7, top_k=9, top_p=0.8, temperature=2.0)
    together = sample(logits, chosen, needs)
    monkeypatch.setattr("graphstep.inference.sampling._MOST_AT_ONCE", 45)
    assert sample(logits, chosen, needs).packed().equal(together.packed())


def test_rows_that_are_not_finite_are_marked_and_leave_others_alone() -> None:
    logits = torch.randn(5, 7)
    expected = sample(logits, settings(5), ALL)
    logits[1, 3] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    drawn = sample(logits, settings(5), ALL)
    assert drawn.tokens[1:4].tolist() == [NOT_FINITE] * 3
    assert drawn.tokens[[0, 4]].equal(expected.tokens[[0, 4]])
    assert drawn.logprobs is not None
    assert expected.logprobs is not None
    assert drawn.logprobs[[0, 4]].equal(expected.logprobs[[0, 4]])


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.randn(4, 9, dtype=torch.bfloat16)
    drawn = sample(logits, settings(4, temperature=3.0, top_k=5), ALL)
    expected = logits.float().log_softmax(-1)
    assert drawn.logprobs is not None
    assert drawn.top_logprobs is not None
    torch.testing.assert_close(drawn.logprobs, expected.gather(1, drawn.tokens[:, None])[:, 0])
    torch.testing.assert_close(drawn.top_logprobs, expected.topk(3).values)


def test_large_vocabularies_add_up() -> None:
    tokens = sample(torch.zeros(1, 2**18).expand(64, -1), settings(64), RANDOM).tokens
    assert tokens.min() >= 0
    assert tokens.unique().numel() > 60
    assert 0.3 < tokens.double().mean() / 2**18 < 0.7


def test_uniform_numbers() -> None:
    """The numbers of SplitMix64 with start 0, which are known."""
    found = uniform(torch.zeros(4, dtype=torch.int64), torch.tensor([1, 2, 3, 4]))
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert found.tolist() == [(number >> 11) * 2.0**-53 for number in known]
    many = uniform(torch.tensor([draw_key(seed) for seed in range(1000)]), torch.full((1000,), 7))
    assert 0 <= many.min() < 0.01
    assert 0.99 < many.max() < 1
    assert abs(many.mean() - 0.5) < 4 * (1 / 12 / 1000) ** 0.5


@pytest.mark.parametrize("needs", [DrawNeeds(), RANDOM, DrawNeeds(has_logprobs=True), ALL])
def test_the_host_reads_all_at_once(needs: DrawNeeds) -> None:
    logits = torch.randn(4, 9)
    drawn = sample(logits, settings(4), needs)
    tokens, logprobs, top = unpack(drawn.packed()[:3].numpy(), needs)
    assert tokens == drawn.tokens[:3].tolist()
    assert logprobs == (None if drawn.logprobs is None else drawn.logprobs[:3].tolist())
    if drawn.top_tokens is None or drawn.top_logprobs is None:
        assert top is None
    else:
        assert top is not None
        assert [[token for token, _ in row] for row in top] == drawn.top_tokens[:3].tolist()
        assert [[logprob for _, logprob in row] for row in top] == drawn.top_logprobs[:3].tolist()


@pytest.mark.parametrize("needs", [DrawNeeds(), RANDOM, FILTERED, ALL])
def test_a_graph_draws_the_same(engine: Engine, needs: DrawNeeds) -> None:
    device = "cuda" if isinstance(engine, CudaEngine) else "cpu"
    logits = torch.randn(6, 50, device=device)
    chosen = DrawSettings(*(value.to(device) for value in settings(6, top_k=20, top_p=0.9)))
    recording = engine.capture(lambda: sample(logits, chosen, needs).packed())
    for position in range(5):
        logits.copy_(torch.randn(6, 50))
        chosen.positions.fill_(position)
        chosen.temperatures.copy_(torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 9.0]))
        recording.replay()
        assert recording.result.equal(sample(logits, chosen, needs).packed())


def test_drawn_without_log_probabilities_is_one_column() -> None:
    assert Drawn(torch.tensor([3, 4]), None, None, None).packed().tolist() == [[3], [4]]
