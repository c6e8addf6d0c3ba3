"""Hands the common case of captured layers to the compiled part: what must hold, and what to launch then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from graphstep.capture.ambient import AmbientState
from graphstep.capture.attributes import Attributes
from graphstep.capture.chain import Chain, NativeRelay
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.graph_triple import GraphTriple
from graphstep.capture.manifest import Watched
from graphstep.capture.merged_backward import by_graph
from graphstep.capture.region import Region
from graphstep.capture.signature import Signature, TensorLayout
from graphstep.capture.tree import Node, Value
from graphstep.engine import compiled_part, kernel_switches
from graphstep.errors import LifecycleError
from graphstep.native.interface import Call, Facts, FastPath, Pattern, Relay
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.sure_starts import Start


def add_backward(fast: FastPath, chain: Chain) -> None:
    """Give a chain of one pair its relay: for its backward, and for the tensors that it hands out."""
    chain.relay = None
    pair = chain.pairs[0]
    if len(chain.pairs) == 1 and _is_common(pair):
        relay = fast.Relay(chain.lane)
        nobody = fast.Call(_never, _never, False)
        _describe(relay, chain, 0, (fast.Facts(), None, nobody), ())
        _add_backward_halves(relay, chain)
        chain.relay = NativeRelay(relay, pair.signature.ambient.key)


def callable_facts(fast: FastPath, pair: GraphPair, attributes: Attributes | None, watched: Watched) -> Facts | None:
    """All that has to be as it was for the forward half of a pair alone, but its arguments; ``None`` if unknown."""
    facts = fast.Facts()
    if isinstance(pair, GraphTriple):
        return None
    if (attributes is not None and not attributes.add_to(facts)) or not _add_modes(facts, pair):
        return None
    watched.fast.add_to(facts)
    for module, is_training in zip(pair.region.modules, pair.signature.training, strict=True):
        facts.entry(module.__dict__, "training", is_training)
    for parameter in pair.accumulated:
        facts.tensor(parameter, parameter.data_ptr(), -1, True, False)
    for function, arguments, expected in compiled_part.unwrapped_answers():
        facts.answer(function, arguments, expected)
    return facts


def _never(*_arguments: Any, **_named: Any) -> None:
    raise LifecycleError("a relay of one step was called", fix="call the module")


def add_relay(fast: FastPath, chain: Chain, regions: Mapping[Region, RegionCalls]) -> None:
    """Give a chain its relay, if all of its steps are of the common kind; else take it away."""
    chain.relay = None
    pairs = chain.pairs
    ambient = pairs[0].signature.ambient
    if len(pairs) < 2:
        add_backward(fast, chain)
        return
    if not all(map(_is_common, pairs)) or any(pair.signature.ambient != ambient for pair in pairs):
        return
    relay = fast.Relay(chain.lane)
    for place, output in chain.handover:
        relay.handover(place, output)
    for index, pair in enumerate(pairs):
        if not _add_step(fast, relay, chain, index, regions[pair.region]):
            return
    _add_backward_halves(relay, chain)
    chain.relay = NativeRelay(relay, ambient.key)


def add_starts(fast: FastPath, calls: RegionCalls, regions: Mapping[Region, RegionCalls]) -> None:
    """Tell a region which of its calls surely begin a run: those with plain arguments, and one set of graphs."""
    starts = []
    for signature, links in calls.links.items():
        pattern = pattern_of(fast, signature)
        chain, index = links[0]
        if pattern is None or len(links) != 1 or chain.pairs[index].forward is None:
            continue
        facts, graph = fast.Facts(), chain.graph_at(index)
        launched = tuple((pair, regions[pair.region]) for pair in graph)
        if _add_modes(facts, graph[0]) and all(called.add_facts(facts, pair) for pair, called in launched):
            for parameter in (parameter for pair in graph for parameter in pair.accumulated):
                facts.tensor(parameter, parameter.data_ptr(), -1, True, False)
            starts.append(Start(chain, index, launched, pattern, facts))
    calls.starts = tuple(starts)


def pattern_of(fast: FastPath, signature: Signature) -> Pattern | None:
    """What the arguments of a call with this signature look like; ``None`` if the compiled part cannot tell."""
    structure, layouts = signature.structure, iter(signature.layouts)
    if signature.repeated or not isinstance(structure, Node) or len(structure.children) != 2:
        return None
    trees = [_tree(child, layouts) for child in structure.children]
    return None if None in trees else fast.Pattern(*(tree for tree in trees if tree is not None))


def _tree(structure: Node | Value, layouts: Iterator[TensorLayout]) -> tuple[Any, ...] | None:
    if isinstance(structure, Value):
        return "value", structure.value
    if structure.kind is None:
        each = next(layouts)
        return (
            "tensor",
            each.shape,
            each.stride,
            each.dtype,
            each.device,
            each.requires_grad,
            each.is_conj,
            each.is_neg,
        )
    known: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict"}
    word = known.get(structure.kind)
    children = [_tree(child, layouts) for child in structure.children]
    if word is None or None in children:
        return None
    return (word, tuple(children), structure.names) if word == "dict" else (word, tuple(children))


def _is_common(pair: GraphPair) -> bool:
    form_is_plain = pair.form.is_tensor or pair.form.is_plain_tuple
    return (
        form_is_plain
        and not isinstance(pair, GraphTriple)
        and not pair.left.places
        and not pair.poisons
        and not any(output.is_inference() for output in pair.outputs)
    )


def _add_step(fast: FastPath, relay: Relay, chain: Chain, index: int, calls: RegionCalls) -> bool:
    pair = chain.pairs[index]
    facts = fast.Facts()
    entry = calls.entry
    if entry is None or not calls.add_facts(facts, pair) or not _add_modes(facts, pair):
        return False
    reads: Sequence[Tensor] = ()
    if pair.forward is None:
        start = max(number for number in range(index) if chain.pairs[number].forward is not None)
        read = chain.read_ahead(start)
        if read is None or read.has_others:
            return False
        reads = read.owned(index - start)
    _describe(relay, chain, index, (facts, calls, entry), reads)
    return True


def _describe(
    relay: Relay, chain: Chain, index: int, called: tuple[Facts, RegionCalls | None, Call], reads: Sequence[Tensor]
) -> None:
    pair = chain.pairs[index]
    given = tuple(gradient is not None for gradient in pair.grad_outputs)  # Asked of the last one only.
    relay.step(
        *called,
        pair,
        pair.stats,
        None if pair.forward is None else pair.forward.launcher(),
        None if pair.backward is None else pair.backward.launcher(),
        (pair.forward_position, pair.backward_position),
        pair.form.is_plain_tuple,
        pair.forward is not None and chain.read_ahead(index) is not None,
        pair.forward is None and pair.kept is not None,
        tuple(pair.outputs),
        tuple(reads),
        tuple(pair.trained),
        tuple(pair.accumulated),
        given if len(given) == len(pair.outputs) else (False,) * len(pair.outputs),
    )


def _add_backward_halves(relay: Relay, chain: Chain) -> None:
    """Tell where gradients come from, go and live, if backward halves are launched one after the other."""
    pairs = chain.pairs
    first, last = pairs[0], pairs[-1]
    graphs = [pairs[start:stop] for start, stop in by_graph(pairs)]
    if len(last.grad_outputs) != len(last.outputs) or any(graph[-1].backward is None for graph in graphs):
        return
    for pair, following in zip(pairs, [*pairs[1:], None], strict=True):
        given = last.grad_outputs if pair is last else [None] * len(pair.outputs)
        if pair.not_reached_from(given, following):
            return  # Of these, gradients that the loss does not reach are taken back after each replay.
    for home in chain.all_homes():
        relay.home(home, home.leaf, home.address, home.is_main_grad)
    wanted = [g for g, tensor in zip(first.grad_inputs, first.inputs, strict=True) if tensor.requires_grad]
    relay.backward(first.session, tuple(last.grad_outputs), (*wanted, *first.exposed_gradients))


def _add_modes(facts: Facts, pair: GraphPair) -> bool:
    """The modes around the call, and what else has to be so in the thread and the process."""
    ambient: AmbientState = pair.signature.ambient
    switches = kernel_switches.readers(ambient.attention_backends, ambient.backend_flags)
    device = next((tensor for tensor in (*pair.outputs, *pair.inputs)), None)
    if switches is None or device is None:
        return False
    enabled, dtype, cache = ambient.autocast
    facts.modes(device, ambient.grad_enabled, ambient.inference_mode, enabled, dtype, cache)
    for read, value in switches:
        facts.answer(read, (), value)
    of_process = compiled_part.process_answers(ambient.deterministic, ambient.matmul_precision, ambient.default_dtype)
    for function, arguments, expected in (*of_process, *compiled_part.thread_answers(device.device.type)):
        facts.answer(function, arguments, expected)
    return True
