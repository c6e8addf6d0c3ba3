"""Gradients that would be accumulated on the default stream, from inside of a capture: their leaves are set right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphstep.capture.session import GraphSession
from graphstep.engine import data_parallel, leaf_nodes

SET_UP_AGAIN: Final = "warmup after DistributedDataParallel was set up again on the stream of the capture"


class LeafStreams:
    """Sees in eager runs which leaves have nodes of the default stream, and gives them nodes of the capture stream.

    Such nodes are those of DistributedDataParallel where it was built as usual, and of a loss that the loop has kept
    from an eager step. The default stream cannot wait for what is being captured, so a capture that reached them would
    fail. Other streams can.

    Args:
        session: whose capture stream it is.
    """

    def __init__(self, session: GraphSession) -> None:
        self._session = session
        self.problem: str | None = None
        """Why a wrapper has kept its nodes, if one has."""

    def run(
        self, function: Callable[[], Any], modules: Iterable[nn.Module], others: Iterable[Tensor]
    ) -> tuple[Any, bool]:
        """Run ``function`` on the capture stream, and set right afterwards what it has shown.

        Returns:
            Its result, and whether a wrapper was set up again: it has to warm up from the start.
        """
        device = self._session.device
        if device.type != "cuda" or not torch.is_grad_enabled():
            return function(), False
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        leaves = {id(p): p for p in (*own, *others) if p.requires_grad and p.is_leaf and p.device == device}
        with leaf_nodes.streams_noted(leaves.values(), lambda: torch.cuda.current_stream(device).cuda_stream) as found:
            result = function()
        default = torch.cuda.default_stream(device).cuda_stream
        return result, self.set_right([leaves[number] for number, stream in found.items() if stream == default])

    def give_up_backward(self, modules: Iterable[nn.Module]) -> bool:
        """After a capture that has failed, maybe in the middle of a backward: have wrappers not wait for its rest.

        Returns:
            Whether one was set up again for it.
        """
        is_anew = False
        with self._session.engine.capture_stream():
            for module in modules:
                if isinstance(module, DistributedDataParallel):
                    is_anew |= data_parallel.give_up_backward(module)
        return is_anew

    def set_right(self, leaves: Iterable[Tensor]) -> bool:
        """Give these leaves nodes of the capture stream. Returns whether a wrapper was set up again for it."""
        stale = {id(leaf): leaf for leaf in leaves}
        if not stale:
            return False
        is_anew = False
        with self._session.engine.capture_stream():
            for wrapper in _wrappers_of(stale):
                self.problem = data_parallel.why_not_anew(wrapper)
                if self.problem is None:
                    data_parallel.set_up_anew(wrapper)
                    is_anew = True
                for parameter in wrapper.parameters():
                    stale.pop(id(parameter), None)  # Where it could not be: a new node would not have its hooks.
            for leaf in stale.values():
                leaf_nodes.renew(leaf)
        return is_anew


def _wrappers_of(leaves: dict[int, Tensor]) -> list[DistributedDataParallel]:
    """All that have one of these as a parameter, wherever they are: the model of a step may be a part of one."""
    wrappers = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
    return [wrapper for wrapper in wrappers if any(id(parameter) in leaves for parameter in wrapper.parameters())]
