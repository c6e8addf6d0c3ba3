"""Switches that choose kernels, as a process finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphstep.engine import kernel_switches

PROGRAM = """
import torch
from graphstep import GraphSession
from graphstep.engine import kernel_switches
device = torch.device(sys.argv[1])
session = GraphSession(device)
before = kernel_switches.attention_backends()
q = torch.ones(1, 2, 16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
print("settled" if kernel_switches.attention_backends() == before else "changed")
session.close()
"""


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_attention_of_a_process_changes_no_switch_after_a_session_is_made(where: str) -> None:
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(source)!r})\n{PROGRAM}", where],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["settled"]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_settling_the_order_leaves_what_the_user_allows(where: str) -> None:
    kernel_switches.settle_attention_order(torch.device(where))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        before = kernel_switches.attention_backends()
        kernel_switches.settle_attention_order(torch.device(where))
        assert kernel_switches.attention_backends() == before
