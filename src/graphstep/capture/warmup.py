"""Eager runs of a region before its capture: what it uses, and whether it can be captured at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphstep.capture.fast_check import all_same
from graphstep.capture.gradients import hooks_off, leaves_reached, moment, reaches_outside
from graphstep.capture.observe import Observation
from graphstep.capture.parameter_aliases import ParameterAliases
from graphstep.capture.randomness import NoRandomness
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import versions_of
from graphstep.capture.tree import flatten, unflatten
from graphstep.engine import torch_private
from graphstep.engine.user_frame import user_line_of
from graphstep.errors import CaptureError


def warm_up(
    region: Region,
    signature: Signature,
    inputs: Sequence[Tensor],
    session: GraphSession,
    *,
    num_runs: int,
    aliases: ParameterAliases,
) -> tuple[list[Tensor], Observation]:
    """Run both halves of a region eagerly, and undo what they did.

    Args:
        region: what runs.
        signature: of the call.
        inputs: its argument tensors, flat. Static ones where they are known, so that what a module keeps by address
            or identity is found wrong now and not later.
        session: whose engine runs it.
        num_runs: at least one is done.
        aliases: of the region's parameters; installed meanwhile.

    Returns:
        The leaves that get a gradient, and what the runs touched.

    Raises:
        CaptureError: the region changes its arguments, or wants the gradient of a tensor from outside of it.
    """
    own = {id(tensor) for tensor in inputs}
    trained: list[Tensor] = []

    def call() -> list[Tensor]:
        carried = unflatten(signature.structure, inputs)
        arguments, named = carried
        with signature.ambient.entered(session.device.type):
            results = flatten(region.function(*arguments, **named))[0]
        tensors, structure = flatten(carried)
        if structure != signature.structure or not all_same(inputs, tensors):
            raise CaptureError(
                "this region changes a list, dict or object among its arguments; a replay would change a copy",
                where=region.name,
                fix="return what is new, or leave this module out of the captured ones",
            )
        return results

    def both_halves() -> None:
        torch.clear_autocast_cache()  # The caller may be inside of autocast, and the last run has filled it.
        versions = versions_of(inputs)
        start = moment()
        try:
            outputs = [output for output in call() if output.requires_grad]
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise _writes_into_arguments(region, str(user_line_of(error) or "")) from error
        if versions_of(inputs) != versions:
            raise _writes_into_arguments(region)
        if reaches_outside(outputs, start):
            raise CaptureError(
                "this region reads a tensor that was computed outside of it and wants a gradient, but is no argument "
                "of it",
                where=region.name,
                fix="give it as an argument, or compute it inside; weights that a hook of the module puts together "
                "(weight_norm) are computed outside: capture a module around it",
            )
        leaves = [leaf for leaf in leaves_reached(outputs) if id(leaf) not in own]
        if outputs:
            # Not `backward`: that would accumulate.
            wanted = [*leaves, *(tensor for tensor in inputs if tensor.requires_grad)]
            with hooks_off(leaves), NoRandomness(region.name):
                found = torch_private.gradients(outputs, wanted, [torch.zeros_like(o) for o in outputs])
            used = [leaf for leaf, gradient in zip(leaves, found, strict=False) if gradient is not None]
            trained[:] = [aliases.original_of(leaf) for leaf in used]

    with aliases.installed():
        observation = session.observe(both_halves, num_runs=max(1, num_runs))
    return trained, observation


def _writes_into_arguments(region: Region, line: str = "") -> CaptureError:
    return CaptureError(
        "this region writes into its arguments; a replay would write into copies of them",
        where="; ".join(filter(None, [region.name, line])),
        fix="use an operation that makes a new tensor, such as x + y instead of x.add_(y)",
    )
