"""The ``Trainer`` of Hugging Face's transformers, with layers captured as CUDA graphs by a callback.

pip install graphstep transformers accelerate
python examples/hf_trainer.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from graphstep.hugging_face import GraphstepCallback


class Tokens(Dataset):
    """Random tokens: each sample the same whenever it is read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(callbacks: list[object]) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=8,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=callbacks)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    eager = train([])
    graphs = GraphstepCallback()
    attached = train([graphs])
    print(graphs.report)
    print("equal to eager:", attached == eager)


if __name__ == "__main__":
    main()
