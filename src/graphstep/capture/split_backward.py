"""A backward pass in two parts: the gradients of inputs now, those of parameters some time later.

An autograd node that takes both an activation and a weight, such as a matrix product, computes only those of its
gradients that a pass asks for. So the first part runs the chain of nodes that leads to the inputs, and keeps the
gradient that arrives at each node where a branch to parameters leaves that chain. The second part begins at those
nodes, with the kept gradients, and runs the branches alone: nothing of the chain is computed again.

Idea: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from graphstep.engine import torch_private


class TensorHooks(TorchFunctionMode):
    """Notes, while it is active, whether a tensor that is no leaf gets a hook on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.were_registered = False

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.register_hook and args[0].grad_fn is not None:
            self.were_registered = True
        return func(*args, **(kwargs or {}))


@dataclass(slots=True, eq=False)
class _Branch:
    """Parameters whose gradients belong together, and where the second part begins for them."""

    parameters: list[int] = field(default_factory=list)
    """Positions."""
    nodes: dict[Any, None] = field(default_factory=dict)
    """Those of the chain that it leaves."""
    outputs: list[int] = field(default_factory=list)
    """Positions of the outputs that depend on no input but on these parameters."""


class SplitBackward:
    """One backward pass, run by :meth:`input_gradients` and then :meth:`parameter_gradients`, each once.

    The gradients are, bit by bit, those of a pass in one piece. Between the two, everything that autograd has saved is
    kept, and a gradient for each node at which a branch begins.

    Some parameters have their gradient computed in the first part all the same, and kept: where the branch leaves a
    ``torch.autograd.Function`` (it computes all gradients at once), or two places of the chain one of which lies behind
    the other (a weight used twice in a row).

    Args:
        outputs: where the pass begins.
        gradients: theirs.
        inputs: leaves.
        parameters: leaves.
        is_undivided: compute everything in the first part: tensors have hooks on their gradients, which would run
            twice, or what autograd saves is read by computing it again.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        *,
        is_undivided: bool = False,
    ) -> None:
        self._outputs, self._gradients = list(outputs), list(gradients)
        self._inputs, self._parameters = list(inputs), list(parameters)
        graph = _Graph(self._outputs, self._inputs, self._parameters)
        branches = graph.branches()
        self._later = [
            branch
            for branch in branches
            if not is_undivided and not graph.is_in_a_row(branch) and not any(map(_is_in_python, branch.nodes))
        ]
        late = {position for branch in self._later for position in branch.parameters}
        self._at_once = [position for position in range(len(self._parameters)) if position not in late]
        self._found: dict[int, Tensor | None] = {}
        """Gradients of parameters, by position, that the first part has computed."""
        self._arrived: dict[Any, tuple[Tensor | None, ...]] = {}

    def input_gradients(self) -> tuple[Tensor | None, ...]:
        """The first part."""
        wanted = [*self._inputs, *(self._parameters[position] for position in self._at_once)]
        if not wanted or not self._outputs:
            return (None,) * len(self._inputs)
        nodes = [node for branch in self._later for node in branch.nodes]
        # What arrives at a node has been through the hooks on its tensors.
        handles = [node.register_prehook(partial(self._arrived.__setitem__, node)) for node in nodes]
        try:
            found = torch_private.gradients(self._outputs, wanted, self._gradients, keep_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        self._found = dict(zip(self._at_once, found[len(self._inputs) :], strict=True))
        return found[: len(self._inputs)]

    def parameter_gradients(self) -> tuple[Tensor | None, ...]:
        """The second part. Lets go of everything."""
        found = dict(self._found)
        while self._later:
            branch = self._later.pop()
            roots: list[GradientEdge] = [get_gradient_edge(self._outputs[position]) for position in branch.outputs]
            gradients = [self._gradients[position] for position in branch.outputs]
            for node in branch.nodes:
                for number, gradient in enumerate(self._arrived.pop(node, ())):
                    if gradient is not None:
                        roots.append(GradientEdge(node, number))
                        gradients.append(gradient)
            if roots:
                parameters = [self._parameters[position] for position in branch.parameters]
                found.update(zip(branch.parameters, torch_private.gradients(roots, parameters, gradients), strict=True))
        result = tuple(found.get(position) for position in range(len(self._parameters)))
        self.forget()
        return result

    def forget(self) -> None:
        """Let go of everything: the second part will not be run."""
        for each in (self._outputs, self._gradients, self._inputs, self._parameters, self._later):
            each.clear()
        self._found.clear()
        self._arrived.clear()


class _Graph:
    """The nodes behind some outputs, and which of them lead where."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        self._roots = [get_gradient_edge(output).node for output in outputs]
        is_input = {id(tensor) for tensor in inputs}
        position_of = {id(tensor): position for position, tensor in enumerate(parameters)}
        self._chain: set[Any] = set()
        """Those that lead to an input."""
        self._behind: dict[Any, frozenset[int]] = {}
        """For those that lead to parameters only: which, by position."""
        self._nodes = _later_ones_last(self._roots)
        for node in self._nodes:
            following = _following(node)
            variable = id(getattr(node, "variable", None))
            if variable in is_input or any(each in self._chain for each in following):
                self._chain.add(node)
                continue
            reached = [self._behind[each] for each in following if each in self._behind]
            if variable in position_of:
                reached.append(frozenset([position_of[variable]]))
            if reached:
                self._behind[node] = frozenset().union(*reached)

    def branches(self) -> list[_Branch]:
        """The parameters that a pass reaches, and those together that share a beginning."""
        of_parameter: dict[int, _Branch] = {}

        def joined(positions: Iterable[int]) -> _Branch:
            found = dict.fromkeys(of_parameter[each] for each in positions if each in of_parameter)
            first, *others = found or [_Branch()]
            for other in others:
                first.parameters += other.parameters
                first.nodes |= other.nodes
                first.outputs += other.outputs
            first.parameters += sorted(each for each in positions if each not in of_parameter)
            of_parameter.update(dict.fromkeys(first.parameters, first))
            return first

        for node in self._nodes:
            if node in self._chain:
                positions = frozenset().union(*(self._behind.get(each, frozenset()) for each in _following(node)))
                if positions:
                    joined(positions).nodes[node] = None
        for position, node in enumerate(self._roots):
            if node in self._behind:
                joined(self._behind[node]).outputs.append(position)
        return list(dict.fromkeys(of_parameter.values()))

    def is_in_a_row(self, branch: _Branch) -> bool:
        """True if one node at which the branch begins lies behind another one."""
        if len(branch.nodes) < 2:
            return False
        starts = [each for node in branch.nodes for each in _following(node) if each in self._chain]
        return any(node in branch.nodes for node in _later_ones_last(starts))


def _is_in_python(node: Any) -> bool:
    return isinstance(node, BackwardCFunction)


def _following(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _later_ones_last(roots: Iterable[Any]) -> list[Any]:
    """All nodes behind the roots, each after all that follow it in a backward pass."""
    done: dict[Any, None] = {}
    waiting = [(root, False) for root in roots]
    while waiting:
        node, is_entered = waiting.pop()
        if node in done:
            continue
        if is_entered:
            done[node] = None
        else:
            waiting.append((node, True))
            waiting.extend((each, False) for each in _following(node) if each not in done)
    return list(done)
