"""How fast are tokens generated: by this project's engine with graphs, and by transformers, with the same weights?

Prompts of equal length, greedy decoding of a fixed number of tokens, one batch at a time. All arms run in this process,
one after another, with the same weights:

- ``block``, ``layer``, ``none``     `DynamicEngine`: one graph for the model, one a layer, or none
- ``transformers``                  ``LlamaForCausalLM.generate``, eager
- ``transformers_static_compile``   the same with a static cache, which it compiles with ``mode="reduce-overhead"``

What is reported: tokens a second of the whole call, prompts included, median of several calls; the share of steps that
ran as graphs; the time of a decode step issued through the engine, and the sum of its own kernels, from the profiler;
the time before the first call (capture or compilation); how many leading tokens equal those of `transformers`. Greedy
decoding of random weights follows rounding: where two arms round differently, tokens part at the first near tie.

    PYTHONPATH=src python benchmarks/generate.py [options]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from common.clocks import free_memory, synchronize
from common.device_time import profile_steps, start_profiler
from common.environment import gpu_state, provenance
from common.record import failure, rounded, write_results
from common.table import wide_console
from rich.table import Table

from graphstep.config import InferenceConfig, InferenceCudaGraphScope
from graphstep.config.model import ModelConfig
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.requests import SamplingParams
from graphstep.models import GPTModel

ARMS: Final = ("block", "layer", "none", "transformers", "transformers_static_compile")
SIZES: Final = {
    "1b": {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "ffn_hidden_size": 8192},
    "tiny": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128},
}
VOCABULARY: Final = {"1b": 128256, "tiny": 512}

Tokens = list[list[int]]


class EngineArm:
    """The engine, with graphs of one scope."""

    def __init__(self, name: str, model: GPTModel, batch: int, length: int) -> None:
        options = InferenceConfig(
            inference_dynamic_batching_max_requests=batch,
            inference_dynamic_batching_max_tokens=max(batch * length, 256),
            inference_dynamic_batching_num_cuda_graphs=4,
            inference_dynamic_batching_buffer_size_gb=4.0 if model.config.hidden_size > 64 else 0.01,
            decode_only_cuda_graphs=True,
        )
        scope = InferenceCudaGraphScope(name)
        config = EngineConfig(
            inference=options, scope=scope, is_required=True, prefix_caching=False, show_progress=False
        )
        self.engine = DynamicEngine(model, config)

    def generate(self, prompts: Tokens, num_new: int) -> Tokens:
        """Tokens of each prompt."""
        requests = self.engine.generate(prompts, SamplingParams(max_new_tokens=num_new, temperature=0.0))
        return [request.output_tokens for request in requests]

    def decode_step(self, prompts: Tokens, num_new: int) -> Callable[[int], object]:
        """A function that runs one more decode step of all prompts."""
        for prompt in prompts:
            self.engine.add_request(prompt, SamplingParams(max_new_tokens=num_new, temperature=0.0))
        for _ in range(4):
            self.engine.step()
        return lambda _: self.engine.step()

    def details(self) -> dict[str, Any]:
        """How steps ran."""
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
        """Free the graphs."""
        self.engine.close()


class TransformersArm:
    """Llama of transformers with the weights of ours."""

    def __init__(self, name: str, model: GPTModel) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

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
        self.model: Any = LlamaForCausalLM(config).to(device=device, dtype=model.embedding.weight.dtype).eval()
        copy_weights(model, self.model)
        self._options = {"cache_implementation": "static"} if name.endswith("compile") else {}
        self._device = device

    @torch.no_grad()
    def generate(self, prompts: Tokens, num_new: int) -> Tokens:
        """Tokens of each prompt."""
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
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Let go of what was compiled."""
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


def build_model(size: str, length: int, device: torch.device) -> GPTModel:
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
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return GPTModel(config, generator=generator, device=device, dtype=dtype).eval()


def measure(name: str, model: GPTModel, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time one arm on one batch size."""
    device = model.embedding.weight.device
    length = options.prompt + options.new
    draw = torch.Generator().manual_seed(batch)
    prompts: Tokens = torch.randint(1, model.config.vocab_size, (batch, options.prompt), generator=draw).tolist()
    started = time.perf_counter()
    arm: Any = (
        TransformersArm(name, model) if name.startswith("transformers") else EngineArm(name, model, batch, length)
    )
    try:
        tokens = arm.generate(prompts, options.new)
        if name.startswith("transformers"):
            arm.generate(prompts, options.new)
        synchronize(device)
        ready = time.perf_counter() - started
        seconds = []
        for _ in range(options.repeats):
            begun = time.perf_counter()
            arm.generate(prompts, options.new)
            synchronize(device)
            seconds.append(time.perf_counter() - begun)
        result: dict[str, Any] = {
            "name": name,
            "batch": batch,
            "tokens_per_second": batch * options.new / statistics.median(seconds),
            "seconds": seconds,
            "ready_seconds": ready,
            "tokens": tokens,
            "details": arm.details(),
        }
        if isinstance(arm, EngineArm):
            step = arm.decode_step(prompts, options.new)
            num_steps = min(40, options.new - 24)
            synchronize(device)
            begun = time.perf_counter()
            for index in range(num_steps):
                step(index)
            synchronize(device)
            result["decode_step_ms"] = (time.perf_counter() - begun) / num_steps * 1e3
            device_time = profile_steps(step, device, num_steps=10)
            if device_time is not None:
                result["decode_kernel_ms"] = device_time.sum_ms
                result["decode_num_kernels"] = device_time.num_kernels
                result["top_kernels"] = list(device_time.top_kernels)
    finally:
        arm.close()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SIZES), default="1b")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 32), metavar="N")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate, at least 32")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of an arm")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(words)
    device = torch.device(options.device)
    started, before = datetime.now(UTC), gpu_state(device)
    model = build_model(options.model, options.prompt + options.new, device)
    if device.type == "cuda":
        start_profiler(device)
    found = []
    for batch in options.batches:
        for name in options.arms:
            print(f"{name}, batch {batch}", file=sys.stderr, flush=True)
            try:
                found.append(measure(name, model, batch, options))
            except Exception as error:  # the other arms are to go on
                traceback.print_exc()
                found.append({"name": name, "batch": batch, "reason": failure("generate", error)})
            free_memory(device)
    compare(found)
    print_table(found, options)
    results = rounded(
        {
            **provenance("generate", words, device, started=started, gpu_before=before),
            "model": {"size": options.model, "num_parameters": model.num_parameters()},
            "prompt": options.prompt,
            "new": options.new,
            "arms": found,
        }
    )
    print(f"results: {write_results(results, options.output, now=started)}", file=sys.stderr)
    return 1 if any("reason" in arm and not arm["name"].startswith("transformers") for arm in found) else 0


def compare(found: list[dict[str, Any]]) -> None:
    """Replace the tokens of each arm by how many of them come before the first that differs from transformers'."""
    expected = {arm["batch"]: arm["tokens"] for arm in found if arm["name"] == "transformers" and "tokens" in arm}
    for arm in found:
        tokens = arm.pop("tokens", None)
        wanted = expected.get(arm["batch"])
        if tokens is None or wanted is None:
            continue
        equal = [sum(1 for _ in _leading(mine, theirs)) for mine, theirs in zip(tokens, wanted, strict=True)]
        arm["equal_tokens"] = {"least": min(equal), "mean": statistics.mean(equal), "of": len(wanted[0])}


def _leading(mine: list[int], theirs: list[int]) -> Any:
    for one, other in zip(mine, theirs, strict=True):
        if one != other:
            return
        yield one


def print_table(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print what was measured."""
    table = Table(title=f"{options.model}, prompts of {options.prompt} tokens, {options.new} new ones")
    for column in ("arm", "batch", "tokens/s", "decode ms", "kernels ms", "kernels", "ready s", "equal tokens"):
        table.add_column(column)
    for arm in found:
        if "reason" in arm:
            table.add_row(arm["name"], str(arm["batch"]), arm["reason"])
            continue
        equal = arm.get("equal_tokens")
        table.add_row(
            arm["name"],
            str(arm["batch"]),
            f"{arm['tokens_per_second']:.0f}",
            *(f"{arm[key]:.3f}" if key in arm else "" for key in ("decode_step_ms", "decode_kernel_ms")),
            f"{arm['decode_num_kernels']:.0f}" if "decode_num_kernels" in arm else "",
            f"{arm['ready_seconds']:.1f}",
            f"{equal['least']} to {equal['of']}, mean {equal['mean']:.0f}" if equal else "",
        )
    wide_console(150).print(table)


if __name__ == "__main__":
    sys.exit(main())
