"""Rules about batches, learning rate, optimizer and outputs."""

from __future__ import annotations

from graphstep.config.choices import DECAY_STYLES, DEVICES, WSD_DECAY_STYLES
from graphstep.config.rules.rule import Rule, at_least, in_range, no_effect, one_of, optional

TRAINING_RULES: tuple[Rule, ...] = (
    at_least(1, "micro_batch_size", "use 1 or more sequences"),
    at_least(1, "global_batch_size", "leave it out for one microbatch a step"),
    at_least(1, "train_iters", "use 1 or more steps"),
    in_range("lr", lambda v: v >= 0, "at least 0", "use 1e-3 for a small model"),
    in_range("min_lr", lambda v: v >= 0, "at least 0", "use 0"),
    one_of("lr_decay_style", DECAY_STYLES),
    at_least(1, "lr_decay_iters", "leave it out for --train-iters"),
    at_least(0, "lr_warmup_iters", "use 0 for no warmup"),
    in_range(
        "lr_warmup_fraction",
        lambda v: v is None or 0 <= v < 1,
        "in [0, 1)",
        "give the share of --lr-decay-iters that is warmup, such as 0.01",
    ),
    in_range("lr_warmup_init", lambda v: v >= 0, "at least 0", "use 0"),
    one_of("lr_wsd_decay_style", WSD_DECAY_STYLES),
    at_least(0, "lr_wsd_decay_iters", "give the steps of the last part of the schedule"),
    in_range("weight_decay", lambda v: v >= 0, "at least 0", "use 0 for none"),
    in_range("clip_grad", lambda v: v >= 0, "at least 0", "use 0 for no clipping"),
    in_range("adam_beta1", lambda v: 0 <= v < 1, "in [0, 1)", "use 0.9"),
    in_range("adam_beta2", lambda v: 0 <= v < 1, "in [0, 1)", "use 0.999"),
    in_range("adam_eps", lambda v: v > 0, "above 0", "use 1e-8"),
    at_least(0, "seed", "use a whole number such as 1234"),
    at_least(1, "eval_interval", "use --eval-iters 0 to turn validation off"),
    at_least(0, "eval_iters", "use 0 to turn validation off"),
    at_least(1, "log_interval", "use 1 to log every step"),
    at_least(0, "save_interval", "leave it out to save at the end only"),
    one_of("device", DEVICES),
    at_least(0, "compare_with_eager", "give the number of steps to compare, or leave it out"),
    optional(
        "cuda_graph_report",
        lambda v: v.lower().endswith((".html", ".htm", ".json")),
        "a file that ends in .html or .json",
        "name the file report.html, for example",
    ),
    optional(
        "cuda_graph_trace",
        lambda v: v.lower().endswith(".json"),
        "a file that ends in .json",
        "name the file trace.json, for example",
    ),
    Rule(
        code="report-is-trace",
        fields=("cuda_graph_report", "cuda_graph_trace"),
        broken=lambda o: o.cuda_graph_report is not None and o.cuda_graph_report == o.cuda_graph_trace,
        what="the trace would be written over the report: both go to {cuda_graph_report}",
        fix="give them different names",
    ),
    at_least(0, "cuda_graph_verify", "give the number of steps to verify, or leave it out"),
    at_least(0, "cuda_graph_shadow_interval", "give the steps between two comparisons, or leave it out"),
    in_range("cuda_graph_verify_rtol", lambda v: v >= 0, "at least 0", "use 0 for the same bits"),
    in_range("cuda_graph_verify_atol", lambda v: v >= 0, "at least 0", "use 0 for the same bits"),
    Rule(
        code="batches-divide",
        fields=("global_batch_size", "micro_batch_size"),
        broken=lambda o: o.global_batch_size % o.micro_batch_size != 0,
        what="global batch size {global_batch_size} is not a multiple of micro batch size {micro_batch_size}",
        fix="a step runs a whole number of microbatches: choose a multiple of {micro_batch_size}",
    ),
    Rule(
        code="min-lr-above-lr",
        fields=("min_lr", "lr"),
        broken=lambda o: o.min_lr > o.lr,
        what="the smallest learning rate {min_lr} is above the largest, {lr}",
        fix="lower --min-lr or raise --lr",
    ),
    Rule(
        code="warmup-init-above-lr",
        fields=("lr_warmup_init", "lr"),
        broken=lambda o: o.lr_warmup_init > o.lr,
        what="warmup starts at {lr_warmup_init}, above the largest learning rate {lr}",
        fix="lower --lr-warmup-init or raise --lr",
    ),
    Rule(
        code="warmup-given-twice",
        fields=("lr_warmup_fraction", "lr_warmup_iters", "given_lr_warmup_iters"),
        broken=lambda o: o.lr_warmup_fraction is not None and o.given_lr_warmup_iters,
        what="warmup is given twice, as a fraction and in steps",
        fix="keep one of --lr-warmup-fraction and --lr-warmup-iters",
    ),
    Rule(
        code="warmup-too-long",
        fields=("lr_warmup_iters", "lr_decay_iters"),
        broken=lambda o: o.lr_warmup_iters >= o.lr_decay_iters,
        what="warmup of {lr_warmup_iters} steps leaves nothing of the {lr_decay_iters} steps of the schedule",
        fix="lower --lr-warmup-iters, or raise --lr-decay-iters (--train-iters when it is left out)",
    ),
    Rule(
        code="warmup-beyond-run",
        fields=("lr_warmup_iters", "lr_decay_iters", "train_iters"),
        broken=lambda o: o.train_iters <= o.lr_warmup_iters < o.lr_decay_iters,
        what="the run of {train_iters} steps ends before the warmup of {lr_warmup_iters} steps does",
        fix="lower --lr-warmup-iters unless a later run goes on from here",
        is_notice=True,
    ),
    Rule(
        code="wsd-decay-missing",
        fields=("lr_decay_style", "lr_wsd_decay_iters"),
        broken=lambda o: o.lr_decay_style == "WSD" and o.lr_wsd_decay_iters == 0,
        what="the WSD schedule needs the number of steps of its last part",
        fix="add --lr-wsd-decay-iters, a tenth of --train-iters for example",
    ),
    Rule(
        code="wsd-decay-too-long",
        fields=("lr_decay_style", "lr_wsd_decay_iters", "lr_warmup_iters", "lr_decay_iters"),
        broken=lambda o: (
            o.lr_decay_style == "WSD"
            and o.lr_warmup_iters < o.lr_decay_iters < o.lr_warmup_iters + o.lr_wsd_decay_iters
        ),
        what=(
            "warmup of {lr_warmup_iters} and last part of {lr_wsd_decay_iters} steps together exceed the "
            "{lr_decay_iters} steps of the schedule"
        ),
        fix="lower --lr-wsd-decay-iters or --lr-warmup-iters",
    ),
    no_effect(
        "wsd-without-effect",
        ("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_style"),
        lambda o: o.lr_decay_style != "WSD" and (o.lr_wsd_decay_iters, o.lr_wsd_decay_style) != (0, "exponential"),
        "--lr-wsd-decay-iters and --lr-wsd-decay-style have no effect with --lr-decay-style {lr_decay_style}",
        "add --lr-decay-style WSD, or leave them out",
    ),
    no_effect(
        "decay-without-effect",
        ("lr_decay_style", "min_lr"),
        lambda o: o.lr_decay_style == "constant" and o.min_lr != 0,
        "--min-lr has no effect on a constant learning rate",
        "choose another --lr-decay-style, or leave --min-lr out",
    ),
    Rule(
        code="comparison-too-long",
        fields=("compare_with_eager", "train_iters"),
        broken=lambda o: o.compare_with_eager > o.train_iters,
        what="{compare_with_eager} steps cannot be compared in a run of {train_iters}",
        fix="lower --compare-with-eager to {train_iters}",
    ),
    no_effect(
        "comparison-without-graphs",
        ("compare_with_eager", "cuda_graph_impl"),
        lambda o: o.compare_with_eager > 0 and o.cuda_graph_impl == "none",
        "--compare-with-eager compares eager with eager: nothing is captured",
        "add --cuda-graph-impl local, transformer_engine or full_iteration, or leave it out",
    ),
    no_effect(
        "verify-without-graphs",
        ("cuda_graph_verify", "cuda_graph_shadow_interval", "cuda_graph_impl", "optimizer_cuda_graph"),
        lambda o: (
            o.cuda_graph_impl == "none"
            and (o.cuda_graph_shadow_interval > 0 or (o.cuda_graph_verify > 0 and not o.optimizer_cuda_graph))
        ),
        "--cuda-graph-verify and --cuda-graph-shadow-interval compare replays with eager: nothing is captured",
        "add --cuda-graph-impl local or full_iteration, or leave them out",
    ),
    no_effect(
        "verify-tolerance-without-effect",
        ("cuda_graph_verify", "cuda_graph_shadow_interval", "cuda_graph_verify_rtol", "cuda_graph_verify_atol"),
        lambda o: (
            o.cuda_graph_verify == o.cuda_graph_shadow_interval == 0
            and (o.cuda_graph_verify_rtol, o.cuda_graph_verify_atol) != (0, 0)
        ),
        "--cuda-graph-verify-rtol and --cuda-graph-verify-atol have no effect: nothing is compared with eager",
        "add --cuda-graph-verify or --cuda-graph-shadow-interval, or leave them out",
    ),
    no_effect(
        "save-interval-without-save",
        ("save_interval", "save"),
        lambda o: o.save_interval > 0 and o.save is None,
        "--save-interval has no effect: there is no folder to save to",
        "add --save FOLDER",
    ),
    no_effect(
        "eval-interval-without-effect",
        ("eval_interval", "eval_iters"),
        lambda o: o.eval_iters == 0 and o.eval_interval != 100,
        "--eval-interval has no effect: --eval-iters 0 turns validation off",
        "give --eval-iters, or leave --eval-interval out",
    ),
)
