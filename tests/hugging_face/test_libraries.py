"""Trainer, accelerate and PEFT around an attached model."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.hugging_face.tiny import Loop, build, eager_reasons, steps, twins
from torch import Tensor, nn
from torch.utils.data import Dataset

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError, ConfigError
from graphstep.hugging_face import GraphstepCallback

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


# ----- PEFT


def lora(model: Any, *, targets: Any = ("q_proj", "v_proj"), dropout: float = 0.0) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_lora(device: torch.device, family: str, dropout: float) -> None:
    report = twins(family, device, steps(6), prepare=lambda model: lora(model, dropout=dropout))
    assert all(row.num_replays == 5 for row in report.rows if row.num_replays or "after" not in row.name)
    assert "observed" in eager_reasons(report)


def test_lora_of_all_linear_layers_with_checkpointing(device: torch.device) -> None:
    def prepare(model: Any) -> Any:
        made = lora(model, targets="all-linear")
        made.enable_input_require_grads()
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return made

    report = twins("llama", device, steps(6), prepare=prepare)
    assert all(row.num_replays == 5 for row in report.rows)


def test_another_adapter_is_another_capture(device: torch.device) -> None:
    """Disabled, replaced, and put back: each runs what is asked for."""
    peft = pytest.importorskip("peft")

    def prepare(model: Any) -> Any:
        made = lora(model)
        made.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        return made

    def script(loop: Loop) -> None:
        for name in ("default", "default", "second", "second", "second", "default", "second"):
            loop.model.set_adapter(name)
            loop.optimizer = torch.optim.SGD([p for p in loop.model.parameters() if p.requires_grad], lr=0.01)
            loop.step()
            with torch.no_grad(), loop.model.disable_adapter():
                loop.trace.append(loop.model(loop.tokens()).logits.clone())

    report = twins("llama", device, script, prepare=prepare)
    assert report.rows[0].num_replays >= 2


def test_adapters_of_routers_are_refused_with_the_line(device: torch.device) -> None:
    """Of parameters that belong to no linear layer, PEFT replaces the storage in every call."""
    model = lora(build("qwen3_moe", device), targets="all-linear")
    with graphstep.attach(model), pytest.raises(CaptureError, match=r"replaces or resizes|lora/layer"):
        steps(3)(Loop(model, device))


class Adapted(nn.Module):
    """A linear layer with an adapter, written by hand."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 0.5 * self.up(self.down(x))
        return result


def test_adapters_written_by_hand(device: torch.device) -> None:
    def prepare(model: Any) -> Any:
        torch.manual_seed(2)
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
        return model.to(device)

    for family in ("llama", "mixtral"):
        report = twins(family, device, steps(6), prepare=prepare)
        assert all(row.num_replays == 5 for row in report.rows)


# ----- Trainer and accelerate


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        mask = torch.ones_like(tokens)
        return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def trained(folder: Path, family: str, callbacks: list[Any], **options: Any) -> tuple[list[Any], Any]:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-2,
        **options,
    )
    trainer = Trainer(
        model=build(family, device),
        args=arguments,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=callbacks,
    )
    trainer.train()
    losses = [(entry["step"], entry.get("loss"), entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]
    return losses, trainer.model.state_dict()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"eval_strategy": "epoch"}],
    ids=lambda options: "+".join(options) or "plain",
)
def test_trainer(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    expected, weights = trained(tmp_path, family, [], **options)
    callback = GraphstepCallback()
    assert callback.report is None
    losses, attached = trained(tmp_path, family, [callback], **options)
    assert losses == expected
    assert all(torch.equal(attached[name], weight) for name, weight in weights.items())
    assert callback.report is not None
    assert all(row.num_replays > 4 for row in callback.report.rows)
    assert "other-signature" in eager_reasons(callback.report)  # the last, short batch of an epoch


def test_trainer_with_policy_auto_and_modules(tmp_path: Path) -> None:
    callback = GraphstepCallback(CudaGraphConfig(impl="local", modules=("attn",), policy="auto"))
    expected, _ = trained(tmp_path, "llama", [])
    losses, _ = trained(tmp_path, "llama", [callback])
    assert losses == expected
    assert callback.report is not None
    assert callback.report.rows[0].kind == "attn"


def test_a_callback_serves_one_training_at_a_time(device: torch.device) -> None:
    callback = GraphstepCallback()
    callback.on_train_begin(None, None, None, model=build("llama", device))
    with pytest.raises(ConfigError, match="has not ended"):
        callback.on_train_begin(None, None, None, model=build("llama", device))
    callback.close()
    callback.close()
    callback.on_epoch_end(None, None, None)
    with pytest.raises(AttributeError):
        callback.unknown  # noqa: B018


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_accelerate(device: torch.device, family: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    traces = []
    for graphs in (False, True):
        accelerator = accelerate.Accelerator(
            cpu=device.type == "cpu", gradient_accumulation_steps=2, mixed_precision="bf16"
        )
        model = build(family, accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        manager = graphstep.attach(model) if graphs else None
        loop = Loop(model, device)
        for _ in range(8):
            tokens = loop.tokens()
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loop.trace.append(loss.detach().clone())
        traces.append([*loop.trace, *(p.detach().clone() for p in model.parameters())])
        if manager is not None:
            assert all(row.num_replays == 6 for row in manager.report().rows)
            manager.close()
        accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert all(map(torch.equal, *traces))


# ----- examples


def load(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


@pytest.mark.parametrize("name", ["hf_training_loop", "hf_trainer"])
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "hf_trainer":
        pytest.importorskip("accelerate")
    main: Callable[[], None] = load(name).main
    main()
    assert capsys.readouterr().out.splitlines()[-1] == "equal to eager: True"
