"""docs/serving.md: its commands can be read, its example runs, and its tables are complete."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs.pages import text_of

from graphstep.cli.main import main
from graphstep.cli.serve_options import read_serve_options

PAGE = text_of("serving.md")
COMMANDS = re.findall(r"^graphstep serve (.*)$", PAGE, re.MULTILINE)
NEEDS_SERVER = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("starlette", "uvicorn", "openai")),
    reason="needs starlette, uvicorn and openai",
)


def test_the_commands_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.txt").write_text("0123456789abcdef0123456789abcdef\n")
    read = [read_serve_options(shlex.split(command), {}) for command in COMMANDS]
    assert [options.server.host for options in read] == ["127.0.0.1", "127.0.0.1", "0.0.0.0"]
    assert [options.served_model_name for options in read] == ["checkpoints", "checkpoints", "small"]


def test_options_of_the_page_exist_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [option for option in set(re.findall(r"`(--[a-z][\w-]+)", PAGE)) if option not in shown] == []
    for option, default in re.findall(r"^\| `(--[\w-]+)` \| ([\d.]+) \|", PAGE, re.MULTILINE):
        assert re.search(rf"{option} .*?\(default: {re.escape(default)}(\.0)?\)", shown), option


@NEEDS_SERVER
def test_the_table_of_metrics_is_complete() -> None:
    from graphstep.server.metrics import Metrics
    from graphstep.server.model import EngineNumbers

    numbers = EngineNumbers(**dict.fromkeys(EngineNumbers.__slots__, 0))
    text = Metrics().render(numbers, is_healthy=True)
    assert set(re.findall(r"# TYPE (\w+)", text)) == set(re.findall(r"`(graphstep_\w+)`", PAGE))


@NEEDS_SERVER
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.server.serving import running

    from graphstep.inference.text import ByteText
    from graphstep.server.model import ServedModel

    [code] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    with running(ServedModel(name="checkpoints", text=ByteText())) as server:
        assert "http://127.0.0.1:8000" in code
        exec(compile(code.replace("http://127.0.0.1:8000", server.url), "serving.md", "exec", dont_inherit=True), {})
        assert server.metric('http_requests_total{path="/v1/completions",status="200"}') == 1
        assert server.metric('http_requests_total{path="/v1/chat/completions",status="200"}') == 1
    assert len(capsys.readouterr().out) > 2
