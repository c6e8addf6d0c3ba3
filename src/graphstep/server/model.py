"""The model that a server offers: its name, its texts, its sizes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from graphstep.inference.engine import DynamicEngine
from graphstep.inference.text import TextTokens
from graphstep.server.chat import ChatFormat


def _now() -> int:
    return int(time.time())


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What clients see of a model."""

    name: str
    """What requests call it."""
    text: TextTokens
    """Prompts to tokens, and tokens to text."""
    chat: ChatFormat = field(default_factory=ChatFormat)
    """How messages become a prompt."""
    chat_text: TextTokens | None = None
    """Prompts of chats to tokens, where the template writes the tokens that begin a text; ``None``: as others."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a sequence, unless a request says ``ignore_eos``. They are no part of its text."""
    created: int = field(default_factory=_now)
    """When it was loaded, in seconds since 1970."""

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Return the tokens of a text. Takes long for long ones."""
        tokenizer = self.chat_text if is_chat and self.chat_text is not None else self.text
        return tokenizer.encode(text)

    def text_of(self, token: int) -> str:
        """Return the text that a token has by itself; bytes that are no character become U+FFFD."""
        data = self.text.bytes_of(token)
        if data is not None:
            return data.decode("utf-8", "replace")
        stream = self.text.stream()
        return stream.add(token) + stream.finish()

    def name_of(self, token: int) -> str:
        """Return its text, or its bytes as ``bytes:\\xe2\\x82`` where they are a part of a character."""
        data = self.text.bytes_of(token)
        text = self.text_of(token)
        if data is None or text.encode() == data:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNumbers:
    """What an engine has done and holds, at one moment."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_held: int
    num_steps: int
    num_graph_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, engine: DynamicEngine) -> EngineNumbers:
        """Read them; in the thread of the engine."""
        counts, blocks, steps = engine.counts, engine.blocks, engine.runner.step_stats
        return cls(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_blocks=blocks.capacity,
            num_blocks_held=blocks.capacity - blocks.num_available,
            # Of those that ran: the scheduler also counts what it took back before it could run.
            num_steps=steps.num_replays + sum(steps.eager_calls.values()),
            num_graph_steps=steps.num_replays,
            num_preemptions=counts.preemptions,
            num_prompt_tokens=counts.prompt_tokens,
            num_cached_tokens=counts.cached_tokens,
        )
