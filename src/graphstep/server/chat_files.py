"""Finds how a model of Hugging Face writes chats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from graphstep.errors import ConfigError, Problem
from graphstep.inference.weight_files import read_json
from graphstep.server.chat import ChatFormat

TEMPLATE_FILE: Final = "chat_template.jinja"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
PLAIN: Final = "plain"
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_chat_format(folder: Path, choice: str | None = None) -> ChatFormat:
    """Return how a model writes chats.

    Args:
        folder: of the model; one without a template gets the plain form.
        choice: a file with another template, or ``plain``.

    Raises:
        ConfigError: a template that cannot be read, or no jinja2 to read it.
        CheckpointError: a ``tokenizer_config.json`` that is damaged.
    """
    if choice == PLAIN:
        return ChatFormat()
    path = folder / TOKENIZER_CONFIG
    config: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    tokens = special_tokens(config)
    if choice is not None:
        return ChatFormat.of_template(_read(Path(choice)), tokens)
    if (folder / TEMPLATE_FILE).is_file():
        return ChatFormat.of_template(_read(folder / TEMPLATE_FILE), tokens)
    template = _template_of(config)
    return ChatFormat() if template is None else ChatFormat.of_template(template, tokens)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a ``tokenizer_config.json`` names."""
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_of(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
        what = f"the chat template cannot be read: {reason}"
        fix = f"name a jinja file, or {PLAIN}"
        raise ConfigError(Problem("chat-template", what, f"--chat-template {path}", fix)) from error
