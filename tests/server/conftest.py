"""A server that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.serving import RunningServer, running, wait_for


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    with running(body_seconds=1.0, idle_seconds=1, max_body_bytes=20_000, max_queue=400, max_choices=16) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """Nothing of any request may be left when a test ends, and the server has to go on."""
    yield shared_server
    shared_server.slow.seconds = 0
    assert wait_for(shared_server.is_idle)
    assert shared_server.ask("GET", "/health")[0] == 200
    assert shared_server.complete()[0] == 200
