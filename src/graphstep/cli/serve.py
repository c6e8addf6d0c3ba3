"""``graphstep serve``: offer a model over HTTP until a signal comes."""

from __future__ import annotations

import logging
import signal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphstep.cli.loaded_engine import (
    device_of,
    engine_config,
    graph_and_cache_rows,
    load,
    memory_needed,
    tokenizer_of,
)
from graphstep.cli.serve_options import ServeOptions
from graphstep.errors import ConfigError, Problem
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.load import LoadedModel
from graphstep.inference.text import HuggingFaceText, TextTokens
from graphstep.inference.weight_files import read_json
from graphstep.server.chat_files import TOKENIZER_CONFIG, read_chat_format, special_tokens
from graphstep.server.model import ServedModel

EXIT_OK, EXIT_INTERRUPTED = 0, 130


def run(options: ServeOptions) -> int:
    """Run the command.

    Args:
        options: as read from a command line.

    Returns:
        Exit code: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        UserInputError: an address, device, model or tokenizer that does not fit, or missing packages.
        GraphstepError: a graph that has to be captured and cannot be.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        what = f"serving needs the packages 'starlette' and 'uvicorn', and {error.name} is not installed"
        fix = "pip install 'graphstep[serve]'"
        raise ConfigError(Problem("serve-not-installed", what, "graphstep serve", fix)) from error
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A line for each malformed request would let anybody fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # Memory is reported before the cache takes it: where it is too little, these lines are the last.
    logging.getLogger("graphstep.inference").setLevel(logging.INFO)
    with memory_needed():
        return _run(options)


def _run(options: ServeOptions) -> int:
    from graphstep.server.http_server import address_of, bind, run_server

    console = Console()
    with bind(options.server) as listener:
        device = device_of(options)
        loaded = load(options, device)
        text = tokenizer_of(options, loaded)
        model = _served(options, loaded, text)
        with DynamicEngine(loaded.model, engine_config(options, loaded, text)) as engine:

            def announce() -> None:
                console.print(_table(options, model, engine, address_of(listener)))

            stopped_by = run_server(engine, model, options.server, listener, on_start=announce)
    return EXIT_INTERRUPTED if stopped_by == signal.SIGINT else EXIT_OK


def _served(options: ServeOptions, loaded: LoadedModel, text: TextTokens) -> ServedModel:
    chat = read_chat_format(loaded.folder, options.chat_template)
    chat_text = None
    ends = [*loaded.stop_tokens, *text.stop_tokens]
    if isinstance(text, HuggingFaceText):
        if chat.template is not None:
            chat_text = tokenizer_of(options, loaded, adds_special_tokens=False)
        path = loaded.folder / TOKENIZER_CONFIG
        eos = special_tokens(read_json(path)).get("eos_token") if path.is_file() else None
        token = None if eos is None else text.token(eos)
        ends += [] if token is None else [token]
    return ServedModel(
        name=options.served_model_name,
        text=text,
        chat=chat,
        chat_text=chat_text,
        end_tokens=tuple(dict.fromkeys(ends)),
    )


def _table(options: ServeOptions, model: ServedModel, engine: DynamicEngine, address: str) -> Table:
    weights = engine.model.embedding.weight
    server, limits = options.server, engine.limits
    rows = [
        ("address", f"{address}/v1"),
        ("model", f"{model.name}: {engine.model.num_parameters():,} parameters on {weights.device}"),
        ("chat", "the plain form" if model.chat.template is None else "by the model's template"),
        ("batch", f"at most {limits.max_requests} sequences and {limits.max_tokens} tokens a step"),
        ("sequences", f"at most {limits.max_sequence_length} tokens; {server.max_queue} may wait"),
        *graph_and_cache_rows(engine),
        ("API key", "asked for" if server.api_key is not None else "none: whoever reaches the address may use it"),
        ("stop", "Ctrl-C or SIGTERM"),
    ]
    table = Table(title="graphstep serve", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
