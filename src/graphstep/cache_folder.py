"""The folder of files that can be made again: tokens of texts, and what was compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_cache_folder(env: Mapping[str, str]) -> Path | None:
    """``$XDG_CACHE_HOME/graphstep`` or ``~/.cache/graphstep``; None when there is no home folder."""
    base = env.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # The XDG specification: a relative path is ignored.
        return Path(base, "graphstep")
    home = env.get("HOME", "")
    return Path(home, ".cache", "graphstep") if home else None
