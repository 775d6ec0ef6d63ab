"""The six models of LightCheck's table, built by configuration: ResNet-18, VGG-16, Inception-V3, AlexNet, GPT-2, BERT.

At scale 1 they are what their papers and the usual libraries have, to the parameter. A benchmark trains them narrower and on
smaller inputs, so that a step takes a fraction of a second on one core: `Scale` says how, and results state the sizes.
Optimizers are those that such models are trained with: SGD with momentum for images, fused AdamW for text. Data is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000
HEAD_DIM = 64
Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a model is, and what it sees at a step."""

    width: float = 1.0
    """Channels, dimensions and vocabularies are so many times those of the original; classes and layers are not scaled."""
    size: int
    """Pixels on a side, or tokens in a sequence."""
    batch: int = 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, how it is trained, and how large it is in a benchmark."""

    name: str
    model: Callable[[float], nn.Module]
    """Of a width; its output is one row of logits for each target."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[Scale, torch.Generator], Batch]
    scale: Scale
    """In a benchmark."""
    quick: Scale
    """In a test: a step takes milliseconds."""

    def build(self, scale: Scale, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer. Equal for equal seeds; the global generator is left as it was."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model(scale.width)
        return model, self.optimizer(model)

    def batch(self, scale: Scale, *, seed: int = 0) -> Batch:
        """Random inputs and targets, equal for equal seeds."""
        return self.data(scale, torch.Generator().manual_seed(seed))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One step as users write it."""
    inputs, targets = batch
    loss: Any = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of parameters, buffers and, after a step, optimizer state."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _images(scale: Scale, generator: torch.Generator) -> Batch:
    pixels = torch.randn(scale.batch, 3, scale.size, scale.size, generator=generator)
    return pixels, torch.randint(CLASSES, (scale.batch,), generator=generator)


def _text(vocabulary: int, *, labels: int | None) -> Callable[[Scale, torch.Generator], Batch]:
    """Random tokens, the first ones the likelier, as words are; targets are the next tokens, or one of some labels."""

    def data(scale: Scale, generator: torch.Generator) -> Batch:
        num_words = _scaled(vocabulary, scale.width)
        uniform = torch.rand(scale.batch, scale.size + 1, generator=generator)
        words = (num_words**uniform).long().clamp_(1, num_words) - 1
        if labels is not None:
            return words[:, :-1].contiguous(), torch.randint(labels, (scale.batch,), generator=generator)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()

    return data


def _scaled(count: int, width: float) -> int:
    return max(1, round(count * width))


# -- images -----------------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18(width: float = 1.0) -> nn.Module:
    """He et al. 2016, for images of 224 pixels."""
    sizes = [_scaled(n, width) for n in (64, 128, 256, 512)]
    blocks: list[nn.Module] = []
    last = sizes[0]
    for index, size in enumerate(sizes):
        blocks += [_Residual(last, size, 1 if index == 0 else 2), _Residual(size, size, 1)]
        last = size
    return nn.Sequential(
        nn.Conv2d(3, sizes[0], 7, 2, 3, bias=False), nn.BatchNorm2d(sizes[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, CLASSES),
    )  # fmt: skip


def _classifier(inputs: int, hidden: int) -> list[nn.Module]:
    return [
        nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Dropout(), nn.Linear(hidden, CLASSES),
    ]  # fmt: skip


def vgg16(width: float = 1.0) -> nn.Module:
    """Simonyan and Zisserman 2015, configuration D."""
    layers: list[nn.Module] = []
    last = 3
    for count, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            size = _scaled(channels, width)
            layers += [nn.Conv2d(last, size, 3, padding=1), nn.ReLU()]
            last = size
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), *_classifier(last * 7 * 7, _scaled(4096, width)))


def alexnet(width: float = 1.0) -> nn.Module:
    """Krizhevsky 2014 (one tower)."""
    a, b, c, d = (_scaled(n, width) for n in (64, 192, 384, 256))
    return nn.Sequential(
        nn.Conv2d(3, a, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(b, c, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c, d, 3, padding=1), nn.ReLU(), nn.Conv2d(d, d, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6), nn.Dropout(),
        *_classifier(d * 6 * 6, _scaled(4096, width)),
    )  # fmt: skip


class _Branches(nn.Module):
    """Ways through which the same input goes; what comes out is joined channel by channel."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


class _Inception:
    """Parts of Inception-V3 at a width."""

    def __init__(self, width: float) -> None:
        self._width = width

    def conv(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, pad: bool = True) -> nn.Module:
        """Convolution, norm, ReLU. Channels as in the original, 3 being the image's; padded to the same size, or not."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        first, size = inputs if inputs == 3 else _scaled(inputs, self._width), _scaled(outputs, self._width)
        padding = (high // 2, wide // 2) if pad else (0, 0)
        return nn.Sequential(
            nn.Conv2d(first, size, (high, wide), stride, padding, bias=False), nn.BatchNorm2d(size, eps=0.001), nn.ReLU()
        )

    def pooled(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), self.conv(inputs, outputs, 1))

    def a(self, inputs: int, pooled: int) -> nn.Module:
        conv = self.conv
        return _Branches(
            conv(inputs, 64, 1), nn.Sequential(conv(inputs, 48, 1), conv(48, 64, 5)),
            nn.Sequential(conv(inputs, 64, 1), conv(64, 96, 3), conv(96, 96, 3)), self.pooled(inputs, pooled),
        )  # fmt: skip

    def b(self, inputs: int) -> nn.Module:
        conv = self.conv
        return _Branches(
            conv(inputs, 384, 3, 2, pad=False),
            nn.Sequential(conv(inputs, 64, 1), conv(64, 96, 3), conv(96, 96, 3, 2, pad=False)), nn.MaxPool2d(3, 2),
        )  # fmt: skip

    def c(self, inputs: int, inner: int) -> nn.Module:
        conv, high, wide = self.conv, (7, 1), (1, 7)
        return _Branches(
            conv(inputs, 192, 1), nn.Sequential(conv(inputs, inner, 1), conv(inner, inner, wide), conv(inner, 192, high)),
            nn.Sequential(
                conv(inputs, inner, 1), conv(inner, inner, high), conv(inner, inner, wide), conv(inner, inner, high),
                conv(inner, 192, wide),
            ), self.pooled(inputs, 192),
        )  # fmt: skip

    def d(self, inputs: int) -> nn.Module:
        conv = self.conv
        return _Branches(
            nn.Sequential(conv(inputs, 192, 1), conv(192, 320, 3, 2, pad=False)),
            nn.Sequential(
                conv(inputs, 192, 1), conv(192, 192, (1, 7)), conv(192, 192, (7, 1)), conv(192, 192, 3, 2, pad=False)
            ), nn.MaxPool2d(3, 2),
        )  # fmt: skip

    def e(self, inputs: int) -> nn.Module:
        conv = self.conv

        def both() -> nn.Module:
            return _Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))

        return _Branches(
            conv(inputs, 320, 1), nn.Sequential(conv(inputs, 384, 1), both()),
            nn.Sequential(conv(inputs, 448, 1), conv(448, 384, 3), both()), self.pooled(inputs, 192),
        )  # fmt: skip


def inception_v3(width: float = 1.0) -> nn.Module:
    """Szegedy et al. 2016, for images of 299 pixels, without the auxiliary classifier."""
    of = _Inception(width)
    conv = of.conv
    return nn.Sequential(
        conv(3, 32, 3, 2, pad=False), conv(32, 32, 3, pad=False), conv(32, 64, 3), nn.MaxPool2d(3, 2), conv(64, 80, 1),
        conv(80, 192, 3, pad=False), nn.MaxPool2d(3, 2), of.a(192, 32), of.a(256, 64), of.a(288, 64), of.b(288),
        of.c(768, 128), of.c(768, 160), of.c(768, 160), of.c(768, 192), of.d(768), of.e(1280), of.e(2048),
        nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(_joined(width), CLASSES),
    )  # fmt: skip


def _joined(width: float) -> int:
    """Channels that come out of Inception-V3's last block."""
    return sum(_scaled(n, width) for n in (320, 384, 384, 384, 384, 192))


# -- text -------------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self, dim: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (t.view(batch, length, -1, HEAD_DIM).transpose(1, 2) for t in self.qkv(x).split(dim, dim=2))
        dropout = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return result


class _Layer(nn.Module):
    """Attention and MLP with norms before them (GPT-2) or after (BERT)."""

    def __init__(self, dim: int, *, gpt: bool) -> None:
        super().__init__()
        self.gpt = gpt
        self.attention = _Attention(dim, causal=gpt)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh" if gpt else "none"), nn.Linear(4 * dim, dim)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in zip((self.attention, self.mlp), self.norms, strict=True):
            x = x + self.dropout(part(norm(x))) if self.gpt else norm(x + self.dropout(part(x)))
        return x


class GPT2(nn.Module):
    """Radford et al. 2019, small: 12 layers of 768; the head is the embedding."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        dim = HEAD_DIM * _scaled(12, width)
        self.words = nn.Embedding(_scaled(50257, width), dim)
        self.positions = nn.Embedding(1024, dim)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.Sequential(*(_Layer(dim, gpt=True) for _ in range(12)))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.layers(self.dropout(self.words(words) + self.positions(places)))
        return F.linear(self.norm(x), self.words.weight)


class BERT(nn.Module):
    """Devlin et al. 2019, base: 12 layers of 768, and the pooler; gives one vector for each sequence."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        dim = HEAD_DIM * _scaled(12, width)
        self.dim = dim
        self.words = nn.Embedding(_scaled(30522, width), dim)
        self.positions = nn.Embedding(512, dim)
        self.types = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.Sequential(*(_Layer(dim, gpt=False) for _ in range(12)))
        self.pooler = nn.Linear(dim, dim)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        first_type = self.types(torch.zeros_like(places))
        x = self.layers(self.dropout(self.norm(self.words(words) + self.positions(places) + first_type)))
        return torch.tanh(self.pooler(x[:, 0]))


def bert_classifier(width: float = 1.0) -> nn.Module:
    """BERT with two classes on top, as it is fine-tuned."""
    body = BERT(width)
    return nn.Sequential(body, nn.Dropout(0.1), nn.Linear(body.dim, 2))


def _image_family(name: str, model: Callable[[float], nn.Module], scale: Scale, *, quick: int = 32) -> Family:
    small = Scale(width=1 / 16, size=quick, batch=2)
    return Family(name=name, model=model, optimizer=_sgd, data=_images, scale=scale, quick=small)


def _text_family(
    name: str, model: Callable[[float], nn.Module], vocabulary: int, labels: int | None, scale: Scale
) -> Family:
    small = Scale(width=1 / 64, size=8, batch=2)
    data = _text(vocabulary, labels=labels)
    return Family(name=name, model=model, optimizer=_adamw, data=data, scale=scale, quick=small)


_ALL = (
    _image_family("ResNet-18", resnet18, Scale(width=0.75, size=96, batch=4)),
    _image_family("VGG-16", vgg16, Scale(width=0.25, size=96, batch=2)),
    _image_family("Inception-V3", inception_v3, Scale(width=0.5, size=139, batch=2), quick=75),
    _image_family("AlexNet", alexnet, Scale(width=0.375, size=224, batch=8), quick=64),
    _text_family("GPT-2", GPT2, 50257, None, Scale(width=0.25, size=128, batch=2)),
    _text_family("BERT", bert_classifier, 30522, 2, Scale(width=0.25, size=128, batch=2)),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def describe(family: Family, scale: Scale) -> dict[str, Any]:
    """What results state about a model: sizes as built, after one step."""
    model, optimizer = family.build(scale)
    train_step(model, optimizer, family.batch(scale))
    return {
        "width": scale.width, "size": scale.size, "batch": scale.batch, "optimizer": type(optimizer).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()), "state_bytes": state_bytes(model, optimizer),
    }  # fmt: skip
