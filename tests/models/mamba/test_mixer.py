"""Mixers against a mixer of transformers with the same weights, and against themselves token by token."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType

import pytest
import torch
from tests.models.mamba.small import CONFIG, SIZES, built
from torch import Tensor, nn

from graphstep.config.mamba import MambaConfig
from graphstep.errors import ConfigError
from graphstep.models.mamba import Mamba2, chunked_scan

LENGTHS = (1, 3, 8, 13, 32)


def of_transformers(mixer: Mamba2) -> nn.Module:
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = mamba2.Mamba2Config(
        hidden_size=CONFIG.hidden_size,
        num_heads=mixer.layout.num_heads,
        head_dim=SIZES.mamba_head_dim,
        n_groups=SIZES.mamba_num_groups,
        state_size=SIZES.mamba_state_dim,
        layer_norm_epsilon=mixer.eps,
        num_hidden_layers=1,
        chunk_size=8,
    )
    theirs = mamba2.Mamba2Mixer(config, layer_idx=0).to(mixer.D.dtype)
    theirs.load_state_dict(as_named_by_transformers(dict(mixer.named_parameters())))
    return theirs


def as_named_by_transformers(values: dict[str, Tensor]) -> dict[str, Tensor]:
    values = {name: value.detach() for name, value in values.items()}
    values["conv1d.weight"] = values.pop("conv_weight").flip(0).t()[:, None]
    values["conv1d.bias"] = values.pop("conv_bias")
    values["norm.weight"] = values.pop("norm_weight")
    return values


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk_size", [8, 256])
def test_equals_the_mixer_of_transformers(length: int, chunk_size: int) -> None:
    mixer = built(chunk_size=chunk_size)
    theirs = of_transformers(mixer)
    x = torch.randn(2, length, CONFIG.hidden_size, requires_grad=True)
    y, expected = mixer(x), theirs(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    (expected_grad,) = torch.autograd.grad(expected, x, upstream, retain_graph=True)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4)
    y.backward(upstream)
    expected.backward(upstream)
    grads = as_named_by_transformers({name: p.grad for name, p in mixer.named_parameters()})
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("length", [13, 32])
def test_bfloat16_is_close_to_float32(length: int) -> None:
    rounded, exact = built(chunk_size=8, dtype=torch.bfloat16), built(chunk_size=8)
    exact.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    x = torch.randn(2, length, CONFIG.hidden_size).bfloat16()
    upstream = torch.randn_like(x)
    rounded_y, exact_y = rounded(x), exact(x.float())
    rounded_y.backward(upstream)
    exact_y.backward(upstream.float())
    assert rounded_y.dtype == torch.bfloat16
    assert error(rounded_y, exact_y) < 0.02
    wanted = dict(exact.named_parameters())
    for name, parameter in rounded.named_parameters():
        assert parameter.grad.dtype == torch.bfloat16
        # The gradients of a few numbers, sums that nearly cancel, have the larger errors.
        assert error(parameter.grad, wanted[name].grad) < (0.03 if parameter.numel() > 6 else 0.1), name


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).detach().norm() / wanted.detach().norm())


def test_chunk_size_changes_rounding_only() -> None:
    x = torch.randn(1, 40, CONFIG.hidden_size)
    expected = built(chunk_size=40)(x)
    for chunk_size in (1, 3, 16, 39):
        torch.testing.assert_close(built(chunk_size=chunk_size)(x), expected, rtol=1e-4, atol=1e-5)


def test_later_tokens_change_nothing() -> None:
    mixer = built(chunk_size=8)
    x = torch.randn(1, 20, CONFIG.hidden_size)
    changed = x.clone()
    changed[:, 11:] = torch.randn(1, 9, CONFIG.hidden_size)
    torch.testing.assert_close(mixer(changed)[:, :11], mixer(x)[:, :11])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [0, 1, 2, 7, 16])
def test_decoding_equals_the_forward(prompt: int, dtype: torch.dtype) -> None:
    mixer = built(chunk_size=8, dtype=dtype)
    x = torch.randn(2, 19, CONFIG.hidden_size).to(dtype)
    expected = mixer(x).detach()
    states = mixer.new_states(2)
    addresses = [state.data_ptr() for state in states]
    parts = []
    if prompt:
        for state in states:
            state.fill_(9.0)  # Left from other sequences.
        parts.append(mixer.forward_with_state(x[:, :prompt], *states))
    parts += [mixer.step(x[:, t], *states)[:, None] for t in range(prompt, 19)]
    found = torch.cat(parts, dim=1)
    assert found.dtype == dtype
    assert error(found, expected.float()) < (1e-5 if dtype == torch.float32 else 0.02)
    assert [state.data_ptr() for state in states] == addresses
    assert states[1].dtype == torch.float32


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("parts", [(1, 1, 9), (2, 3, 6), (5, 6), (10, 1)])
@torch.no_grad()
def test_sequences_in_parts_equal_the_forward(parts: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    mixer = built(chunk_size=4, dtype=dtype)
    x = torch.randn(2, 11, 24, dtype=dtype)
    states, whole = mixer.new_states(2), mixer.new_states(2)
    wanted = mixer.forward_with_state(x, *whole)
    found = [mixer.forward_from_state(part, *states) for part in x.split(parts, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=tolerance, rtol=tolerance)
    for state, expected in zip(states, whole, strict=True):
        torch.testing.assert_close(state, expected, atol=tolerance, rtol=tolerance)


def test_autocast() -> None:
    mixer = built(chunk_size=8)
    x = torch.randn(2, 13, CONFIG.hidden_size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mixer(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert error(y, mixer(x)) < 0.03
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mixer.parameters())


def test_compiled_formulas_equal_the_operation() -> None:
    mixer = built(chunk_size=8)
    x = torch.randn(2, 13, CONFIG.hidden_size)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), mixer(x), rtol=1e-4, atol=1e-5)


def test_kernels_of_a_package_are_chosen_when_built(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def combined(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, *, D: Tensor) -> Tensor:
        calls.append(chunk_size)
        return chunked_scan(x, dt, a, b, c, D, chunk_size=chunk_size)

    package = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    package.__dict__["mamba_chunk_scan_combined"] = combined
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", package)
    x = torch.randn(2, 13, CONFIG.hidden_size)
    torch.testing.assert_close(built(chunk_size=8, use_mamba_ssm=True)(x), built(chunk_size=8)(x), rtol=1e-4, atol=1e-5)
    assert calls == [8]


def test_weights_after_to_empty() -> None:
    from graphstep.models import WeightInitializer, initialize_weights

    with torch.device("meta"):
        mixer = Mamba2(CONFIG, SIZES, chunk_size=8)
        assert mixer(torch.empty(2, 13, CONFIG.hidden_size)).shape == (2, 13, CONFIG.hidden_size)
    mixer.to_empty(device="cpu")
    for tensor in (*mixer.parameters(), *mixer.buffers()):
        tensor.detach().fill_(torch.nan)
    initialize_weights(mixer, WeightInitializer(std=0.3, num_layers=1))
    assert torch.equal(mixer.causal, torch.ones(8, 8).tril())
    assert mixer(torch.randn(2, 13, CONFIG.hidden_size)).isfinite().all()
    steps = nn.functional.softplus(mixer.dt_bias)
    assert ((steps > 0.9e-3) & (steps < 0.11)).all()
    assert ((mixer.A_log > 0) & (mixer.A_log.exp() < 16)).all()


def test_copies_and_pickles() -> None:
    mixer = built(chunk_size=8)
    x = torch.randn(1, 9, CONFIG.hidden_size)
    assert torch.equal(copy.deepcopy(mixer)(x), mixer(x))
    assert torch.equal(pickle.loads(pickle.dumps(mixer))(x), mixer(x))


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"mamba_head_dim": 7}, {"mamba-head-dim-divides"}),
        ({"mamba_num_groups": 5}, {"mamba-groups-divide-heads"}),
        ({"mamba_num_heads": 3}, {"mamba-groups-divide-heads"}),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, int], codes: set[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        Mamba2(CONFIG, MambaConfig(**{**SIZES.options(), **changes}))
    assert {problem.code for problem in raised.value.problems} == codes
