"""Which options fit which scenario, and why: one table, read by ``graphstep advise`` and the docs.

Source: Megatron-LM's guide to CUDA graphs (when to choose which implementation), and what its code demands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Scenario(StrEnum):
    """What is to be captured."""

    dense = "dense"
    """Training a model whose layers are all attention and MLP."""
    moe = "moe"
    """Training a model with experts."""
    hybrid = "hybrid"
    """Training a model with Mamba layers."""
    inference = "inference"
    """Generating text."""
    rl = "rl"
    """Training on text that the model generates itself."""
    own_loop = "own-loop"
    """A training loop of the user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the advice depends on."""

    scenario: Scenario
    """What is to be captured."""
    dynamic_shapes: bool = False
    """Sequences or batches change their size from step to step."""
    pipeline: int = 1
    """Pipeline stages."""
    experts_parallel: int = 1
    """Ranks that share the experts."""
    drop_and_pad: bool = False
    """Each expert gets a fixed number of tokens: what is beyond is dropped, what is missing is padded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Options, and why."""

    scenarios: frozenset[Scenario]
    """Where it applies."""
    options: str
    """Options as typed; empty: a remark."""
    reason: str
    """Why, in a sentence or two."""
    applies: Callable[[Facts], bool] = lambda facts: True
    """On which of the facts it depends."""


def advise(facts: Facts) -> list[Advice]:
    """Return what to set, in the order of the table: one implementation first, then what goes with it.

    Args:
        facts: the scenario and what is known about it.
    """
    return [row for row in ADVICE if facts.scenario in row.scenarios and row.applies(facts)]


_DENSE, _MOE, _HYBRID = Scenario.dense, Scenario.moe, Scenario.hybrid
_INFERENCE, _RL, _OWN = Scenario.inference, Scenario.rl, Scenario.own_loop
_TRAINING = frozenset({_DENSE, _MOE, _HYBRID, _OWN})


def _is_one_graph(facts: Facts) -> bool:
    """Can forward and backward of a whole step be one graph?"""
    return _has_static_layers(facts) and not facts.dynamic_shapes


def _has_static_layers(facts: Facts) -> bool:
    """Can all of a layer be inside of a graph?"""
    return facts.scenario is not _MOE or facts.drop_and_pad or facts.experts_parallel == 1


def _is_pipeline(facts: Facts) -> bool:
    """Are layers captured one by one, in an order that a pipeline prescribes?"""
    return not _is_one_graph(facts) and facts.pipeline > 1 and not facts.dynamic_shapes


def _is_local(facts: Facts) -> bool:
    return not _is_one_graph(facts) and not _is_pipeline(facts)


ADVICE: tuple[Advice, ...] = (
    Advice(
        scenarios=_TRAINING,
        options="--cuda-graph-impl full_iteration",
        reason="shapes are the same in every step, so that forward and backward of all microbatches fit in one graph: "
        "one launch a step, and nothing for the host to do in between",
        applies=_is_one_graph,
    ),
    Advice(
        scenarios=_TRAINING,
        options="--no-check-for-nan-in-loss-and-grad",
        reason="looking for NaN reads a value on the host, which cannot happen inside a graph",
        applies=_is_one_graph,
    ),
    Advice(
        scenarios=_TRAINING,
        options="--cuda-graph-impl transformer_engine",
        reason="a pipeline runs the microbatches of a layer in an order that is known beforehand: a graph for each "
        "layer and microbatch is captured in this order, once",
        applies=_is_pipeline,
    ),
    Advice(
        scenarios=_TRAINING,
        options="--cuda-graph-impl local",
        reason="graphs a layer, in the order in which the first step ran them; the rest of the step stays eager beside "
        "them",
        applies=_is_local,
    ),
    Advice(
        scenarios=frozenset({_MOE}),
        options="--cuda-graph-modules attn moe_router moe_preprocess",
        reason="how many tokens an expert gets changes from step to step: attention, router and what prepares the "
        "dispatch are captured, the experts run eagerly",
        applies=lambda facts: not _has_static_layers(facts),
    ),
    Advice(
        scenarios=frozenset({_MOE}),
        options="--moe-grouped-gemm --disable-bias-linear --bf16",
        reason="all experts of one rank are one grouped matrix multiplication that finds the rows of each on the "
        "device: shapes are static, and no token is dropped",
        applies=lambda facts: facts.experts_parallel == 1 and not facts.drop_and_pad,
    ),
    Advice(
        scenarios=frozenset({_MOE}),
        options="--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
        reason="with a fixed capacity each expert has the same shapes in every step, and can be captured; tokens "
        "beyond it are dropped",
        applies=lambda facts: facts.drop_and_pad,
    ),
    Advice(
        scenarios=frozenset({_MOE}),
        options="--moe-token-dispatcher-type alltoall",
        reason="each rank sends tokens only to the ranks of their experts, and the sizes are known before the dispatch",
        applies=lambda facts: facts.experts_parallel > 1,
    ),
    Advice(
        scenarios=frozenset({_HYBRID}),
        options="--cuda-graph-modules mamba attn",
        reason="Mamba and attention layers have many short kernels; the others stay eager, whatever they are",
        applies=lambda facts: facts.dynamic_shapes,
    ),
    Advice(
        scenarios=frozenset({_INFERENCE, _RL}),
        options="--cuda-graph-impl local",
        reason="only local makes inference graphs",
    ),
    Advice(
        scenarios=frozenset({_INFERENCE, _RL}),
        options="--inference-cuda-graph-scope block",
        reason="one graph for the whole model: a decode step is one launch",
        applies=lambda facts: facts.experts_parallel == 1,
    ),
    Advice(
        scenarios=frozenset({_INFERENCE, _RL}),
        options="--inference-cuda-graph-scope layer",
        reason="one graph a layer leaves room for the exchange between the ranks of the experts, which may not be "
        "capturable",
        applies=lambda facts: facts.experts_parallel > 1,
    ),
    Advice(
        scenarios=frozenset({_MOE, _INFERENCE, _RL}),
        options="--moe-pad-experts-for-cuda-graph-inference",
        reason="local makes inference graphs too, and they need experts with the same shapes on all ranks",
        applies=lambda facts: facts.experts_parallel > 1 and (facts.scenario is not _MOE or _is_local(facts)),
    ),
    Advice(
        scenarios=frozenset({_INFERENCE, _RL}),
        options="--inference-dynamic-batching-num-cuda-graphs 16",
        reason="one graph for each of 16 batch sizes: a batch is padded to the next one, so that more of them waste "
        "less and take more memory",
        applies=lambda facts: facts.dynamic_shapes,
    ),
    Advice(
        scenarios=frozenset({_INFERENCE}),
        options="--decode-only-cuda-graphs",
        reason="a prefill is long enough to keep the GPU busy by itself; decode steps are what the host slows down",
        applies=lambda facts: not facts.dynamic_shapes,
    ),
    Advice(
        scenarios=frozenset({_RL}),
        options="--rl-persist-cuda-graphs",
        reason="the graphs of the rollout are kept while the policy is trained, and not captured anew for each rollout",
    ),
    Advice(
        scenarios=frozenset({_RL}),
        options="--rl-training-cuda-graphs",
        reason="the update has the same shapes each time, so that it can be captured as well",
        applies=lambda facts: not facts.dynamic_shapes,
    ),
    Advice(
        scenarios=_TRAINING,
        options="",
        reason="a graph belongs to one shape: pad sequences to one length, or a few, so that few graphs are captured. "
        "A further shape is captured once --cuda-graph-capture-after steps have had it, and each layer keeps graphs "
        "for --cuda-graph-max-signatures of them",
        applies=lambda facts: facts.dynamic_shapes,
    ),
    Advice(
        scenarios=_TRAINING,
        options="",
        reason="a layer that cannot be captured ends the run with the reason; --cuda-graph-policy auto runs it eagerly "
        "instead",
        applies=_is_local,
    ),
    Advice(
        scenarios=frozenset({_RL}),
        options="",
        reason="training graphs need rollouts of one length: pad or pack them, then add --rl-training-cuda-graphs",
        applies=lambda facts: facts.dynamic_shapes,
    ),
    Advice(
        scenarios=frozenset({_OWN}),
        options="",
        reason="in your own loop, graphstep.FullCudaGraphWrapper captures a forward-backward function with its static "
        "inputs, and graphstep.GraphSession captures any function; neither needs these options",
    ),
)
"""The table."""

MODEL_OPTIONS: Mapping[Scenario, str] = {
    Scenario.dense: "",
    Scenario.moe: "--num-experts 8",
    Scenario.hybrid: "--hybrid-layer-pattern M*-M",
    Scenario.inference: "",
    Scenario.rl: "--perform-rl-step",
    Scenario.own_loop: "",
}
"""Options of a model or run for which the advice of a scenario can be tried."""


def model_options(facts: Facts) -> str:
    """Return options of a model or run for which the advice can be tried."""
    shares_experts = facts.experts_parallel > 1 and facts.scenario in (_INFERENCE, _RL)
    return " ".join(filter(None, ("--num-experts 8" if shares_experts else "", MODEL_OPTIONS[facts.scenario])))
