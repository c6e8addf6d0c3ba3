"""Options of whole steps and optimizer graphs, checked where they are given."""

from __future__ import annotations

from graphstep.config.switches import CapturePolicy, MismatchPolicy
from graphstep.config.validation import to_member
from graphstep.errors import ConfigError, Problem

_SEEN_LATE = ": what a step does with gradients is seen in its second call"


def checked(
    where: str,
    *,
    warmup_steps: int,
    least_warmup: int = 0,
    max_graphs: int = 1,
    policy: CapturePolicy | str = CapturePolicy.required,
    on_mismatch: MismatchPolicy | str = MismatchPolicy.recapture,
) -> tuple[CapturePolicy, MismatchPolicy]:
    """The policies as members, by name or as they are.

    Args:
        where: who was given them.
        warmup_steps: eager calls before a capture.
        least_warmup: least number of these.
        max_graphs: most graphs, at least one.
        policy: see :class:`CapturePolicy`.
        on_mismatch: see :class:`MismatchPolicy`.

    Raises:
        ConfigError: a number or policy that there is not; names them all.
    """
    problems = []
    if warmup_steps < least_warmup:
        what = f"cuda_graph_warmup_steps is {warmup_steps}{_SEEN_LATE if least_warmup > 1 else ''}"
        problems.append(Problem("warmup-steps", what, where, f"use {least_warmup} or more"))
    if max_graphs < 1:
        problems.append(Problem("max-graphs", f"max_graphs is {max_graphs}", where, "use 1 or more"))
    members: tuple[CapturePolicy, MismatchPolicy] = CapturePolicy.required, MismatchPolicy.recapture
    try:
        members = to_member(CapturePolicy, policy, "policy"), members[1]
    except ConfigError as error:
        problems += error.problems
    try:
        members = members[0], to_member(MismatchPolicy, on_mismatch, "on_mismatch")
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return members
