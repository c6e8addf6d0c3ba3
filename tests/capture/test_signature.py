"""What makes a call another call: structure, layouts, values, modes, training flags; all differences at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphstep.capture.ambient import AmbientState
from graphstep.capture.signature import Signature
from graphstep.errors import InputMismatchError


def signature(arguments: Any, device: torch.device, modules: tuple[nn.Module, ...] = ()) -> Signature:
    return Signature.of(arguments, device_type=device.type, modules=modules)


def batch(device: torch.device) -> dict[str, Any]:
    pair = (torch.zeros(4, device=device), 1)
    return {"x": torch.zeros(2, 3, device=device), "mask": None, "scale": 2.0, "pair": pair}


def test_equal_calls_have_equal_signatures_and_hashes(device: torch.device) -> None:
    first, second = signature(batch(device), device), signature(batch(device), device)
    assert first == second
    assert hash(first) == hash(second)
    assert {first: 1}[second] == 1
    assert first.differences(second) == []


def test_values_of_tensors_do_not_matter(device: torch.device) -> None:
    assert signature(torch.zeros(3, device=device), device) == signature(torch.ones(3, device=device), device)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "shape": (lambda x: x[:1], "shape"),
    "dtype": (lambda x: x.double(), "dtype"),
    "stride": (lambda x: x.t().contiguous().t(), "stride"),
    "expanded": (lambda x: x[:1].expand(2, 3), "stride"),
    "requires_grad": (lambda x: x.requires_grad_(), "requires_grad"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_layout_is_named_with_its_path(name: str, device: torch.device) -> None:
    change, word = CHANGES[name]
    captured = signature(batch(device), device)
    other = batch(device)
    other["x"] = change(other["x"])
    given = signature(other, device)
    assert captured != given
    (difference,) = captured.differences(given)
    assert difference.startswith("arguments['x'] ")
    assert word in difference


def test_all_differences_are_reported_at_once(device: torch.device) -> None:
    captured = signature(batch(device), device)
    other = {"x": torch.zeros(5, 3, device=device), "mask": None, "scale": 2.0, "pair": (torch.zeros(4).double(), 1)}
    differences = captured.differences(signature(other, device))
    assert [text.split(" ")[0] for text in differences] == ["arguments['x']", "arguments['pair'][0]"]


def test_differences_of_structure_do_not_hide_those_of_layout(device: torch.device) -> None:
    captured = signature(batch(device), device)
    other = batch(device)
    other.update(x=torch.zeros(9, device=device), scale=3.0, mask=torch.zeros(1, device=device), extra=1)
    text = "\n".join(captured.differences(signature(other, device)))
    for part in ("arguments['x']", "arguments['scale']", "2.0", "3.0", "arguments['mask']", "arguments['extra']"):
        assert part in text


def test_missing_added_and_reordered_entries_are_named(device: torch.device) -> None:
    captured = signature({"a": 1, "b": 2}, device)
    assert captured.differences(signature({"a": 1}, device)) == ["arguments['b'] is missing"]
    assert captured.differences(signature({"a": 1, "b": 2, "c": 3}, device)) == [
        "arguments['c'] was not there at capture"
    ]
    assert captured.differences(signature({"b": 2, "a": 1}, device)) == ["arguments has its entries in another order"]


@pytest.mark.parametrize(
    ("theirs", "kinds"),
    [([1], ("tuple", "list")), (None, ("tuple", "NoneType")), (torch.zeros(1), ("tuple", "tensor"))],
)
def test_a_change_of_kind_names_both(theirs: Any, kinds: tuple[str, str], device: torch.device) -> None:
    (text,) = signature((1,), device).differences(signature(theirs, device))
    assert all(kind in text for kind in kinds)


MODES: dict[str, Callable[[torch.device], AbstractContextManager[Any]]] = {
    "grad_enabled": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device.type, dtype=torch.bfloat16),
    "deterministic": lambda device: deterministic(),
    "matmul_precision": lambda device: matmul_precision(),
}


@contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def matmul_precision() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_part_of_the_signature(name: str, device: torch.device) -> None:
    captured = signature(batch(device), device)
    with MODES[name](device):
        given = signature(batch(device), device)
    assert captured != given
    assert any(text.startswith(name) for text in captured.differences(given))
    assert captured == signature(batch(device), device)


def test_a_precision_set_through_the_newer_interface_counts(device: torch.device) -> None:
    captured = signature(batch(device), device)
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        assert captured != signature(batch(device), device)
    finally:
        backend.fp32_precision = before
    assert captured == signature(batch(device), device)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_a_tensor_without_strides_is_refused_with_its_path(layout: str, device: torch.device) -> None:
    x = torch.eye(3, device=device).to_sparse(layout=getattr(torch, layout))
    with pytest.raises(InputMismatchError, match=rf"arguments\[1\]\['x'\] is a {layout} tensor"):
        signature([None, {"x": x}], device)


def test_autocast_dtype_is_part_of_the_signature(device: torch.device) -> None:
    with torch.autocast(device.type, dtype=torch.bfloat16):
        captured = signature(batch(device), device)
    with torch.autocast(device.type, dtype=torch.float16):
        assert captured != signature(batch(device), device)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_modes_of_the_signature_are_entered(
    mode: Callable[[], AbstractContextManager[Any]], device: torch.device
) -> None:
    with mode(), torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
        ambient = AmbientState.now(device.type)
    with ambient.entered(device.type):
        assert AmbientState.now(device.type) == ambient
    assert AmbientState.now(device.type) != ambient


def test_training_flags_are_part_of_the_signature(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    modules = tuple(model.modules())
    captured = signature(batch(device), device, modules)
    model[1].eval()
    given = signature(batch(device), device, modules)
    assert captured != given
    assert any("training" in text for text in captured.differences(given))
    model[1].train()
    assert captured == signature(batch(device), device, modules)
