"""What the benchmarks train: a small GPT on random tokens, the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from everstep.compress import Compressor, Half, Quantize, TopK


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how many tokens it sees a step."""

    dim: int = 384
    num_layers: int = 6
    num_heads: int = 6
    vocabulary: int = 8192
    sequence: int = 256
    tokens: int = 1024

    @property
    def batch_size(self) -> int:
        return max(1, self.tokens // self.sequence)

    def quick(self) -> Workload:
        """The same, so small that a step takes about a millisecond."""
        return Workload(dim=32, num_layers=2, num_heads=2, vocabulary=128, sequence=16, tokens=16)


class _Block(nn.Module):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.num_heads = w.num_heads
        self.before_attention = nn.LayerNorm(w.dim)
        self.qkv = nn.Linear(w.dim, 3 * w.dim)
        self.out = nn.Linear(w.dim, w.dim)
        self.before_mlp = nn.LayerNorm(w.dim)
        self.up = nn.Linear(w.dim, 4 * w.dim)
        self.down = nn.Linear(4 * w.dim, w.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.before_attention(x)).split(dim, dim=2)
        q, k, v = (t.view(batch, length, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        x = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return x


class GPT(nn.Module):
    """A decoder of the usual kind; returns the loss of predicting each token from those before it."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.token = nn.Embedding(w.vocabulary, w.dim)
        self.position = nn.Embedding(w.sequence, w.dim)
        self.blocks = nn.ModuleList(_Block(w) for _ in range(w.num_layers))
        self.norm = nn.LayerNorm(w.dim)
        self.head = nn.Linear(w.dim, w.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        loss: Tensor = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss


def build(w: Workload, *, seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    """Model and fused AdamW. Equal for equal seeds; the global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(w)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


CODECS = {"none": None, "topk": lambda: TopK(0.01), "quantize": Quantize, "fp16": Half, "bf16": lambda: Half("bf16")}
"""Gradient compression that a benchmark can train with, by name."""


def compressor(codec: str, optimizer: torch.optim.Optimizer) -> Compressor[Any] | None:
    """A new one, which transforms this optimizer's gradients; None for "none"."""
    make: Any = CODECS[codec]
    if make is None:
        return None
    made: Compressor[Any] = make()
    made.attach(optimizer)
    return made


def batches(w: Workload, *, num_batches: int = 1 << 14, seed: int = 0) -> DataLoader[Any]:
    """A loader of random tokens, the first ones the likelier, as words are. Longer than any benchmark."""
    generator = torch.Generator().manual_seed(seed)
    pool = 64 * w.batch_size
    uniform = torch.rand(pool, w.sequence + 1, generator=generator)
    rows = (w.vocabulary ** uniform).long().clamp_(1, w.vocabulary) - 1
    order = torch.arange(num_batches * w.batch_size) % pool
    return DataLoader(_Rows(rows, order), batch_size=w.batch_size)


class _Rows(TensorDataset):
    def __init__(self, rows: Tensor, order: Tensor) -> None:
        super().__init__(rows)
        self._order = order.tolist()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][self._order[index]]


def train_step(model: GPT, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """One step as users write it."""
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches without end."""
    while True:
        yield from loader
