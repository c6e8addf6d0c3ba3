"""Options of training, learning rate, validation, checkpoints and logs."""

from __future__ import annotations

from graphstep.config.choices import DECAY_STYLES, DEVICES, WSD_DECAY_STYLES
from graphstep.config.options.option import Option, OptionGroup, integer, number, positive, text
from graphstep.config.training import TrainingConfig

_training = OptionGroup("training", "training", TrainingConfig)
_rate = OptionGroup("learning rate and optimizer", "training", TrainingConfig)
_output = OptionGroup("validation, checkpoints and logs", "training", TrainingConfig)

TRAINING_OPTIONS: tuple[Option, ...] = (
    _training.option("--micro-batch-size", "sequences of one forward", type=integer, metavar="N"),
    _training.option(
        "--global-batch-size",
        "sequences of one optimizer step, a multiple of --micro-batch-size",
        type=positive,
        metavar="N",
        default_text="--micro-batch-size",
    ),
    _training.option("--train-iters", "optimizer steps", type=integer, metavar="STEPS"),
    _training.switch("--bf16", "bf16 parameters with fp32 main weights and fp32 main gradients; left out: fp32"),
    _training.option("--seed", "seed of weights, dropout and data order", type=integer, metavar="N"),
    _training.option("--device", "where to run; auto: CUDA if there is a device, else the CPU", choices=DEVICES),
    _training.switch("--deterministic-mode", "deterministic kernels only; an operation without one is an error"),
    _training.switch(
        "",
        "do not look at loss and gradient norm each step to stop when one is not finite; full_iteration needs this",
        off="--no-check-for-nan-in-loss-and-grad",
        dest="check_for_nan_in_loss_and_grad",
    ),
    _training.switch("--compile", "put the model under torch.compile, on a GPU (none, full_iteration)"),
    _training.switch(
        "--gradient-accumulation-fusion",
        "add weight gradients to the gradient by the matrix product itself (none, full_iteration)",
        dest="fuse_gradient_accumulation",
    ),
    _training.switch(
        "--parallel-weight-gradients",
        "run these products beside the rest of the backward, on a GPU; with --gradient-accumulation-fusion",
    ),
    _training.switch(
        "--deferred-nan-check",
        "look at loss and gradient norms one step later, without waiting for the device; such a step leaves the "
        "weights as they are",
    ),
    _training.option(
        "--compare-with-eager",
        "train that many steps eagerly as well, and compare losses and weights bit by bit; 0: off",
        type=integer,
        metavar="STEPS",
    ),
    _rate.option("--lr", "largest learning rate", type=number, metavar="X"),
    _rate.option("--min-lr", "smallest learning rate after warmup", type=number, metavar="X"),
    _rate.option("--lr-decay-style", "shape of the decay; WSD: warmup, stable, decay", choices=DECAY_STYLES),
    _rate.option(
        "--lr-decay-iters",
        "steps until the learning rate has reached --min-lr",
        type=positive,
        metavar="STEPS",
        default_text="--train-iters",
    ),
    _rate.option("--lr-warmup-iters", "steps of linear warmup", type=integer, metavar="STEPS"),
    _rate.option(
        "--lr-warmup-fraction",
        "the same as a share of --lr-decay-iters",
        type=number,
        annotation="float | None",
        metavar="SHARE",
        default_text="not used",
    ),
    _rate.option("--lr-warmup-init", "learning rate at the start of warmup", type=number, metavar="X"),
    _rate.option("--lr-wsd-decay-style", "shape of the last part of WSD", choices=WSD_DECAY_STYLES),
    _rate.option(
        "--lr-wsd-decay-iters",
        "steps of the last part of WSD",
        type=positive,
        metavar="STEPS",
        default_text="none; WSD needs it",
    ),
    _rate.option("--weight-decay", "decoupled weight decay of AdamW", type=number, metavar="X"),
    _rate.option("--clip-grad", "largest norm of all gradients together; 0: no clipping", type=number, metavar="X"),
    _rate.option("--adam-beta1", "decay of the first moment", type=number, metavar="X"),
    _rate.option("--adam-beta2", "decay of the second moment", type=number, metavar="X"),
    _rate.option("--adam-eps", "added to the denominator", type=number, metavar="X"),
    _output.option("--eval-interval", "steps between two validations", type=integer, metavar="STEPS"),
    _output.option(
        "--eval-iters",
        "global batches of one validation; 0: no validation",
        type=integer,
        metavar="N",
    ),
    _output.option("--log-interval", "steps between two log lines", type=integer, metavar="STEPS"),
    _output.option("--save", "folder for checkpoints", type=text, metavar="FOLDER"),
    _output.option("--load", "folder to resume from", type=text, metavar="FOLDER"),
    _output.option(
        "--save-interval",
        "steps between two checkpoints",
        type=positive,
        metavar="STEPS",
        default_text="only at the end",
    ),
    _output.option("--tensorboard-dir", "folder for a TensorBoard log", type=text, metavar="FOLDER"),
    _output.option("--log-jsonl", "file for a log of one JSON object a line", type=text, metavar="FILE"),
    _output.option(
        "--cuda-graph-report",
        "file for a page (.html) on what was captured, what was not and why, memory, and times of eager and captured "
        "steps; .json: the same as data",
        type=text,
        metavar="FILE",
    ),
    _output.option(
        "--cuda-graph-trace",
        "file (.json) for a trace of some eager and some captured steps, for Perfetto",
        type=text,
        metavar="FILE",
    ),
)
