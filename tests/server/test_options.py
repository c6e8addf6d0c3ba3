"""What a server may be started with."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.serving import KEY

from graphstep.errors import ConfigError
from graphstep.server.http_server import address_of, bind
from graphstep.server.options import ServerOptions


def test_default_is_this_machine_alone() -> None:
    assert ServerOptions().is_local
    assert ServerOptions(host="::1").is_local
    assert ServerOptions(host="localhost").is_local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "some.host", ""])
def test_others_are_let_in_only_with_a_key_or_on_demand(host: str) -> None:
    with pytest.raises(ConfigError, match="there is no API key"):
        ServerOptions(host=host)
    assert not ServerOptions(host=host, api_key=KEY).is_local
    assert not ServerOptions(host=host, allows_no_key=True).is_local


@pytest.mark.parametrize(
    "changes",
    [
        {"port": -1},
        {"port": 65536},
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"max_prompt_tokens": 0},
        {"request_seconds": 0.0},
        {"request_seconds": float("nan")},
        {"body_seconds": float("inf")},
        {"api_key": ""},
        {"api_key": "short"},
        {"api_key": "with a line\nbreak, and long enough"},
        {"api_key": "\u00e4" * 20},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(**changes)
    assert len(caught.value.problems) == 1


def test_all_problems_at_once_and_no_key_in_what_is_printed() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(port=-1, max_queue=-1, host="0.0.0.0")
    assert [problem.code for problem in caught.value.problems] == ["serve-port", "serve-limit", "serve-open"]
    assert KEY not in repr(ServerOptions(api_key=KEY))


def test_address_that_is_taken() -> None:
    with bind(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        listener.listen()
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
            bind(ServerOptions(port=port))


def test_host_that_is_not_of_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bind(ServerOptions(host="203.0.113.1", port=0, allows_no_key=True))
