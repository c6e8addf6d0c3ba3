"""How a model is trained. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from graphstep.config.choices import DecayStyle, Device, WsdDecayStyle
from graphstep.config.validation import settle


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Batches, learning rate, AdamW, precision, evaluation, files.

    ``global_batch_size`` and ``lr_decay_iters`` are worked out when they are 0, and hold the result from then on.

    Raises:
        ConfigError: values out of range or that contradict each other; all problems at once.
    """

    micro_batch_size: int = 4
    """Sequences of one forward."""
    global_batch_size: int = 0
    """Sequences of one optimizer step, a multiple of ``micro_batch_size``. 0: ``micro_batch_size``."""
    train_iters: int = 200
    """Optimizer steps."""
    lr: float = 1e-3
    """Largest learning rate."""
    min_lr: float = 0.0
    """Smallest learning rate after warmup."""
    lr_decay_style: DecayStyle = "linear"
    """Shape of the decay; WSD is warmup, stable, decay (Hu et al. 2024, "MiniCPM")."""
    lr_decay_iters: int = 0
    """Steps until the learning rate has reached ``min_lr``. 0: ``train_iters``."""
    lr_warmup_iters: int = 0
    """Steps of linear warmup, < ``lr_decay_iters``."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of warmup."""
    lr_wsd_decay_style: WsdDecayStyle = "exponential"
    """Shape of the last part of WSD."""
    lr_wsd_decay_iters: int = 0
    """Steps of the last part of WSD; needed by WSD, otherwise 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW."""
    clip_grad: float = 1.0
    """Largest L2 norm of all gradients together; 0: no clipping."""
    adam_beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    adam_beta2: float = 0.999
    """Decay of the second moment, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the denominator of Adam, > 0."""
    bf16: bool = False
    """bf16 parameters with fp32 main weights and fp32 main gradients; off: everything fp32."""
    seed: int = 1234
    """Seed of initialisation, dropout and the order of the data, >= 0."""
    eval_interval: int = 100
    """Steps between two validations."""
    eval_iters: int = 10
    """Global batches of one validation; 0: no validation."""
    log_interval: int = 10
    """Steps between two log lines."""
    save: str | None = None
    """Folder that checkpoints are written to."""
    load: str | None = None
    """Folder that the run is resumed from."""
    save_interval: int = 0
    """Steps between two checkpoints; 0: only at the end."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard log."""
    log_jsonl: str | None = None
    """File that one JSON object a log line is appended to."""
    cuda_graph_report: str | None = None
    """File for a page (``.html``) about what was captured and what steps take, or for the same as data (``.json``)."""
    cuda_graph_trace: str | None = None
    """File for a trace (``.json``) of some steps, eager and captured, that Perfetto opens."""
    check_for_nan_in_loss_and_grad: bool = True
    """Read the loss and the gradient norm back each step and stop when one is not finite."""
    deferred_nan_check: bool = False
    """Look at losses and gradient norms one step later, without waiting for the device, and stop when one is not
    finite; the weights are not updated in a step that has one."""
    compile: bool = False
    """Put the model under ``torch.compile``, on a GPU; its kernels are captured as any others."""
    fuse_gradient_accumulation: bool = False
    """Weight gradients of linear layers are added to the gradient by the matrix product itself, rounded once."""
    parallel_weight_gradients: bool = False
    """These products run beside the rest of the backward, on a GPU."""
    deterministic_mode: bool = False
    """Use deterministic kernels only; an operation that has none is an error."""
    device: Device = "auto"
    """Where the model runs; ``auto``: CUDA if there is a device, else the CPU."""
    compare_with_eager: int = 0
    """Train that many steps eagerly as well, and compare losses and weights bit by bit; 0: off."""
    cuda_graph_verify: int = 0
    """Before the first step, run that many steps both by replays and eagerly, and compare everything that they leave
    behind; all state is put back, and the run is the one without this. 0: off."""
    cuda_graph_shadow_interval: int = 0
    """Every so many steps, run one microbatch (of ``full_iteration``: the step) eagerly as well, compare, and log what
    differs; the run is the one without this. 0: off."""
    cuda_graph_verify_rtol: float = 0.0
    """How far both may be from eager, relative to its values, for kernels that differ from run to run."""
    cuda_graph_verify_atol: float = 0.0
    """How far both may be from eager, on top of that."""

    def __post_init__(self) -> None:
        settle(self)

    @property
    def num_microbatches(self) -> int:
        """Forward and backward passes of one optimizer step."""
        return self.global_batch_size // self.micro_batch_size

    def options(self) -> Mapping[str, Any]:
        """Return the values under the names of their options, as the rules know them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
