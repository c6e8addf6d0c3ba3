"""The compiled part, where there is a compiler."""

from __future__ import annotations

import os

import pytest

from graphstep.native.build import Build
from graphstep.native.interface import FastPath


@pytest.fixture(scope="session")
def fast() -> FastPath:
    """The compiled part; tests that need it are skipped where it cannot be had."""
    build = Build(os.environ)
    found = build.wait()
    if found is None:
        pytest.skip(f"needs the compiled part: {build.why_not}")
    return found
