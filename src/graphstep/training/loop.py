"""The training loop: data, model, strategy, optimizer, validation, checkpoints, logs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.config import CapturePolicy, CudaGraphConfig, CudaGraphImpl, RunConfig
from graphstep.errors import NonFiniteError
from graphstep.models.weight_gradients import fuse_weight_gradients
from graphstep.strategies import ForwardBackward, OptimizerGraph, Strategy, build_strategy
from graphstep.training.checkpoint import Checkpoint, TrainingState, save_checkpoint
from graphstep.training.data import BatchIterator, Dataset, build_datasets
from graphstep.training.determinism import (
    deterministic_algorithms,
    preserved_random_state,
    random_state,
    restore_random_state,
    seeded_random_state,
)
from graphstep.training.evaluation import evaluate
from graphstep.training.gradients import GradientBuffers
from graphstep.training.health import HealthRecord, require_finite
from graphstep.training.interrupt import InterruptRequest
from graphstep.training.ledger import Steadiness, StepLedger
from graphstep.training.logging import make_logs
from graphstep.training.optimizer import MainWeightAdamW
from graphstep.training.proof import RunProof
from graphstep.training.result import TrainResult
from graphstep.training.router_counters import RouterCounters
from graphstep.training.schedules import learning_rate
from graphstep.training.setup import (
    architecture,
    build_model,
    idle_options_notice,
    pointer_notice,
    preflight_with_data,
    with_vocabulary,
)
from graphstep.training.step import forward_backward_no_pipelining
from graphstep.training.tensors import model_tensors
from graphstep.training.timing import peak_memory_bytes, restart_peak_memory
from graphstep.training.update import Joined, Update, WholeStep
from graphstep.verification import VerifyReport


class StrategyFactory(Protocol):
    """Builds the strategy that the switches ask for, as :func:`graphstep.strategies.build_strategy` does."""

    def __call__(
        self,
        graphs: CudaGraphConfig,
        *,
        model: nn.Module,
        forward_backward_func: ForwardBackward,
        device: torch.device,
        optimizers: Sequence[Optimizer] = (),
    ) -> Strategy:
        """Return a new strategy, which nobody else uses."""


class Trainer:
    """Owner of a run. Building it checks all input and creates nothing on disk; :meth:`train` runs.

    The seed decides everything: weights and the order of data come from generators of their own. Dropout draws from the
    default generators, which are the run's own only while :meth:`train` runs; afterwards they are as before.

    Args:
        config: the whole configuration.
        console: where progress goes; None for silence.
        strategy_factory: builds the strategy that ``config.graphs`` asks for.
        on_step: called after every step with the trainer and the losses [num_microbatches], outside the timed part.

    Raises:
        UserInputError: anything wrong with options, data, device, or the checkpoint to resume from.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        console: Console | None = None,
        strategy_factory: StrategyFactory = build_strategy,
        on_step: Callable[[Trainer, Tensor], None] | None = None,
    ) -> None:
        training = config.training
        self.device, self.start_checkpoint = preflight_with_data(config)
        self.datasets = build_datasets(
            config.data, seq_length=config.model.seq_length, seed=training.seed, need_valid=training.eval_iters > 0
        )
        self.config = with_vocabulary(config, self.datasets.tokenizer.vocab_size)
        self.model = build_model(self.config, device=self.device)
        self.gradients = GradientBuffers(self.model, self.device)
        self.optimizer = MainWeightAdamW(
            self.gradients, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_eps
        )
        self.batches = self._batches(self.datasets.train, shuffle=True)
        self.iteration = 0
        self._random = seeded_random_state(training.seed, self.device)
        if self.start_checkpoint is not None:
            self._resume(self.start_checkpoint)
        pointer = pointer_notice(training, self.iteration)
        idle = idle_options_notice(training, self.device)
        self.notices = (*self.datasets.notices, *(each for each in (pointer, idle) if each is not None))
        self._health: HealthRecord | None = None
        if training.deferred_nan_check:
            names = [slot.name for slot in self.gradients.slots]
            self._health = HealthRecord(names, training.num_microbatches, self.device)
        self._counters = RouterCounters(self.model, config.moe.moe_router_bias_update_rate)
        self._update = Update(
            self.gradients,
            self.optimizer,
            clip_grad=training.clip_grad,
            health=self._health,
            counters=self._counters,
        )
        self._is_whole = config.graphs.optimizer and config.graphs.impl is CudaGraphImpl.full_iteration
        """The update is in the graph of forward and backward."""
        function: ForwardBackward = forward_backward_no_pipelining
        if training.fuse_gradient_accumulation:
            gradients = fuse_weight_gradients(self.model, is_parallel=training.parallel_weight_gradients)
            function = Joined(function, gradients)
        if training.compile and self.device.type == "cuda":
            self.model.compile()
        if self._is_whole:
            function = WholeStep(function, self.gradients, self._update, self._health)
        self.function, self._strategy_factory = function, strategy_factory
        self.strategy, self._optimizer_graph = self._new_graphs()
        self.verification: VerifyReport | None = None
        """What ``cuda_graph_verify`` has found, once it has run."""
        self._proof = RunProof(self, lambda event, values: self._log.write(event, values))  # noqa: PLW0108 - that of then
        self._on_step = on_step
        self._log = make_logs(training, console)
        self._ledger = StepLedger(self.device)
        self._steadiness = Steadiness(self.report, is_eager=not config.graphs.captures_training)
        self._saved_iteration = self.iteration
        self._validation_loss: tuple[int, float] | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the recordings, then take the gradients off the model, then close the logs. May be called twice."""
        try:
            self._proof.close()
            self._close_graphs()
        finally:
            self.gradients.close()
            self._log.close()

    def _close_graphs(self) -> None:
        if self._optimizer_graph is not None:
            self._optimizer_graph.close()
        self.strategy.close()

    def _new_graphs(self) -> tuple[Strategy, OptimizerGraph | None]:
        """A strategy and a graph of the optimizer that have captured nothing."""
        training, graphs = self.config.training, self.config.graphs
        strategy = self._strategy_factory(
            graphs,
            model=self.model,
            forward_backward_func=self.function,
            device=self.device,
            optimizers=(self.optimizer.adamw,) if self._is_whole else (),
        )
        if not graphs.optimizer or self._is_whole:
            return strategy, None
        return strategy, OptimizerGraph(
            self.optimizer.adamw,
            update=self._update.apply if training.check_for_nan_in_loss_and_grad else self._update,
            cuda_graph_warmup_steps=graphs.warmup_steps,
            policy=graphs.policy,
        )

    def build_graphs(self) -> None:
        """Free the graphs, and begin anew: warmup and capture come with the next steps."""
        self._close_graphs()
        self.strategy, self._optimizer_graph = self._new_graphs()

    def sessions(self) -> list[GraphSession]:
        """The owners of all graphs."""
        owners = (getattr(self.strategy, "session", None), getattr(self._optimizer_graph, "session", None))
        return [owner for owner in owners if owner is not None]

    def verify(self) -> VerifyReport | None:
        """Run the steps that ``cuda_graph_verify`` asks for by graphs and eagerly, once, before training.

        Weights, gradients, state of the optimizer, buffers and random numbers are put back, and the graphs are captured
        anew by the run: it is the one without this.

        Returns:
            What was found; ``None`` if nothing is asked for.
        """
        if self.verification is None and self._proof.is_wanted:
            with (
                deterministic_algorithms(self.config.training.deterministic_mode),
                preserved_random_state(self.device),
            ):
                restore_random_state(self._random, self.device)
                self.verification = self._proof.verify(self._batches(self.datasets.train, shuffle=True))
        return self.verification

    def train_on(self, microbatches: Sequence[Any], strategy: Strategy, *, by_graphs: bool) -> tuple[Tensor, Tensor]:
        """One step without a place in the run: the largest learning rate, nothing is counted or checked.

        Args:
            microbatches: of the step.
            strategy: runs forward and backward.
            by_graphs: the update too may be a graph.

        Returns:
            Losses [num_microbatches], and the norm of the gradient.
        """
        training = self.config.training
        self.optimizer.set_rates(training.lr, training.weight_decay)
        self.gradients.install() if self._is_whole else self.gradients.zero()
        losses = strategy.forward_backward(data_iterator=iter(microbatches), num_microbatches=len(microbatches))
        if not self._is_whole:
            self._apply_update(losses, self._optimizer_graph if by_graphs else None)
        strategy.end_step()
        return losses, self._update.norm.clone()

    def train(self, num_steps: int | None = None) -> TrainResult:
        """Train to the last iteration, or ``num_steps`` steps if that comes first.

        Ctrl-C ends the run after the current step; a checkpoint is saved then too.

        Raises:
            VerificationError: see :meth:`verify`; nothing was trained.
            NonFiniteError: loss or gradient norm is not finite and the check is on; the weights are those before.
            CheckpointError: a checkpoint could not be written.
        """
        training = self.config.training
        self._require_verified()
        first = self.iteration
        last = training.train_iters if num_steps is None else min(training.train_iters, first + num_steps)
        with (
            deterministic_algorithms(training.deterministic_mode),
            preserved_random_state(self.device),
            InterruptRequest() as interrupt,
        ):
            restore_random_state(self._random, self.device)
            restart_peak_memory(self.device)
            self._log.write("start", self._start_values())
            before = self.validate()
            while self.iteration < last and not interrupt.is_requested:
                try:
                    self.make_step()
                except NonFiniteError:
                    self._write_interval()  # the steps before show how it came to this
                    raise
                self._after_step()
            self._write_interval()
            if self._health is not None:
                self._health.check(wait=True)
            after = self.validate() if not interrupt.is_requested else None
            self._save()
            self._random = random_state(self.device)
        result = TrainResult(
            first_iteration=first,
            iteration=self.iteration,
            is_interrupted=self.iteration < last,
            first_loss=self._ledger.first_loss,
            last_loss=self._ledger.last_loss,
            first_validation_loss=before,
            last_validation_loss=after,
            step_ms=self._ledger.steady_step_ms,
            peak_bytes=peak_memory_bytes(self.device),
            device=self.device,
            report=self.report(),
        )
        self._log.write("end", self._end_values(result))
        return result

    def report(self) -> CaptureReport:
        """What has been captured so far, of the strategy and of the optimizer."""
        report = self.strategy.report()
        return report if self._optimizer_graph is None else report.joined(self._optimizer_graph.report())

    def validate(self) -> float | None:
        """Return the loss on the validation data, always the same batches; None if there is no validation.

        A second call without a step in between returns the first result.
        """
        training = self.config.training
        if training.eval_iters == 0 or self.datasets.valid is None:
            return None
        if self._validation_loss is None or self._validation_loss[0] != self.iteration:
            loss = evaluate(
                self.strategy,
                self.model,
                self._batches(self.datasets.valid, shuffle=False),
                num_iters=training.eval_iters,
                num_microbatches=training.num_microbatches,
                device=self.device,
            )
            self._validation_loss = (self.iteration, loss)
            self._log.write("validation", {"iteration": self.iteration, "loss": loss})
        return self._validation_loss[1]

    def _after_step(self) -> None:
        training = self.config.training
        if self.iteration % training.log_interval == 0:
            self._write_interval()
        if training.eval_interval > 0 and self.iteration % training.eval_interval == 0:
            self.validate()
        if training.save_interval > 0 and self.iteration % training.save_interval == 0:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint if there is a folder for it and the run has moved on since the last one."""
        training = self.config.training
        if training.save is None or self.iteration == self._saved_iteration:
            return
        folder = save_checkpoint(
            Path(training.save),
            TrainingState(
                iteration=self.iteration,
                model=model_tensors(self.model),
                optimizer=self.optimizer.state_dict(),
                random=random_state(self.device),
                architecture=architecture(self.config),
                data={"train": self.batches.state_dict()},
                progress=self._progress(),
                config=self.config.to_json(),
            ),
        )
        self._saved_iteration = self.iteration
        self._log.write("checkpoint", {"iteration": self.iteration, "path": str(folder)})

    def _progress(self) -> dict[str, float | None]:
        loss = self._ledger.last_loss
        validation = None if self._validation_loss is None else self._validation_loss[1]
        losses = {"loss": loss, "validation_loss": validation}
        # JSON has no name for what is not finite.
        return {name: value if value is not None and math.isfinite(value) else None for name, value in losses.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return the live weights, buffers, and fp32 main weights (``main.`` in front) by name."""
        main = {f"main.{name}": tensor for name, tensor in self.optimizer.main_weights().items()}
        return {**model_tensors(self.model), **main}

    def _batches(self, dataset: Dataset, *, shuffle: bool) -> BatchIterator:
        training = self.config.training
        return BatchIterator(
            dataset,
            micro_batch_size=training.micro_batch_size,
            seed=training.seed,
            shuffle=shuffle,
            pin_memory=self.device.type == "cuda",
        )

    def _resume(self, folder: Path) -> None:
        checkpoint = Checkpoint(
            folder,
            model=model_tensors(self.model),
            optimizer=self.optimizer.state_dict(),
            random=self._random,
            architecture=architecture(self.config),
        )
        # Of all parts only the data may still refuse, so it goes first.
        self.batches.load_state_dict(checkpoint.data.get("train", {}))
        checkpoint.restore()
        # A checkpoint of another kind of device has no state for this one: then the seed decides.
        self._random |= checkpoint.random()
        self.iteration = checkpoint.iteration

    def make_step(self) -> None:
        """Make one step, and no more: :meth:`train` does the rest. Random numbers come from the default generators."""
        training = self.config.training
        lr = learning_rate(training, self.iteration)
        self._steadiness.begin_step()
        self.optimizer.set_rates(lr, training.weight_decay)
        self._ledger.timer.start()
        if self._is_whole:
            self.gradients.install()
            losses = self._forward_backward()
        else:
            self.gradients.zero()
            losses = self._forward_backward()
            self._apply_update(losses, self._optimizer_graph, check=True)
        self.strategy.end_step()
        norm = self._update.norm.clone()
        self._ledger.timer.stop()
        self.iteration += 1
        self._ledger.add(self.iteration, losses, norm, lr, is_steady=self._steadiness.end_step())
        if self._health is not None:
            self._health.send(self.iteration)
            self._health.check(but_last=1)
        if self._on_step is not None:
            self._on_step(self, losses)

    def _forward_backward(self) -> Tensor:
        return self._proof.forward_backward(
            self.batches, self.config.training.num_microbatches, iteration=self.iteration + 1
        )

    def _apply_update(self, losses: Tensor, graph: OptimizerGraph | None, *, check: bool = False) -> None:
        """Update the weights, by the graph if there is one; stop before if the step is not finite and that counts."""
        training = self.config.training
        if self._health is not None:
            self._health.note_losses(losses)
        self.gradients.install()
        if training.check_for_nan_in_loss_and_grad:
            self._update.measure()
            if check:
                is_clipped = training.clip_grad > 0
                require_finite(losses, self._update.norm, self.iteration + 1, is_clipped=is_clipped)
            (self._update.apply if graph is None else graph)()
        else:
            (self._update if graph is None else graph)()

    def _require_verified(self) -> None:
        """Refuse to train with graphs that differ from eager; where nothing was captured there is nothing to refuse."""
        report = self.verify()
        if report is not None and (report.num_replays or self.config.graphs.policy is CapturePolicy.required):
            report.raise_if_different()

    def _write_interval(self) -> None:
        interval = self._ledger.read()
        if interval is None:
            return
        training = self.config.training
        tokens_per_step = training.global_batch_size * self.config.model.seq_length
        for iteration in interval.bad_iterations:
            self._log.write(
                "warning",
                {"iteration": iteration, "message": f"loss or gradient norm of iteration {iteration} is not finite"},
            )
        self._log.write(
            "train",
            {
                "iteration": interval.iteration,
                "train_iters": training.train_iters,
                "loss": interval.loss,
                **self._counters.read_losses(),
                "learning_rate": interval.learning_rate,
                "grad_norm": interval.grad_norm,
                "step_ms": interval.step_ms,
                "tokens_per_second": tokens_per_step * 1e3 / interval.step_ms,
                "tokens": interval.iteration * tokens_per_step,
            },
        )

    def _start_values(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "train_iters": self.config.training.train_iters,
            "device": str(self.device),
            "torch": torch.__version__,
            "config": self.config.to_json(),
        }

    def _end_values(self, result: TrainResult) -> dict[str, Any]:
        values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        return {**values, "device": str(result.device), "report": result.report.to_json()}
