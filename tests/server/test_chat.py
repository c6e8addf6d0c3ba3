"""How chats are written, by the template of a model or plainly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.server.serving import NAME, running

from graphstep.errors import CheckpointError, ConfigError
from graphstep.inference.text import ByteText
from graphstep.server.chat import ChatFormat
from graphstep.server.chat_files import read_chat_format
from graphstep.server.errors import ApiError
from graphstep.server.model import ServedModel

MESSAGES = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi <b>"})
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
<{{ message.role }}>{{ message.content | trim }}{% endfor %}
{% if add_generation_prompt %}
<assistant>
{%- endif %}"""
WRITTEN = "^<system>Be short.<user>Hi <b><assistant>"


def test_plain_form() -> None:
    assert ChatFormat().render(MESSAGES) == "system: Be short.\nuser: Hi <b>\nassistant:"
    assert ChatFormat().stop == ("\nuser:", "\nsystem:")


def test_template() -> None:
    pytest.importorskip("jinja2")
    chat = ChatFormat.of_template(TEMPLATE, {"bos_token": "^"})
    assert chat.render(MESSAGES) == WRITTEN
    assert chat.stop == ()


def test_template_that_refuses_or_fails_is_an_error_of_the_request() -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(ApiError, match="no tools here"):
        ChatFormat.of_template(TEMPLATE).render([{"role": "tool", "content": "x"}])
    with pytest.raises(ApiError, match="does not take"):
        ChatFormat.of_template("{{ messages[7].content.x }}").render(MESSAGES)


def test_template_cannot_leave_its_sandbox() -> None:
    pytest.importorskip("jinja2")
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ):
        with pytest.raises(ApiError, match="does not take"):
            ChatFormat.of_template(text).render(list(MESSAGES))


def test_malformed_template() -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatFormat.of_template("{% if %}")


def test_where_a_model_keeps_its_template(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    assert read_chat_format(tmp_path).template is None
    config = {"bos_token": {"content": "^"}, "eos_token": None, "chat_template": "{{ bos_token }}A"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_format(tmp_path).render(MESSAGES) == "^A"
    several = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": several}))
    assert read_chat_format(tmp_path).render(MESSAGES) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert read_chat_format(tmp_path).render(MESSAGES) == "F"
    (tmp_path / "other.jinja").write_text("{{ bos_token }}O")
    assert read_chat_format(tmp_path, str(tmp_path / "other.jinja")).render(MESSAGES) == "^O"
    assert read_chat_format(tmp_path, "plain").template is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_chat_format(tmp_path, str(tmp_path / "missing"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError):
        read_chat_format(tmp_path)


class Marked(ByteText):
    """Puts a byte in front of a text, as some tokenizers do."""

    def encode(self, text: str) -> list[int]:
        return [ord("^"), *super().encode(text)]


def test_template_writes_the_tokens_that_begin_a_text() -> None:
    pytest.importorskip("jinja2")
    chat = ChatFormat.of_template("{{ messages[0].content }}")
    model = ServedModel(name=NAME, text=Marked(), chat=chat, chat_text=ByteText())
    with running(model) as server:
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "four"}]}], "max_tokens": 1}
        assert server.ask("POST", "/v1/chat/completions", body)[1]["usage"]["prompt_tokens"] == 4
        assert server.complete("four", max_tokens=1)[1]["usage"]["prompt_tokens"] == 5
        refused = body | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        assert "not text" in server.ask("POST", "/v1/chat/completions", refused)[1]["error"]["message"]
