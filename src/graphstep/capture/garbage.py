"""Many captures in a row, each of which collects garbage first, at the price of one collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_once() -> Iterator[None]:
    """Collect garbage now, and keep the collector off for the body: captures in it do not collect again.

    A collection walks all objects of the process, a tenth of a second beside torch.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
