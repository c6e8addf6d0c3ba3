"""The table of options is consistent, and covers every field."""

from __future__ import annotations

import dataclasses
import re

import pytest

from graphstep.config import RunConfig, from_argv
from graphstep.config.help import help_text
from graphstep.config.options import OPTIONS, Option

# Megatron-LM's names, and our own --device, --compare-with-eager, --log-jsonl and opposites of switches.
SPELLINGS = """
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels --group-query-attention
--num-query-groups --seq-length --max-position-embeddings --swiglu --normalization --norm-epsilon
--position-embedding-type --rotary-base --rotary-percent --attention-dropout --hidden-dropout --disable-bias-linear
--add-qkv-bias --untie-embeddings-and-output-weights --init-method-std --make-vocab-size-divisible-by --vocab-size
--micro-batch-size --global-batch-size --train-iters --lr --min-lr --lr-decay-style --lr-decay-iters --lr-warmup-iters
--lr-warmup-fraction --lr-warmup-init --lr-wsd-decay-style --lr-wsd-decay-iters --weight-decay --clip-grad --adam-beta1
--adam-beta2 --adam-eps --bf16 --seed --eval-interval --eval-iters --log-interval --save --load --save-interval
--tensorboard-dir --log-jsonl --check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad
--deterministic-mode --device --compare-with-eager --data-path --split --tokenizer-type --tokenizer-model
--data-cache-path --mock-data --append-eod --no-append-eod --cuda-graph-impl --cuda-graph-modules
--cuda-graph-warmup-steps --cuda-graph-use-single-mempool --no-cuda-graph-use-single-mempool
--cuda-graph-retain-backward-graph --optimizer-cuda-graph --inference-cuda-graph-scope
"""


def test_the_options() -> None:
    spellings = [spelling for option in OPTIONS for spelling in option.spellings]
    assert sorted(spellings) == sorted(SPELLINGS.split())


def test_names_are_unique() -> None:
    assert len({option.dest for option in OPTIONS}) == len(OPTIONS)


def test_every_field_has_an_option() -> None:
    config = RunConfig()
    fields = {
        (name, field.name)
        for name in ("model", "training", "data", "graphs")
        for field in dataclasses.fields(getattr(config, name))
    }
    assert {(option.section, option.target) for option in OPTIONS if option.section} == fields


def test_the_defaults_are_those_of_the_dataclasses() -> None:
    assert from_argv([]) == RunConfig()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.dest)
def test_an_option_says_what_it_is(option: Option) -> None:
    assert option.help
    assert option.group
    assert option.nargs == 0 or option.choices or option.metavar
    assert option.section is not None or option.dest in ("group_query_attention", "lr_warmup_fraction")


def test_help_shows_every_option_and_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = help_text("graphstep train", "100 % fun")
    assert "100 % fun" in text
    assert all(spelling in text for spelling in SPELLINGS.split())
    assert "(default: 4 x hidden size" in text
    assert "None" not in text
    lines = {entry.split()[0].strip(","): entry for entry in re.split(r"\n  (?=--)", text) if entry.startswith("--")}
    assert "(default: 1234)" in lines["--seed"]
    assert "(default: on)" in lines["--check-for-nan-in-loss-and-grad"]
    assert "moe_preprocess" in lines["--cuda-graph-modules"]
    assert "fp32 main weights" in lines["--bf16"]


def test_help_of_another_table() -> None:
    text = help_text("x", "", (Option(dest="a", flags=("--a",), group="g", help="50%", metavar="N", default=3),))
    assert "50% (default: 3)" in text
