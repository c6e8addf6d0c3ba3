"""A server that the tests of a file share. Without the packages of the extra ``serve`` none of these tests runs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.serving import RunningServer

collect_ignore_glob = ["test_*.py"] if find_spec("uvicorn") is None or find_spec("starlette") is None else []


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    from tests.server.serving import running

    with running(body_seconds=1.0, idle_seconds=1, max_body_bytes=20_000, max_queue=400, max_choices=16) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """Nothing of any request may be left when a test ends, and the server has to go on."""
    from tests.waiting import wait_for

    yield shared_server
    shared_server.slow.seconds = 0
    assert wait_for(shared_server.is_idle)
    assert shared_server.ask("GET", "/health")[0] == 200
    assert shared_server.complete()[0] == 200
