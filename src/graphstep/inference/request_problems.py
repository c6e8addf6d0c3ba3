"""Why a request could never be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphstep.errors import Problem
from graphstep.inference.blocks import BlockPool
from graphstep.inference.requests import SamplingParams
from graphstep.inference.shapes import BatchLimits


def request_problems(
    prompt: Sequence[int],
    sampling: SamplingParams,
    limits: BatchLimits,
    blocks: BlockPool,
    *,
    vocabulary: int | None,
    chunked_prefill: bool,
) -> Iterator[Problem]:
    """Say what is wrong with a request, all of it.

    Args:
        prompt: its tokens.
        sampling: its settings.
        limits: of a step.
        blocks: the pool.
        vocabulary: number of tokens there are; ``None``: not checked.
        chunked_prefill: are long prompts split?
    """
    where = "prompt"
    if not prompt:
        yield Problem("request-empty", "the prompt has no tokens", where, "give at least one token")
        return
    most = 2**31 if vocabulary is None else vocabulary
    if min(prompt) < 0 or max(prompt) >= most:
        what = f"tokens must lie between 0 and {most - 1}, got {min(prompt)} to {max(prompt)}"
        yield Problem("request-tokens", what, where, "use the tokenizer of the model")
    if len(prompt) >= limits.max_sequence_length:
        what = f"{len(prompt)} tokens leave no room for another one within {limits.max_sequence_length}"
        yield Problem("request-length", what, where, "shorten the prompt, or serve longer sequences")
        return
    if len(prompt) > limits.max_tokens and not chunked_prefill:
        what = f"{len(prompt)} tokens do not fit a step of {limits.max_tokens}"
        yield Problem("request-step", what, where, "add --enable-chunked-prefill, or allow more tokens a step")
    # Keys and values of the last token are never needed.
    length = min(len(prompt) + sampling.max_new_tokens, limits.max_sequence_length) - 1
    needed = blocks.blocks_for(length)
    if needed > blocks.capacity:
        what = f"{length} tokens take {needed} blocks of the cache, which has {blocks.capacity}"
        yield Problem("request-blocks", what, where, "generate fewer tokens, or give the cache more memory")
