"""Reasons for eager calls: texts, codes and advice."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter

import pytest

from graphstep.capture.reasons import EagerReason, advice, reason_of

TEXTS = {
    "not-captured-yet": "not captured yet",
    "observed": "observed",
    "evaluation": "evaluation",
    "recompute": "recompute or offloading of saved tensors",
    "cached-weights": "parametrized weights are cached",
    "other-signature": "another signature",
    "more-in-flight": "more microbatches in flight than at capture",
    "out-of-order": "out of the order of the first step",
    "written-between": "written between merged layers",
    "moved-argument": "an argument that the model owns has moved",
    "result-held": "an earlier result is still held",
    "new-hook": "a parameter got a hook on its gradient after the capture",
    "place-in-use": "the place of its argument is in use",
    "changed-attribute": "an attribute or hook changed after the capture",
    "no-gradient": "no gradient in the first step",
    "capture-failed": "its capture failed",
    "policy-off": "the policy is off",
    "nested-capture": "inside another capture",
    "transformed": "inside a function transform",
    "closed": "closed",
    "too-many-signatures": "more signatures than allowed",
    "partial-backward": "computed again in the backward",
    "stateful-argument": "an argument is an object that the call may change",
}


def test_codes_and_texts_stay_as_they_are() -> None:
    """Programs read the codes, and reports of earlier runs hold the texts."""
    assert {reason.code: reason.value for reason in EagerReason} == TEXTS


@pytest.mark.parametrize("reason", EagerReason)
def test_every_reason_has_advice(reason: EagerReason) -> None:
    assert advice(reason) == advice(str(reason)) == reason.advice
    assert re.fullmatch(r"[A-Z].{20,}\.", reason.advice)


def test_a_reason_is_its_text() -> None:
    counts = Counter({"another signature": 2})
    counts[EagerReason.OTHER_SIGNATURE] += 1
    assert counts == {"another signature": 3}
    assert f"{EagerReason.CLOSED}" == "closed"
    assert json.dumps({EagerReason.CLOSED: EagerReason.CLOSED}) == '{"closed": "closed"}'


def test_a_reason_is_found_by_its_text() -> None:
    assert reason_of("evaluation") is EagerReason.EVALUATION
    assert EagerReason("evaluation") is EagerReason.EVALUATION
    assert reason_of("warmup") is None
    assert advice("warmup") == ""


def test_a_reason_crosses_processes() -> None:
    again = pickle.loads(pickle.dumps(EagerReason.RESULT_HELD))
    assert again is EagerReason.RESULT_HELD
    assert again.advice == EagerReason.RESULT_HELD.advice
