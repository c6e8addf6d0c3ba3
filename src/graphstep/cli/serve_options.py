"""The options of ``graphstep serve``, read without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from graphstep.cli.generate_options import GENERATE_OPTIONS, notices_of_graphs
from graphstep.config import CapturePolicy, InferenceConfig, InferenceCudaGraphScope
from graphstep.config.arguments import configure
from graphstep.config.options import Option
from graphstep.config.options.option import integer, number, positive, text
from graphstep.config.parsing import read_options
from graphstep.config.validation import Notice
from graphstep.errors import ConfigError, Problem
from graphstep.server.options import ServerOptions

API_KEY_VARIABLE: Final = "GRAPHSTEP_API_KEY"
_GROUP: Final = "server"
_ONLY_GENERATE: Final = (
    *("prompt", "prompt_file", "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos", "json"),
)
_OF_ENGINE: Final = (
    "model",
    "tokenizer_model",
    "dtype",
    "device",
    "inference_max_seq_length",
    "lazy_cuda_graphs",
    "async_scheduling",
    "seed",
)
_DEFAULTS: Final[Mapping[str, Any]] = {field.name: field.default for field in fields(ServerOptions)}


def _limit(name: str, metavar: str, help_text: str, **more: Any) -> Option:
    flag = f"--{name.replace('_', '-')}"
    chosen: dict[str, Any] = {"type": integer, "default": _DEFAULTS[name], **more}
    return Option(dest=name, flags=(flag,), metavar=metavar, group=_GROUP, help=help_text, **chosen)


def _shared(option: Option) -> Option:
    if option.dest == "seed":
        return replace(option, help="of requests that name none, together with their order")
    return option


_OWN: tuple[Option, ...] = (
    _limit("host", "ADDRESS", "address to listen on; 127.0.0.1 is for this machine alone", type=text),
    _limit("port", "PORT", "port to listen on; 0: a free one"),
    Option(
        dest="served_model_name",
        flags=("--served-model-name",),
        type=text,
        metavar="NAME",
        group=_GROUP,
        default_text="the name of the folder",
        help="what requests call the model",
    ),
    Option(
        dest="api_key_file",
        flags=("--api-key-file",),
        type=text,
        metavar="FILE",
        group=_GROUP,
        default_text=f"{API_KEY_VARIABLE} of the environment, else no key",
        help="file with the key that clients send as 'Authorization: Bearer KEY'",
    ),
    Option(
        dest="allow_no_api_key",
        flags=("--allow-no-api-key",),
        nargs=0,
        default=False,
        group=_GROUP,
        help="listen beyond this machine without a key",
    ),
    Option(
        dest="chat_template",
        flags=("--chat-template",),
        type=text,
        metavar="FILE",
        group=_GROUP,
        default_text="that of the model, else plain",
        help="a jinja file, or plain: a line 'role: content' a message",
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
SERVE_OPTIONS: tuple[Option, ...] = (
    *_OWN,
    *(_shared(option) for option in GENERATE_OPTIONS if option.dest not in _ONLY_GENERATE),
)
"""All of them: its own, and those of ``graphstep generate`` that are about model and engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What a command line says."""

    model: Path
    tokenizer_model: Path | None
    dtype: str | None
    device: str | None
    inference_max_seq_length: int | None
    lazy_cuda_graphs: bool
    async_scheduling: bool
    seed: int
    inference: InferenceConfig
    scope: InferenceCudaGraphScope
    is_required: bool
    """A step that should have a graph and cannot be captured is an error."""
    served_model_name: str
    chat_template: str | None
    server: ServerOptions
    notices: tuple[Notice, ...]


def read_serve_options(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> ServeOptions:
    """Read a command line, and the key.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    reading = read_options(argv, SERVE_OPTIONS, help_hint="graphstep serve --help lists the options")
    own_options = [option for option in SERVE_OPTIONS if option in _OWN or option.dest in _OF_ENGINE]
    own = {option.dest: reading.values.pop(option.dest, option.default) for option in own_options}
    if own["model"] is None and "model" not in reading.wrong:
        what = "--model says what to serve, and is missing"
        reading.problems.append(Problem("serve-model", what, "--model", "name the folder of a model"))
    server = None
    try:
        server = _server_options(own, env)
    except ConfigError as error:
        reading.problems += error.problems
    reading.wrong -= set(own)
    reading.values["inference_dynamic_batching"] = True
    config = configure(reading, env=env)
    if server is None:
        raise ConfigError(reading.problems)
    model, graphs = Path(own["model"]), config.graphs
    wanted = graphs.inference_scope or InferenceCudaGraphScope.none
    scope = InferenceCudaGraphScope.none if graphs.policy is CapturePolicy.off else wanted
    return ServeOptions(
        model=model,
        tokenizer_model=None if own["tokenizer_model"] is None else Path(own["tokenizer_model"]),
        dtype=own["dtype"],
        device=own["device"],
        inference_max_seq_length=own["inference_max_seq_length"],
        lazy_cuda_graphs=own["lazy_cuda_graphs"],
        async_scheduling=own["async_scheduling"],
        seed=own["seed"],
        inference=config.inference,
        scope=scope,
        is_required=graphs.policy is CapturePolicy.required,
        served_model_name=own["served_model_name"] or model.resolve().name or "model",
        chat_template=own["chat_template"],
        server=server,
        notices=(*config.notices, *notices_of_graphs(own["lazy_cuda_graphs"], scope)),
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
