"""Generation with an attached model is that of the plain model."""

from __future__ import annotations

import pytest
import torch
from tests.hugging_face.tiny import Loop, eager_reasons, steps, twins


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "mamba2"])
def test_generate_between_training_steps(device: torch.device, family: str) -> None:
    def script(loop: Loop) -> None:
        for _ in range(2):
            steps(3)(loop)
            for is_training in (False, True):  # generate() works in both modes
                loop.model.train(is_training)
                for length in (5, 3):
                    loop.trace.append(loop.model.generate(loop.tokens(1, length), max_new_tokens=6, do_sample=False))

    options = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}
    report = twins(family, device, script, **options)
    assert all(row.num_replays == 5 for row in report.rows)
    assert eager_reasons(report) == {"observed", "evaluation"}


def test_static_cache_and_sampling(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        steps(3)(loop)
        loop.model.eval()
        tokens = loop.tokens(2, 5)
        options = {"max_new_tokens": 4, "cache_implementation": "static", "disable_compile": True}
        loop.trace.append(loop.model.generate(tokens, do_sample=False, **options))
        torch.manual_seed(3)
        loop.trace.append(loop.model.generate(tokens, do_sample=True, max_new_tokens=4))

    twins("llama", device, script)


def test_beams(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        steps(2)(loop)
        loop.model.eval()
        loop.trace.append(loop.model.generate(loop.tokens(2, 5), do_sample=False, num_beams=3, max_new_tokens=4))

    twins("qwen3_moe", device, script)
