"""What a step would take with some of it in graphs. docs/plan.md has the formulae with their sources."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from graphstep.planning.calibration import Costs
from graphstep.planning.candidates import Candidate
from graphstep.planning.operations import MODEL, Block, StepLog, peak_bytes
from graphstep.planning.scopes import ITERATION
from graphstep.planning.work import Work


@dataclass(frozen=True, slots=True)
class Launched:
    """The work of a step once some of it is in graphs."""

    work: tuple[Work, ...]
    num_launches: int
    num_graphs: int
    """Launches that are graphs."""
    num_captured: int
    """Launches of an eager step that are in graphs now."""
    num_calls: float
    """Calls of captured regions: a forward with its backward counts as one."""


def two_clocks_us(work: Sequence[Work]) -> float:
    """Time of a step in which the host runs ahead of the device.

    The host issues one launch after another; the device begins each when it has been issued and when the one before is
    done. Where the host waits, it goes on when the device is done. The step ends with the later of the two.
    """
    host = device = 0.0
    for each in work:
        host += each.host_us
        if each.waits:
            host = max(host, device)
        device = max(host, device) + each.device_us if each.num_nodes else device
    return max(host, device)


def scaled(work: Sequence[Work], step_us: float) -> tuple[tuple[Work, ...], float]:
    """Shrink host times, which the profiler stretches, until the two clocks give the step that was measured without it.

    Returns:
        The work, and the factor: between 0 and 1. It is the largest that fits, as the host matters most then.
    """
    if two_clocks_us(work) <= step_us:
        return tuple(work), 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if two_clocks_us(_times(work, middle)) <= step_us:
            low = middle
        else:
            high = middle
    return tuple(_times(work, low)), low


def launched(work: Sequence[Work], candidate: Candidate, costs: Costs, copying: Collection[str] = ()) -> Launched:
    """Put what one graph contains into one launch, where the first of it was.

    A graph contains a region in one direction for one microbatch, or a whole step. A step that is captured whole has no
    waits of the host any more.

    Args:
        work: of an eager step.
        candidate: what is captured.
        costs: of this machine.
        copying: graphs that need a copy first: of arguments, and in the backward of gradients, that are made eagerly.
    """
    if candidate.is_iteration:
        work = [each for each in work if not each.waits]
    groups: list[tuple[bool, list[Work]]] = []
    places: dict[tuple[object, ...], int] = {}
    for each in work:
        graph = None if each.waits else candidate.graph_of(each.scope)
        if graph is None:
            groups.append((False, [each]))
            continue
        key = (graph,) if candidate.is_iteration else (graph, each.is_backward, each.microbatch)
        if key not in places:
            places[key] = len(groups)
            groups.append((True, []))
        groups[places[key]][1].append(each)
    copies = Work("", False, costs.eager_operation_us, costs.small_kernel_us)
    found: list[Work] = []
    for is_graph, group in groups:
        if is_graph and candidate.graph_of(group[0].scope) in copying:
            found.append(copies)
        found.append(_one_launch(group, candidate, costs) if is_graph else group[0])
    num_graphs = len(places)
    return Launched(
        tuple(found),
        sum(not each.waits for each in found),
        num_graphs,
        sum(len(group) for is_graph, group in groups if is_graph),
        float(num_graphs) if candidate.is_iteration else num_graphs / 2,
    )


def _one_launch(group: Sequence[Work], candidate: Candidate, costs: Costs) -> Work:
    call_us = costs.iteration_call_us if candidate.is_iteration else costs.region_call_us / 2
    num_nodes = sum(each.num_nodes for each in group)
    busy_us = sum(each.device_us for each in group) + num_nodes * costs.graph_gap_us
    return Work(group[0].scope, group[0].is_backward, call_us, busy_us, num_nodes, microbatch=group[0].microbatch)


def predicted_us(after: Launched, candidate: Candidate, costs: Costs, *, step_us: float, has_device: bool) -> float:
    """Time of a step with a candidate captured.

    Args:
        after: its launches; on a GPU with scaled host times.
        candidate: what is captured.
        costs: of this machine.
        step_us: the eager step.
        has_device: False: the operations were counted, and everything but their launches stays as it is.
    """
    if has_device:
        return two_clocks_us(after.work)
    saved = after.num_captured * (costs.eager_operation_us - costs.graph_operation_us)
    calls = after.num_calls * (costs.iteration_call_us if candidate.is_iteration else costs.region_call_us)
    return max(0.0, step_us - saved + calls)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a candidate needs."""

    pool_bytes: int
    static_bytes: int
    extra_bytes: int
    """What they add to the peak of an eager step: memory that eager steps use again is no longer free for the rest."""


def memory_need(log: StepLog, candidate: Candidate, *, shares_memory: bool) -> MemoryNeed:
    """Memory of the graphs of a candidate, from the blocks that an eager step allocated.

    Args:
        log: of an eager step.
        candidate: what is captured.
        shares_memory: graphs use each other's memory again, as on a GPU; False: each tape has its own.
    """

    def is_inside(block: Block) -> bool:
        return candidate.graph_of(block.scope) is not None

    # A gradient that autograd keeps as it is in an eager step is added to its place by a graph, and then done with.
    blocks = [
        replace(block, died=block.born + 1) if block.outlives and block.is_backward else block for block in log.blocks
    ]
    inside = [block for block in blocks if not block.outlives and is_inside(block)]
    if shares_memory:
        pool = peak_bytes(inside)
    else:
        # The recordings of a microbatch serve all of them, one after another; a whole step has its own for each.
        counted = [
            sum(block.nbytes for block in inside if candidate.is_iteration or block.microbatch == number)
            for number in range(max(1, log.num_microbatches))
        ]
        pool = max(counted, default=0)
    static = sum(copied_bytes(log, candidate).values())
    rest = log.peak_bytes(lambda block: not is_inside(block))
    return MemoryNeed(pool, static, max(0, pool + static + rest - log.peak_bytes()))


def copied_bytes(log: StepLog, candidate: Candidate) -> dict[str, int]:
    """For each graph of a candidate that reads what is made eagerly, the bytes that are copied before its forward."""
    if candidate.is_iteration:
        nbytes = sum(sum(entry.nbytes) for entry in log.entries if entry.scope == ITERATION)
        return {ITERATION: nbytes} if nbytes else {}
    needs: dict[str, int] = {}
    seen: dict[tuple[int, int], str] = {}
    previous: str | None = None
    for entry in log.entries:
        graph = candidate.graph_of(entry.scope)
        if graph is not None and graph != previous:
            copied = 0
            for place, (nbytes, maker) in enumerate(zip(entry.nbytes, entry.made_by, strict=True)):
                if maker == MODEL or (maker is not None and candidate.graph_of(maker) is not None):
                    continue
                # What several regions are given is copied for the first of them.
                if not entry.memory or seen.setdefault((entry.microbatch, entry.memory[place]), graph) == graph:
                    copied += nbytes
            if copied:
                needs[graph] = max(needs.get(graph, 0), copied)
        previous = graph
    return needs


def _times(work: Sequence[Work], factor: float) -> list[Work]:
    return [replace(each, host_us=each.host_us * factor) for each in work]
