"""The options of ``graphstep serve``, read without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from graphstep.cli.engine_options import (
    ENGINE_OPTIONS,
    MODEL_OPTION,
    RUN_OPTIONS,
    SEED_OPTION,
    EngineOptions,
    command_group,
    note_missing_model,
    read_engine,
)
from graphstep.config.options import Option
from graphstep.config.options.option import integer, number, positive, text
from graphstep.config.parsing import read_options
from graphstep.errors import ConfigError, Problem
from graphstep.server.options import ServerOptions

API_KEY_VARIABLE: Final = "GRAPHSTEP_API_KEY"
_group = command_group("server")
_DEFAULTS: Final[Mapping[str, Any]] = {field.name: field.default for field in fields(ServerOptions)}


def _limit(name: str, metavar: str, help_text: str, **more: Any) -> Option:
    chosen: dict[str, Any] = {"type": integer, "default": _DEFAULTS[name], **more}
    return _group.option(f"--{name.replace('_', '-')}", help_text, metavar=metavar, **chosen)


_SERVER: Final[tuple[Option, ...]] = (
    _limit("host", "ADDRESS", "address to listen on; 127.0.0.1 is for this machine alone", type=text),
    _limit("port", "PORT", "port to listen on; 0: a free one"),
    _group.option(
        "--served-model-name",
        "what requests call the model",
        type=text,
        metavar="NAME",
        default_text="the name of the folder",
    ),
    _group.option(
        "--api-key-file",
        "file with the key that clients send as 'Authorization: Bearer KEY'",
        type=text,
        metavar="FILE",
        default_text=f"{API_KEY_VARIABLE} of the environment, else no key",
    ),
    _group.switch("--allow-no-api-key", "listen beyond this machine without a key"),
    _group.option(
        "--chat-template",
        "a jinja file, or plain: a line 'role: content' a message",
        type=text,
        metavar="FILE",
        default_text="that of the model, else plain",
    ),
    _limit("max_body_bytes", "BYTES", "refuse larger request bodies"),
    _limit(
        "max_prompt_tokens",
        "TOKENS",
        "refuse longer prompts",
        type=positive,
        default_text="as many as leave room for one more",
    ),
    _limit("max_queue", "N", "sequences that may wait beyond those of a full batch; more are answered with 429"),
    _limit("max_choices", "N", "sequences of one request: its prompts times n"),
    _limit("max_connections", "N", "open connections; more are answered with 503"),
    _limit("request_seconds", "SECONDS", "cancel requests that take longer", type=number),
    _limit("body_seconds", "SECONDS", "refuse bodies that take longer to arrive", type=number),
    _limit("idle_seconds", "SECONDS", "close connections that send no request for so long"),
    _limit("shutdown_seconds", "SECONDS", "cancel requests that still run so long after the signal to stop"),
)
_SEED: Final = replace(SEED_OPTION, help="of requests that name none, together with their order")
_OWN: Final[tuple[Option, ...]] = (*_SERVER, MODEL_OPTION, _SEED, *ENGINE_OPTIONS)
SERVE_OPTIONS: Final[tuple[Option, ...]] = (*_OWN, *RUN_OPTIONS)
"""All of them: its own, and those of runs that inference knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(EngineOptions):
    """What a command line says."""

    served_model_name: str
    chat_template: str | None
    server: ServerOptions


def read_serve_options(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> ServeOptions:
    """Read a command line, and the key.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    reading = read_options(argv, SERVE_OPTIONS, help_hint="graphstep serve --help lists the options")
    own: dict[str, Any] = {option.dest: reading.values.pop(option.dest, option.default) for option in _OWN}
    note_missing_model(reading, own, code="serve-model", use="serve")
    server = None
    try:
        server = _server_options(own, env)
    except ConfigError as error:
        reading.problems += error.problems
    engine = read_engine(reading, own, env)
    if server is None:
        raise ConfigError(reading.problems)
    return ServeOptions(
        served_model_name=own["served_model_name"] or engine["model"].resolve().name or "model",
        chat_template=own["chat_template"],
        server=server,
        **engine,
    )


def _server_options(own: Mapping[str, Any], env: Mapping[str, str]) -> ServerOptions:
    names = set(_DEFAULTS) & set(own)
    return ServerOptions(
        api_key=_api_key(own["api_key_file"], env),
        allows_no_key=own["allow_no_api_key"],
        **{name: own[name] for name in names},
    )


def _api_key(file: str | None, env: Mapping[str, str]) -> str | None:
    if file is None:
        return env.get(API_KEY_VARIABLE, "").strip() or None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
        what = f"the API key cannot be read: {reason}"
        fix = "name a file with one line, the key"
        raise ConfigError(Problem("serve-key", what, f"--api-key-file {file}", fix)) from error
