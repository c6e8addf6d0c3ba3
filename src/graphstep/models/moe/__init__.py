"""Mixture of experts: router, dispatchers, experts, and the layers made of them."""

from __future__ import annotations

from graphstep.models.moe.block import MoEBlock
from graphstep.models.moe.counters import read_and_reset_losses, routers, update_expert_biases
from graphstep.models.moe.dispatcher import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, build_dispatcher
from graphstep.models.moe.experts import Experts, GroupedExperts, PaddedExperts, SequentialExperts, build_experts
from graphstep.models.moe.layer import MoELayer, MoETransformerLayer
from graphstep.models.moe.router import TopKRouter
from graphstep.models.moe.shared_experts import SharedExperts

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Dispatcher",
    "Experts",
    "GroupedExperts",
    "MoEBlock",
    "MoELayer",
    "MoETransformerLayer",
    "PaddedExperts",
    "SequentialExperts",
    "SharedExperts",
    "TopKRouter",
    "build_dispatcher",
    "build_experts",
    "read_and_reset_losses",
    "routers",
    "update_expert_biases",
]
