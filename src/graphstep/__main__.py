"""``python -m graphstep``."""

from __future__ import annotations

import sys

from graphstep.cli.main import main

sys.exit(main())
