"""Why a call ran eagerly: a text for people, a code for programs, and what a user can do about it."""

from __future__ import annotations

from enum import StrEnum


class EagerReason(StrEnum):
    """Why a call of a region was not replayed. Each member: the text that reports show, then the advice for it.

    A member is its text, so it counts under the same key of a ``Counter`` as the plain string.
    """

    advice: str
    """What a user can do about it, or why nothing has to be done."""

    NOT_CAPTURED_YET = (
        "not captured yet",
        "Nothing, if it is one of the first steps: graphs are captured once a step with a backward is complete. If it "
        "stays, update the weights after every step or call end_step(), and let go of losses of earlier steps.",
    )
    OBSERVED = (
        "observed",
        "Nothing: the first step runs eagerly, so that the order of forwards and backwards is known.",
    )
    EVALUATION = (
        "evaluation",
        "Nothing: training graphs never serve evaluation (grad mode or training flags off). If it was meant to train, "
        "call model.train() and leave torch.no_grad().",
    )
    RECOMPUTE = (
        "recompute or offloading of saved tensors",
        "A replay saves nothing for autograd. Put torch.utils.checkpoint inside the captured region, or do without "
        "recompute and offloading for the modules that are to replay.",
    )
    CACHED_WEIGHTS = (
        "parametrized weights are cached",
        "Within parametrize.cached() calls share weights that were computed outside of the graphs. Leave it out around "
        "modules that are to replay.",
    )
    OTHER_SIGNATURE = (
        "another signature",
        "The report lists what differs. Pad to the captured shape or drop the incomplete batch; or use "
        "on_mismatch='recapture', which captures a signature that comes back.",
    )
    STATEFUL_ARGUMENT = (
        "an argument is an object that the call may change",
        "A graph would not change it again. Such is a cache of keys and values: pass use_cache=False in training.",
    )
    MORE_IN_FLIGHT = (
        "more microbatches in flight than at capture",
        "Let the first step have the largest number of microbatches in flight, or run backwards earlier and let go of "
        "losses whose backward never runs.",
    )
    OUT_OF_ORDER = (
        "out of the order of the first step",
        "Forwards and backwards share memory in the order of the first step. Keep that order, or let the first step "
        "run the order of all later ones.",
    )
    WRITTEN_BETWEEN = (
        "written between merged layers",
        "Layers of one graph run when the first of them is called. Write into weights and buffers before that, or "
        "launch each layer by itself: merge_layers=1.",
    )
    MOVED_ARGUMENT = (
        "an argument that the model owns has moved",
        "Write into the parameter or buffer (copy_, add_) instead of replacing it, or attach again after replacing it.",
    )
    RESULT_HELD = (
        "an earlier result is still held",
        "A replay would overwrite it. Clone what is kept beyond its backward (result.detach().clone()), and delete the "
        "other references.",
    )
    NEW_HOOK = (
        "a parameter got a hook on its gradient after the capture",
        "Register hooks on parameters before the first step, or attach again after registering one.",
    )
    PLACE_IN_USE = (
        "the place of its argument is in use",
        "An earlier call still needs the static input. Run its backward first, or let go of its result if that is not "
        "wanted any more.",
    )
    CHANGED_ATTRIBUTE = (
        "an attribute or hook changed after the capture",
        "A graph keeps the value that Python had at capture. Set it before the first step or keep it in a buffer; set "
        "it back to replay again.",
    )
    NO_GRADIENT = (
        "no gradient in the first step",
        "Nothing, if the region is frozen. Otherwise let the first step have a backward that reaches it, and return "
        "results instead of writing them into an argument.",
    )
    CAPTURE_FAILED = (
        "its capture failed",
        "The report has the cause and the line. Change that line, or leave the region out; policy='required' makes it "
        "an error.",
    )
    POLICY_OFF = (
        "the policy is off",
        "Nothing is captured with policy='off'; use 'auto' or 'required' to capture.",
    )
    NESTED_CAPTURE = (
        "inside another capture",
        "Nothing: the graph around it contains the call. Leave that capture out if the region is to own its graph.",
    )
    TRANSFORMED = (
        "inside a function transform",
        "A replay is opaque to torch.func and forward-mode gradients. Transform the model before graphs are attached, "
        "or close them first.",
    )
    CLOSED = (
        "closed",
        "Attach again to capture again.",
    )
    TOO_MANY_SIGNATURES = (
        "more signatures than allowed",
        "Pad to fewer shapes (buckets), or raise max_signatures (of a whole step: max_graphs) if there is memory for "
        "more graphs.",
    )
    PARTIAL_BACKWARD = (
        "computed again in the backward",
        "The report has what was used otherwise. Let every loss use the same results of the region as the loss of the "
        "first step; where a graph holds several layers, launch each by itself: merge_layers=1.",
    )

    def __new__(cls, text: str, advice: str) -> EagerReason:
        """Make the member equal to its text."""
        member = str.__new__(cls, text)
        member._value_ = text
        member.advice = advice
        return member

    @property
    def code(self) -> str:
        """Stable short name, such as ``not-captured-yet``. The text may change, this does not."""
        return self.name.lower().replace("_", "-")


def reason_of(text: str) -> EagerReason | None:
    """The member with this text; None for a text of a strategy's own, such as ``warmup``."""
    return next((reason for reason in EagerReason if reason == text), None)


def advice(reason: str) -> str:
    """What a user can do about a reason, given as member or text; empty for a text of a strategy's own."""
    found = reason_of(reason)
    return found.advice if found is not None else ""
