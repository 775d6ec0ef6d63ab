"""A small GPT that predicts the next byte of the Python standard library's own sources."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Size:
    """Of model and batch."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 8


SIZES = {"small": Size(), "tiny": Size(width=64, layers=2, heads=2, context=64, batch=8)}


class Block(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Byte level, with dropout and tied weights."""

    def __init__(self, size: Size, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, size.width), nn.Embedding(size.context, size.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(size, dropout) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(self.token(x) + self.place(torch.arange(x.shape[1])))
        return F.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), y.flatten())


class Sources(Dataset[tuple[Tensor, Tensor]]):
    """Windows of text that is on every machine: the standard library's own modules."""

    def __init__(self, context: int, max_bytes: int = 1 << 20) -> None:
        text = b""
        for file in sorted(Path(os.__file__).parent.glob("*.py")):
            text += file.read_bytes()
            if len(text) >= max_bytes:
                break
        self.text = torch.frombuffer(bytearray(text[:max_bytes]), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def build(size: Size, steps: int) -> tuple[GPT, torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler, DataLoader]:
    """Model, optimizer, schedule and data, the same each time."""
    torch.manual_seed(0)
    model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return model, optimizer, schedule, DataLoader(Sources(size.context), size.batch, shuffle=True)


def learn(model: GPT, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> float:
    """One step; returns the loss."""
    loss = model(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the training state, by name."""
    names = {p: n for n, p in model.named_parameters()}
    moments = {f"{names[p]}/{k}": v for p, values in optimizer.state.items() for k, v in values.items()}
    return {**model.state_dict(), **moments}


def digest(state: dict[str, Tensor]) -> str:
    """A hash of every bit of a state."""
    total = xxhash.xxh3_128()
    for name in sorted(state):
        total.update(name.encode())
        total.update(state[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()
