"""From the messages of a chat to the text that a model goes on with."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from graphstep.errors import ConfigError, Problem
from graphstep.server.errors import ApiError

Message = Mapping[str, str]
"""``role`` and ``content``."""
PLAIN_STOP: Final = ("\nuser:", "\nsystem:")
"""Where answers in the plain form end: a model without a template does not know when it is the other's turn."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a chat is written. Without a template: a line ``role: content`` a message, then ``assistant:``."""

    template: Any = None
    """A compiled template of jinja2."""
    tokens: Mapping[str, str] | None = None
    """Texts of special tokens that the template may name, such as ``bos_token``."""

    @classmethod
    def of_template(cls, text: str, tokens: Mapping[str, str] | None = None) -> ChatFormat:
        """Read the template of a ``tokenizer_config.json``.

        A template comes with a model and is a program: it runs in jinja2's sandbox and sees nothing but the messages.

        Raises:
            ConfigError: jinja2 is missing, or the template is malformed.
        """
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            what = "the model has a chat template, and the package 'jinja2', which reads it, is not installed"
            fix = "pip install 'graphstep[serve]' (or: pip install 'jinja2>=3.1')"
            raise ConfigError(Problem("chat-jinja2", what, "chat_template", fix)) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            return cls(environment.from_string(text), dict(tokens or {}))
        except jinja2.TemplateError as error:
            what = f"the chat template of the model cannot be read: {error}"
            raise ConfigError(
                Problem("chat-template", what, "chat_template", "repair tokenizer_config.json")
            ) from error

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer in any case."""
        return PLAIN_STOP if self.template is None else ()

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text that the answer follows.

        Raises:
            ApiError: the template does not take these messages.
        """
        if self.template is None:
            return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
        try:
            rendered = self.template.render(messages=messages, add_generation_prompt=True, **(self.tokens or {}))
        except ApiError:
            raise
        except Exception as error:  # a template is a program, and can fail in any way
            what = f"the model's chat template does not take these messages: {error}"
            raise ApiError(400, what, param="messages") from error
        return str(rendered)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ApiError(400, f"the model's chat template says: {message}", param="messages")


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
