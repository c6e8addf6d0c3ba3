"""Many captures in a row, each of which collects garbage first, at the price of one collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_once() -> Iterator[None]:
    """Collect garbage now; collections in the body look only at objects that are newer.

    A collection walks all objects of the process, a tenth of a second beside torch. Whoever has frozen objects already
    has them left alone: their collections are short anyway.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
