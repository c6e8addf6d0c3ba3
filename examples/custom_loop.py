"""A training loop written by hand, with CUDA graphs wired into it: the six lines marked `graphs`.

python examples/custom_loop.py          (on a GPU or, with the tape engine, on the CPU)
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphstep  # graphs

HIDDEN, LENGTH, BATCH, NUM_MICROBATCHES, NUM_STEPS = 64, 32, 4, 2, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = nn.Conv1d(HIDDEN, HIDDEN, 5)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256), nn.GELU(), nn.Linear(256, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(functional.pad(self.norm(x).transpose(1, 2), (4, 0))).transpose(1, 2)
        return x + functional.dropout(self.mlp(x), 0.1, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.tensor(list(Path(__file__).read_bytes()), device=device)

blocks = tuple(model.blocks)  # graphs
sample = torch.randn(BATCH, LENGTH, HIDDEN, device=device, requires_grad=True)  # graphs
graphstep.make_graphed_callables(blocks, ((sample,),) * len(blocks))  # graphs

for step in range(NUM_STEPS):
    optimizer.zero_grad()
    losses = []
    for _ in range(NUM_MICROBATCHES):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), device=device)
        loss = model(text[starts + torch.arange(LENGTH + 1, device=device)])
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}")

print(blocks[0].forward.report().to_json()["num_recordings"], "graphs")  # graphs
blocks[0].forward.reset()  # graphs
