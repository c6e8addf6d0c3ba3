"""CUDA graphs for transformer training and inference on plain PyTorch.

Importing this package does nothing to the process, and loads no torch: public names are imported when they are first used.
"""

from __future__ import annotations

from graphstep.version import __version__

__all__ = ["__version__"]
