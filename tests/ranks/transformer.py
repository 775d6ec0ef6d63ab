"""The model that every layout trains: small, with sizes that do not divide, tied embeddings and a fused QKV.

What torch refuses sets the sizes: the number of heads and the hidden width divide by four because an uneven
Colwise -> Rowwise pair fails in torch itself. The vocabulary (101) and the width (27) divide by nothing, so that
embeddings, norms and biases come in uneven shards. The rows of the fused QKV are ordered by heads, so that a cut
between heads is one box.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, HIDDEN, BLOCKS, LENGTH = 101, 27, 4, 6, 52, 2, 8
EXPERTS, EXPERT_HIDDEN = 3, 20
TIED = "head.weight"
"""Another name of embed.weight."""
BATCH = 8
"""Sequences in the global batch, whatever the layout."""


class Attention(nn.Module):
    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, HEADS * 3 * HEAD_WIDTH)
        self.proj = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        self.register_buffer("bias", torch.where(distance >= 0, -0.25 * distance, -torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # However many heads there are here: with tensor parallelism each rank has some.
        rows = self.qkv(x).unflatten(-1, (-1, 3, HEAD_WIDTH)).transpose(1, 2)
        q, k, v = rows.unbind(3)
        weights = torch.softmax(q @ k.transpose(-1, -2) / HEAD_WIDTH**0.5 + self.bias, -1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Experts as two parameters, one expert a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, EXPERT_HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, EXPERT_HIDDEN, WIDTH) / EXPERT_HIDDEN**0.5)

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        hidden = F.gelu(torch.einsum("btw,ewh->ebth", x, up))
        return torch.einsum("ebth,ehw,bte->btw", hidden, down, gates)


class Modules(nn.ModuleDict):
    """Experts as modules of their own, named by their number; a rank may hold some of them only."""

    def __init__(self) -> None:
        super().__init__({
            str(i): nn.Sequential(nn.Linear(WIDTH, EXPERT_HIDDEN), nn.GELU(), nn.Linear(EXPERT_HIDDEN, WIDTH))
            for i in range(EXPERTS)
        })  # fmt: skip

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) * gates[..., int(i), None] for i, expert in self.items())  # type: ignore[return-value]


class Mixture(nn.Module):
    """A feed-forward layer of several experts, all of which see every token, weighted by a router."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, torch.softmax(self.router(x), -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, feed: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed = feed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Logits from tokens; or, as a stage of a pipeline, what `first`, `last` and its blocks leave of that."""

    updates: torch.Tensor

    def __init__(self, family: str = "dense") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        feeds = {"dense": Feed, "stack": lambda: Mixture(Stack()), "modules": lambda: Mixture(Modules())}
        self.blocks = nn.ModuleDict({str(i): Block(Feed() if i == 0 else feeds[family]()) for i in range(BLOCKS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.first = self.last = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def build_model(family: str = "dense") -> Transformer:
    """The same whole model in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        return Transformer(family)


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens wanted of step `step`: the same for every layout, before it is cut."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + step))
    return tokens[:, :-1], tokens[:, 1:]


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and blocks learn at rates of their own: stages of a pipeline have other groups."""
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        part = name.partition("blocks.")[2].partition(".")[0]
        rate = 1e-3 if not part else 2e-3 + 1e-3 * int(part)
        options = {"lr": rate, "weight_decay": 0.1 if part and p.ndim > 1 else 0.0}
        groups.setdefault((part, p.ndim > 1), {"params": [], **options})["params"].append(p)
    return list(groups.values())


# eps: the gradient of a key's bias is zero but for rounding, which must not become a step of a whole learning rate.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-6}),
    "adamw-fused": (torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-6, "fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
}


def build_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[kind]
    return cls(parameter_groups(model), **options)  # type: ignore[call-arg]
