"""A training step that works, and that no graph could repeat: what `graphstep doctor` is shown with.

graphstep doctor examples/step_to_mend.py:train_step
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 64, 16, 32

device = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.num_tokens = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.num_tokens += ids.numel()
        positions = torch.arange(ids.shape[1])
        return self.head(self.encoder(self.tokens(ids) + self.positions(positions.to(ids.device))))


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = [torch.randint(0, VOCABULARY, (4, LENGTH), device=device) for _ in range(4)]


def train_step(ids: Tensor) -> float:
    optimizer.zero_grad()
    logits = model(ids)
    mask = ids != 0
    loss = F.cross_entropy(logits[mask], ids[mask])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
