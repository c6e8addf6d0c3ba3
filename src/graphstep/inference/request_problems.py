"""Why a request could never be served."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from graphstep.errors import Problem, RequestError
from graphstep.inference.blocks import BlockPool
from graphstep.inference.requests import SamplingParams, token_array
from graphstep.inference.shapes import BatchLimits


def checked_prompt(
    prompt: Iterable[int],
    sampling: SamplingParams,
    limits: BatchLimits,
    blocks: BlockPool,
    *,
    vocabulary: int | None,
    chunked_prefill: bool,
) -> array[int]:
    """Return the tokens of a request that can be served.

    Args:
        prompt: its tokens.
        sampling: its settings.
        limits: of a step.
        blocks: the pool.
        vocabulary: number of tokens there are; ``None``: not checked.
        chunked_prefill: are long prompts split?

    Raises:
        RequestError: it could never be served; all problems at once.
    """
    tokens = token_array(prompt)
    problems = list(_problems(tokens, sampling, limits, blocks, vocabulary, chunked_prefill))
    if problems:
        raise RequestError(problems)
    return tokens


def _problems(
    prompt: Sequence[int],
    sampling: SamplingParams,
    limits: BatchLimits,
    blocks: BlockPool,
    vocabulary: int | None,
    chunked_prefill: bool,
) -> Iterator[Problem]:
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
