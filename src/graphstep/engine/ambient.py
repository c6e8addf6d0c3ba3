"""Process state that must hold still while a capture runs, and is left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def collection_held(*, collect_first: bool = True) -> Iterator[None]:
    """Collect once, then keep the collector off for the body, and leave it as it was found.

    A collection inside a capture could run the destructor of an old graph, which the capture would record or fail on.
    """
    was_enabled = gc.isenabled()
    if collect_first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def casts_forgotten() -> Iterator[None]:
    """Drop autocast's cache of low-precision weights before and after the body.

    A cast made outside would be read by the graph and never refreshed; one made inside lives in the graph's memory and
    must not be used outside. Within the body the cache works as in eager execution, so that a weight used twice is
    cast once and its gradients are summed in the same order.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Use another default dtype in the body. It is process-wide, so it is only touched where it differs."""
    outside = torch.get_default_dtype()
    if dtype is not outside:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        if torch.get_default_dtype() is not outside:
            torch.set_default_dtype(outside)
