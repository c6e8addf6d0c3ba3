"""Training: data, gradients, optimizer, schedules, checkpoints, logs, and the loop that uses them.

The loop is in :mod:`graphstep.training.loop`; importing this package alone loads nothing.
"""

from __future__ import annotations
