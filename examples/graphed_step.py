"""A training loop written by hand, whose step is one CUDA graph: the lines marked `graphs`.

python examples/graphed_step.py         (on a GPU or, with the tape engine, on the CPU)
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphstep  # graphs

LENGTH, BATCH, NUM_MICROBATCHES, NUM_STEPS = 16, 8, 2, 40

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 16), nn.Flatten(), nn.Linear(LENGTH * 16, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 256)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2**-8, fused=True)  # fused: reads nothing back
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=16, gamma=0.5)
text = torch.tensor(list(Path(__file__).read_bytes()), device=device)


@graphstep.graph_step  # graphs
def train(tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    losses = []
    for part in tokens.chunk(NUM_MICROBATCHES):
        loss = functional.cross_entropy(model(part[:, :-1]), part[:, -1])
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.stack(losses).mean()


for step in range(NUM_STEPS):
    starts = torch.randint(len(text) - LENGTH, (BATCH * NUM_MICROBATCHES, 1), device=device)
    mean = train(text[starts + torch.arange(LENGTH + 1, device=device)])
    scheduler.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {mean.item():.6f}")

print(train.report().rows[0].num_replays, "replays")  # graphs
train.close()  # graphs
