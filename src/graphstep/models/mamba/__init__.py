"""Mamba-2: layers with a state instead of attention."""

from __future__ import annotations

from graphstep.models.mamba.layer import MambaLayer
from graphstep.models.mamba.mixer import Mamba2
from graphstep.models.mamba.scan import chunked_scan, recurrent_scan

__all__ = ["Mamba2", "MambaLayer", "chunked_scan", "recurrent_scan"]
