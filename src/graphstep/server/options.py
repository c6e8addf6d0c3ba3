"""What a server is started with."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from graphstep.errors import ConfigError, Problem

MAX_PORT = 65535
LEAST_KEY_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Where a server listens and what it lets in.

    Raises:
        ConfigError: values out of range, or a server that anybody could reach and use; all problems at once.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """0: a free one."""
    api_key: str | None = field(default=None, repr=False)
    """What clients send as ``Authorization: Bearer KEY``; ``None``: nothing is asked for."""
    allows_no_key: bool = False
    """Listen beyond this machine without a key."""
    max_body_bytes: int = 4 << 20
    """Larger request bodies are refused."""
    max_prompt_tokens: int | None = None
    """Longer prompts are refused; ``None``: those that leave no room for a token."""
    max_queue: int = 512
    """Sequences that may wait beyond those of a full batch; more are refused."""
    max_choices: int = 128
    """Sequences of one request: its prompts times ``n``."""
    max_connections: int = 1024
    """Open connections; more are answered with 503."""
    request_seconds: float = 600.0
    """A request that takes longer is cancelled."""
    body_seconds: float = 30.0
    """A body that takes longer to arrive is refused."""
    idle_seconds: int = 15
    """A connection is closed after so long without a request, or with an unfinished head of one."""
    shutdown_seconds: int = 30
    """Requests that are still running so long after the signal to stop are cancelled."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    @property
    def is_local(self) -> bool:
        """Can only this machine connect?"""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def _problems(self) -> Iterator[Problem]:
        if not 0 <= self.port <= MAX_PORT:
            what = f"a port lies between 0 and {MAX_PORT}, got {self.port}"
            yield Problem("serve-port", what, "--port", "use 8000")
        least = {"max_queue": 0, "max_body_bytes": 1, "max_choices": 1, "max_connections": 1, "idle_seconds": 1}
        for name, low in (least | {"shutdown_seconds": 0, "max_prompt_tokens": 1}).items():
            value = getattr(self, name)
            if value is not None and value < low:
                yield Problem("serve-limit", f"{name} must be at least {low}, got {value}", _flag(name), f"use {low}")
        for name in ("request_seconds", "body_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                yield Problem("serve-limit", f"{name} must be above 0, got {value}", _flag(name), "use 60")
        if self.api_key is not None and not (
            len(self.api_key) >= LEAST_KEY_CHARACTERS and self.api_key.isascii() and self.api_key.isprintable()
        ):
            what = f"the API key has fewer than {LEAST_KEY_CHARACTERS} characters, or some that are not printable ASCII"
            yield Problem("serve-key", what, "--api-key-file", "make one with: openssl rand -hex 32")
        if self.api_key is None and not self.is_local and not self.allows_no_key:
            what = f"everybody who reaches {self.host} could use the model: there is no API key"
            fix = "add --api-key-file FILE, listen on 127.0.0.1, or add --allow-no-api-key"
            yield Problem("serve-open", what, "--host", fix)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
