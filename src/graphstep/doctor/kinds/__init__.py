"""Every kind of finding, by code."""

from __future__ import annotations

from collections.abc import Mapping

from graphstep.doctor.findings import Kind
from graphstep.doctor.kinds.data import DATA
from graphstep.doctor.kinds.host_reads import HOST_READS
from graphstep.doctor.kinds.optimizers import OPTIMIZERS
from graphstep.doctor.kinds.process import PROCESS
from graphstep.doctor.kinds.python_state import PYTHON_STATE
from graphstep.doctor.kinds.randomness import RANDOMNESS
from graphstep.doctor.kinds.shapes import SHAPES
from graphstep.doctor.kinds.tensors import TENSORS
from graphstep.doctor.kinds.weights import WEIGHTS

SUBJECTS: Mapping[str, tuple[Kind, ...]] = {
    "Values read on the host": HOST_READS,
    "Shapes that depend on values": SHAPES,
    "Tensors from the host": TENSORS,
    "State that Python keeps": PYTHON_STATE,
    "Random numbers": RANDOMNESS,
    "Weights, buffers and gradients": WEIGHTS,
    "Optimizer": OPTIMIZERS,
    "Data": DATA,
    "Process, streams and wrappers": PROCESS,
}
"""The kinds, in the order of the page."""

KINDS: Mapping[str, Kind] = {kind.code: kind for kinds in SUBJECTS.values() for kind in kinds}
"""The kinds, by code."""
