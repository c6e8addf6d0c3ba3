"""A plain training loop over a model of Hugging Face's transformers, with and without CUDA graphs.

    pip install graphstep transformers
    python examples/hf_training_loop.py

The model has random weights; take ``AutoModelForCausalLM.from_pretrained(...)`` instead. Losses are the same with and
without graphs, bit for bit.
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import graphstep


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_config(config).to(device).train()


def train(model: torch.nn.Module, num_steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        tokens = torch.randint(256, (2, 32), generator=generator).to(model.device)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def main() -> None:
    eager = train(build(), 8)

    model = build()
    with graphstep.attach(model) as manager:  # attention and router in graphs, experts eager between them
        attached = train(model, 8)
        print(manager.report())

    print("losses:", ", ".join(f"{loss:.4f}" for loss in attached))
    print("equal to eager:", attached == eager)


if __name__ == "__main__":
    main()
