"""``python -m graphstep``."""

from __future__ import annotations

import sys

from graphstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
