"""A request for generation: what was asked, how far it is, and what came of it."""

from __future__ import annotations

import enum
import functools
import math
import operator
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from graphstep.errors import Problem, RequestError

SAMPLING_FORMAT = "<qffii"
"""How the settings of a request lie in the bytes that a step hands on: draw key, temperature, top_p, top_k, unused."""
NOT_FINITE = -1
"""The token that is drawn from logits that are NaN or infinite. It ends the request."""
MAX_TOP_LOGPROBS = 20
"""Most alternatives that can be asked for at each token."""
MAX_TEMPERATURE = 1e6
"""Beyond it, all tokens are equally likely."""
_LEAST_TEMPERATURE = 1e-30
"""Below it, a device may take it for 0 and divide by it."""
SEED_RANGE = range(-(2**63), 2**63)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of a request are drawn and when it ends.

    Raises:
        RequestError: settings out of range; all problems at once.
    """

    max_new_tokens: int = 16
    """Most tokens to generate; fewer where the longest sequence of the engine ends first."""
    temperature: float = 1.0
    """Divides the logits; 0: always the most likely token."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens that have this probability together."""
    seed: int | None = None
    """Equal seeds give equal tokens, whatever else runs; ``None``: one that the engine chooses."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the request. The one that ended it is its last."""
    logprobs: int | None = None
    """Return the log-probability of each token and of so many of the most likely ones; ``None``: of none."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise RequestError(problems)

    @property
    def is_greedy(self) -> bool:
        """Is the most likely token taken every time?"""
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Are tokens drawn from a part of the vocabulary?"""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def draw_flags(self) -> int:
        """Return what drawing takes, as `DrawNeeds.of_flags` reads it."""
        has_logprobs = self.logprobs is not None
        return (not self.is_greedy) | self.is_filtered << 1 | has_logprobs << 2 | (self.logprobs or 0) << 3

    def packed(self, seed: int) -> bytes:
        """Return what `SAMPLING_FORMAT` describes.

        Args:
            seed: used where the request names none.
        """
        key = draw_key(seed if self.seed is None else self.seed)
        temperature = self.temperature if self.temperature >= _LEAST_TEMPERATURE else 0.0
        return struct.pack(SAMPLING_FORMAT, key, temperature, self.top_p, min(self.top_k, 2**31 - 1), 0)

    def _problems(self) -> Iterator[Problem]:
        whole = ("max_new_tokens", "top_k", "seed", "logprobs")
        for name in (*whole, "temperature", "top_p"):
            value = getattr(self, name)
            kinds = (int,) if name in whole else (int, float)
            if value is None and name in ("seed", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                yield _problem(name, "a whole number" if name in whole else "a finite number", value)
            elif not self._in_range(name, value):
                yield _problem(name, _RANGES[name], value)
        # Whoever is not typed may hand over one token, or none.
        stops: Any = self.stop_tokens
        is_collection = isinstance(stops, tuple | list | set | frozenset)
        if not is_collection or not all(isinstance(token, int) and not isinstance(token, bool) for token in stops):
            yield _problem("stop_tokens", "token numbers", self.stop_tokens)

    def _in_range(self, name: str, value: float) -> bool:
        match name:
            case "max_new_tokens":
                return value >= 1
            case "temperature":
                return 0 <= value <= MAX_TEMPERATURE
            case "top_p":
                return 0 < value <= 1
            case "seed":
                return value in SEED_RANGE
            case "logprobs":
                return 0 <= value <= MAX_TOP_LOGPROBS
            case _:
                return value >= 0


_RANGES: Final = {
    "max_new_tokens": "at least 1",
    "temperature": f"0 to {MAX_TEMPERATURE:g}",
    "top_k": "0 or more",
    "top_p": "above 0 and at most 1",
    "seed": "a signed 64-bit number",
    "logprobs": f"0 to {MAX_TOP_LOGPROBS}",
}


def token_array(prompt: Iterable[int]) -> array[int]:
    """Return the tokens of a prompt, 32 bits each: of a list, a tensor, or whatever else gives whole numbers.

    Raises:
        RequestError: it gives something else.
    """
    try:
        if isinstance(prompt, str | bytes | bytearray):
            raise TypeError(f"it is {type(prompt).__name__}")
        return array("i", prompt)
    except (TypeError, ValueError) as error:
        what = f"a prompt has to be a sequence of token numbers: {error}"
        raise RequestError(
            Problem("request-tokens", what, "prompt", "encode text with the model's tokenizer")
        ) from error
    except OverflowError as error:
        what = f"tokens must lie between 0 and {2**31 - 1}: {error}"
        raise RequestError(Problem("request-tokens", what, "prompt", "use the tokenizer of the model")) from error


def later_seed(seed: int, number: int) -> int:
    """Return the seed that lies so many behind another; behind the last comes the first."""
    return (seed + number - SEED_RANGE.start) % 2**64 + SEED_RANGE.start if number else seed


def draw_key(seed: int) -> int:
    """Return the key of a request's random numbers: 64 bits that look unrelated even for seeds next to each other.

    Source: the mixing step of SplitMix64 (Steele, Lea, Flood 2014).
    """
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _problem(name: str, expected: str, value: object) -> Problem:
    return Problem(
        code=f"request-{name.replace('_', '-')}",
        what=f"{name} must be {expected}, got {value!r}",
        where=name,
        fix=f"change {name}, or leave it out",
    )


@dataclass(frozen=True, slots=True)
class DrawNeeds:
    """What has to be computed from the logits of a step. Known to the host, so that nothing else is computed."""

    is_random: bool = False
    """Some request does not take the most likely token."""
    is_filtered: bool = False
    """Some request draws from a part of the vocabulary."""
    has_logprobs: bool = False
    """Some request wants the log-probabilities of its tokens."""
    num_top: int = 0
    """Most alternatives that a request wants."""

    @classmethod
    def of_flags(cls, flags: Sequence[int]) -> DrawNeeds:
        """Return what serves all requests with these flags."""
        every = functools.reduce(operator.or_, flags, 0)
        return cls(bool(every & 1), bool(every & 2), bool(every & 4), max(flags, default=0) >> 3)


class RequestState(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; a request that has to give up its blocks goes back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request got its last token. The first two are those of OpenAI's interface."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    """The model's logits were not finite."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. The scheduler alone changes it."""

    number: int
    """Order of arrival."""
    tokens: array[int]
    """The prompt, and the tokens generated so far; 32 bits each."""
    num_prompt_tokens: int
    sampling: SamplingParams
    max_length: int
    """Ends when it has so many tokens."""
    packed_sampling: bytes
    """Settings as `SAMPLING_FORMAT`, with the key of the seed that is used."""
    draw_flags: int = 0
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    is_prefilling: bool = True
    """Are there tokens to compute before the step in which one is drawn? That step, once in flight, counts as done."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache once the steps in flight have run."""
    num_drawing: int = 0
    """Tokens that steps in flight draw; they follow ``tokens``, and the host does not know them yet."""
    row: int = 0
    """Its row in the latest step that it was part of."""
    block_table: array[int] = field(default_factory=lambda: array("i"))
    """Blocks that hold them, in order."""
    state_slot: int = 0
    """Row of the recurrent states that belongs to it while it runs; 0 belongs to nobody."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of its full blocks, as far as they were needed."""
    num_recorded: int = 0
    """Of its blocks, those that others can find."""
    epoch: int = 0
    """The epoch of the block pool in which its computation began."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the cache when it was first admitted."""
    num_preemptions: int = 0
    num_deferrals: int = 0
    """Steps that it was kept out of because no graph would have served them."""

    @property
    def output_tokens(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def is_finished(self) -> bool:
        """Will it get no more tokens?"""
        return self.state is RequestState.FINISHED


@dataclass(slots=True)  # not frozen: there is one for each token of each request
class Output:
    """What a step gave to a request."""

    request: Request
    token: int | None
    """The new token; ``None`` for a request that ended without one."""
    logprob: float | None = None
    """Log-probability of the token among all, whatever the temperature; ``None`` if not asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """Tokens with the highest log-probabilities, if asked for."""
    finish_reason: FinishReason | None = None
    """Set with the last output of a request."""
