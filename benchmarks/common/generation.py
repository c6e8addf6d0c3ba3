"""Arms that generate tokens with the same weights: the engine of this project, and Llama of transformers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch

from common.clocks import Spread, synchronize
from common.device_time import profile_steps
from graphstep.config import InferenceConfig, InferenceCudaGraphScope
from graphstep.config.model import ModelConfig
from graphstep.inference.draws import PendingDraws
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.requests import SamplingParams
from graphstep.models import GPTModel

ENGINE_ARMS: Final = {"block": "block", "layer": "layer", "none": "none", "block_synchronous": "block"}
"""Arms of the engine, and the scope of their graphs."""
SIZES: Final = {
    "1b": {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "ffn_hidden_size": 8192},
    "tiny": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128},
}
VOCABULARY: Final = {"1b": 128256, "tiny": 512}
_NUM_WARM: Final = 4
"""Steps before decode steps are timed."""

Tokens = list[list[int]]


class Arm(Protocol):
    """Something that generates."""

    def generate(self, prompts: Tokens, num_new: int) -> Tokens:
        """The most likely tokens after each prompt, so many."""

    def details(self) -> dict[str, Any]:
        """How it ran."""

    def close(self) -> None:
        """Free what it made."""


class EngineArm:
    """The engine: graphs of one scope, the next step launched ahead or not."""

    def __init__(self, name: str, model: GPTModel, batch: int, length: int) -> None:
        options = InferenceConfig(
            inference_dynamic_batching_max_requests=batch,
            inference_dynamic_batching_max_tokens=max(batch * length, 256),
            inference_dynamic_batching_num_cuda_graphs=4,
            inference_dynamic_batching_buffer_size_gb=cache_gigabytes(model),
            decode_only_cuda_graphs=True,
        )
        config = EngineConfig(
            inference=options,
            scope=InferenceCudaGraphScope(ENGINE_ARMS[name]),
            is_required=True,
            prefix_caching=False,
            show_progress=False,
            max_sequence_length=length,
            async_scheduling=name != "block_synchronous",
        )
        self.engine = DynamicEngine(model, config)

    def generate(self, prompts: Tokens, num_new: int) -> Tokens:
        """See :class:`Arm`."""
        requests = self.engine.generate(prompts, SamplingParams(max_new_tokens=num_new, temperature=0.0))
        return [request.output_tokens for request in requests]

    def decode_times(self, prompts: Tokens, num_new: int, *, num_profiled: int) -> dict[str, Any]:
        """Time decode steps of all prompts as `DynamicEngine.step` runs them, and their own kernels."""
        engine, device = self.engine, self.engine.model.embedding.weight.device
        num_steps = num_new - num_profiled - _NUM_WARM - 4
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_new_tokens=num_new, temperature=0.0))
        for _ in range(_NUM_WARM):
            engine.step()
        synchronize(device)
        steps_ms = []
        with waits_timed() as waits:
            begun = time.perf_counter()
            for _ in range(num_steps):
                before = time.perf_counter()
                engine.step()
                steps_ms.append((time.perf_counter() - before) * 1e3)
            synchronize(device)
            step_ms = (time.perf_counter() - begun) / num_steps * 1e3
        spread = Spread.of(steps_ms)
        result: dict[str, Any] = {
            "decode_step_ms": step_ms,
            "decode_step_p10_ms": spread.p10,
            "decode_step_p90_ms": spread.p90,
            "host_ms": (sum(steps_ms) - sum(waits) * 1e3) / num_steps,
        }
        device_time = profile_steps(lambda _: engine.step(), device, num_steps=num_profiled)
        if device_time is not None:
            result |= {
                "decode_kernel_ms": device_time.kernel_ms,
                "decode_device_ms": device_time.sum_ms,
                "decode_num_kernels": device_time.num_kernels,
                "decode_host_calls": dict(device_time.host_calls),
                "over_kernels": step_ms / device_time.kernel_ms,
                "top_kernels": list(device_time.top_kernels),
            }
        return result

    def details(self) -> dict[str, Any]:
        """See :class:`Arm`."""
        report = self.engine.report()
        return {
            "capture_seconds": report.capture_seconds,
            "num_recordings": report.num_recordings,
            "rows": [
                {"name": row.name, "num_replays": row.num_replays, "eager_calls": dict(row.eager_calls)}
                for row in report.rows
                if row.name == "steps"
            ],
        }

    def close(self) -> None:
        """See :class:`Arm`."""
        self.engine.close()


class TransformersArm:
    """Llama of transformers with the weights of ours: eager, or with a static cache, which is then compiled."""

    def __init__(self, name: str, model: GPTModel) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        own = model.config
        config = LlamaConfig(
            vocab_size=own.vocab_size,
            hidden_size=own.hidden_size,
            intermediate_size=own.ffn_hidden_size,
            num_hidden_layers=own.num_layers,
            num_attention_heads=own.num_attention_heads,
            num_key_value_heads=own.num_query_groups,
            head_dim=own.kv_channels,
            max_position_embeddings=own.max_position_embeddings,
            rms_norm_eps=own.norm_epsilon,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            attn_implementation="sdpa",
        )
        device = model.embedding.weight.device
        # Not by .to(dtype), which would round the frequencies of its rotary embedding as well.
        with torch.device(device):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=model.embedding.weight.dtype).eval()
        copy_weights(model, self.model)
        self._options = {"cache_implementation": "static"} if name.endswith("compile") else {}
        self._device = device

    @torch.no_grad()
    def generate(self, prompts: Tokens, num_new: int) -> Tokens:
        """See :class:`Arm`."""
        given = torch.tensor(prompts, device=self._device)
        made = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            **self._options,
        )
        found: Tokens = made[:, given.shape[1] :].tolist()
        return found

    def details(self) -> dict[str, Any]:
        """See :class:`Arm`."""
        return {}

    def close(self) -> None:
        """See :class:`Arm`."""
        torch.compiler.reset()


@torch.no_grad()
def copy_weights(ours: GPTModel, twin: Any) -> None:
    """Fill a Llama with the weights of a model of ours."""
    state = ours.state_dict()
    config = ours.config
    twin.model.embed_tokens.weight.copy_(state["embedding.weight"])
    twin.model.norm.weight.copy_(state["head.norm.weight"])
    rows = [heads * config.kv_channels for heads in (config.num_attention_heads, *[config.num_query_groups] * 2)]
    for number, layer in enumerate(twin.model.layers):
        part = {name.removeprefix(f"layers.{number}."): value for name, value in state.items()}
        attention, mlp = layer.self_attn, layer.mlp
        pieces = part["attention.qkv.weight"].split(rows)
        for projection, weight in zip((attention.q_proj, attention.k_proj, attention.v_proj), pieces, strict=True):
            projection.weight.copy_(weight)
        attention.o_proj.weight.copy_(part["attention.out.weight"])
        for projection, weight in zip((mlp.gate_proj, mlp.up_proj), part["mlp.up.weight"].chunk(2), strict=True):
            projection.weight.copy_(weight)
        mlp.down_proj.weight.copy_(part["mlp.down.weight"])
        layer.input_layernorm.weight.copy_(part["attention_norm.weight"])
        layer.post_attention_layernorm.weight.copy_(part["mlp_norm.weight"])


def build_model(size: str, length: int, device: torch.device, dtype: torch.dtype) -> GPTModel:
    """A Llama-shaped model with random weights, wide enough apart for greedy decoding to have few ties."""
    config = ModelConfig(
        **SIZES[size],
        num_query_groups=SIZES[size]["num_attention_heads"] // 4,
        seq_length=length,
        vocab_size=VOCABULARY[size],
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.05,
    )
    generator = torch.Generator(device=device).manual_seed(0)
    return GPTModel(config, generator=generator, device=device, dtype=dtype).eval()


def random_prompts(model: GPTModel, batch: int, length: int) -> Tokens:
    """Prompts of equal length, the same for every arm."""
    draw = torch.Generator().manual_seed(batch)
    prompts: Tokens = torch.randint(1, model.config.vocab_size, (batch, length), generator=draw).tolist()
    return prompts


def cache_gigabytes(model: GPTModel) -> float:
    """Memory of a cache that is large enough for all that is measured here."""
    return 8.0 if model.config.hidden_size > 64 else 0.01


def build_arm(name: str, model: GPTModel, batch: int, length: int) -> Arm:
    """Make an arm by its name."""
    if name.startswith("transformers"):
        return TransformersArm(name, model)
    return EngineArm(name, model, batch, length)


@contextmanager
def waits_timed() -> Iterator[list[float]]:
    """Note the seconds that the host waits for the device in each step of an engine."""
    waits: list[float] = []
    wait = PendingDraws.wait

    def timed(draws: PendingDraws) -> None:
        begun = time.perf_counter()
        wait(draws)
        waits.append(time.perf_counter() - begun)

    PendingDraws.wait = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        PendingDraws.wait = wait  # type: ignore[method-assign]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body once it has taken so long, at the next line of Python, in the main thread.

    And again every few seconds: compilers catch errors.
    """

    def expire(_number: int, _frame: object) -> None:
        raise TimeoutError(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def host_only_step(model: GPTModel, batch: int, num_steps: int) -> dict[str, float]:
    """What the host does in a decode step beside launching: scheduling, writing, copying, reading. No forward runs."""
    arm = EngineArm("block", model, batch, num_steps + 16)
    engine = arm.engine
    try:
        for prompt in random_prompts(model, batch, 4):
            engine.add_request(prompt, SamplingParams(max_new_tokens=num_steps + 8, temperature=0.0))
        for _ in range(_NUM_WARM):
            engine.step()
        packed = torch.ones(batch, 1, dtype=torch.int32, device=model.embedding.weight.device)
        computes: Callable[..., object] = engine.runner.run
        engine.runner.run = lambda *_: packed  # type: ignore[method-assign]
        begun = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        taken = (time.perf_counter() - begun) / num_steps * 1e3
        engine.runner.run = computes  # type: ignore[method-assign,assignment]
        return {"step_ms": taken}
    finally:
        arm.close()
