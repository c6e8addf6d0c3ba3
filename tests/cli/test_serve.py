"""``graphstep serve`` from the command line to the signal that ends it."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.inference.hugging_face import build, save, write_tokenizer

from graphstep.cli.main import main
from graphstep.cli.serve_options import read_serve_options
from graphstep.config import InferenceCudaGraphScope
from graphstep.errors import ConfigError

SMALL = shlex.split(
    "--inference-dynamic-batching-max-requests 4 --inference-dynamic-batching-max-tokens 48 "
    "--inference-dynamic-batching-block-size 8 --device cpu"
)
KEY = "0123456789abcdef0123456789abcdef"
NEEDS_SERVER = pytest.mark.skipif(
    find_spec("starlette") is None or find_spec("uvicorn") is None, reason="needs starlette and uvicorn"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tokenizer(folder)
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    config = {"bos_token": "<begin>", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return save(build("llama", vocab_size=270, eos_token_id=7), folder)


def ask(port: int, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def serve(argv: list[str], talk: Callable[[int], Any], ends_with: signal.Signals) -> tuple[int, Any]:
    """Run the command in this thread, as a shell does, and talk to it from another one. Returns code and talk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said: list[Any] = []

    def beside() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        else:
            return  # it did not start: the command says why
        try:
            said.append(talk(port))
        finally:
            os.kill(os.getpid(), ends_with)

    thread = threading.Thread(target=beside)
    thread.start()
    code = main(["serve", *argv, *SMALL, "--port", str(port)])
    thread.join(30)
    return code, said[0] if said else None


@NEEDS_SERVER
@pytest.mark.parametrize(("ends_with", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_model_of_hugging_face(
    ends_with: signal.Signals, code: int, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")

    def talk(port: int) -> Any:
        chat = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4, "temperature": 0}
        completion = {"prompt": "hello there", "max_tokens": 4, "temperature": 0}
        return (
            ask(port, "GET", "/v1/models"),
            ask(port, "GET", "/v1/models", key=KEY),
            ask(port, "POST", "/v1/completions", completion, KEY),
            ask(port, "POST", "/v1/chat/completions", chat, KEY),
        )

    graphs = "--cuda-graph-impl local --inference-cuda-graph-scope block --inference-dynamic-batching-num-cuda-graphs 2"
    argv = ["--model", str(llama), "--api-key-file", str(tmp_path / "key"), *shlex.split(graphs)]
    found, said = serve(argv, talk, ends_with)
    shown = capsys.readouterr()
    assert found == code, shown.err
    refused, models, completion, chat = said
    assert refused[0] == 401
    assert models[1]["data"][0]["id"] == llama.name
    assert completion[0] == chat[0] == 200
    # The tokenizer puts its token in front of one, the template in front of the other.
    assert chat[1]["choices"][0]["message"]["content"] == completion[1]["choices"][0]["text"]
    assert chat[1]["usage"]["prompt_tokens"] == completion[1]["usage"]["prompt_tokens"]
    assert "by the model's template" in shown.out
    assert "asked for" in shown.out
    assert "shapes in" in shown.out
    assert KEY not in shown.out + shown.err


@NEEDS_SERVER
def test_address_that_is_taken_is_said_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "nowhere", "--port", str(port)]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@NEEDS_SERVER
def test_model_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "nowhere", "--port", "0", "--device", "cpu"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_options() -> None:
    words = "--model some/folder --max-queue 3 --request-seconds 2.5 --cuda-graph-impl local --served-model-name x"
    options = read_serve_options(shlex.split(words), {"GRAPHSTEP_API_KEY": KEY})
    assert (options.server.max_queue, options.server.request_seconds, options.server.api_key) == (3, 2.5, KEY)
    assert (options.served_model_name, options.scope) == ("x", InferenceCudaGraphScope.layer)
    assert options.server.host == "127.0.0.1"
    options = read_serve_options(["--model", "some/folder"], {})
    assert (options.served_model_name, options.scope) == ("folder", InferenceCudaGraphScope.none)
    assert options.server.api_key is None


def test_all_problems_at_once(tmp_path: Path) -> None:
    words = f"--port 70000 --max-queue x --api-key-file {tmp_path / 'missing'} --prompt hello --lr 1"
    with pytest.raises(ConfigError) as caught:
        read_serve_options(shlex.split(words), {})
    assert {problem.where.split()[0] for problem in caught.value.problems} >= {
        *("--max-queue", "--api-key-file", "--prompt", "--lr", "--model")
    }


def test_key_may_not_be_short(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("short")
    with pytest.raises(ConfigError, match="fewer than 16 characters") as caught:
        read_serve_options(["--model", "x", "--api-key-file", str(tmp_path / "key")], {})
    assert "short" not in str(caught.value)
