"""Generation: a batch that requests join and leave, over a key-value cache in blocks."""

from __future__ import annotations
