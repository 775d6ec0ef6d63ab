"""Six small but real training set-ups, for every optimizer family, and the loop body that each of them runs.

A Training is built from a seed and knows nothing of Everstep. Its samples do not depend on the seed; its weights, the
global generators and the order of its data do. `turn(batch)` is one turn of the user's loop; it counts batches in an
extra, as real loops do, because steps of a run are commits, not batches. `moment` is called inside a turn after each
thing that a kill could separate from the next.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import everstep

Groups = list[dict[str, Any]]

# ------------------------------------------------------------------------------------------ optimizer families


class SignMomentum(Optimizer):
    """A user's own optimizer (Lion-like): a moment and a count, and a setting that is in no group."""

    sharpness = 3.0

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p)
                    state["count"] = 0
                state["count"] += 1
                moment = state["moment"]
                moment.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.sub_(torch.tanh(moment * self.sharpness * state["count"] ** 0.5), alpha=group["lr"])
        return loss


class OwnSignMomentum(SignMomentum):
    """Not registered, and its setting is in the object alone."""

    def __init__(self, params: Any, lr: float = 1e-3, sharpness: float = 2.0) -> None:
        super().__init__(params, lr)
        self.sharpness = sharpness


@everstep.register
class RegisteredSignMomentum(SignMomentum):
    """Known to Everstep by name: replayed without a live optimizer. Its step calls its parent's: hooks fire twice."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


@dataclass(frozen=True)
class Family:
    """One optimizer class in one variant."""

    name: str
    cls: type[Optimizer]
    options: dict[str, Any]
    takes_groups: bool = True
    needs_closure: bool = False
    takes_sparse: bool = False
    matrices_only: bool = False

    @property
    def fused(self) -> bool:
        return bool(self.options.get("fused"))

    def __call__(self, groups: Iterable[Any]) -> Optimizer:
        # Schedulers write into a tensor that is a learning rate.
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        return self.cls(groups, **options)


def _families() -> dict[str, Family]:
    o = torch.optim
    plain: list[tuple[str, type[Optimizer], dict[str, Any], bool]] = [
        ("sgd", o.SGD, {"lr": 0.05}, True),
        ("sgd-momentum", o.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-2}, True),
        ("sgd-nesterov", o.SGD, {"lr": 0.03, "momentum": 0.9, "nesterov": True}, True),
        ("adam", o.Adam, {"lr": 0.01, "weight_decay": 1e-2}, True),
        ("adam-amsgrad", o.Adam, {"lr": 0.01, "amsgrad": True}, True),
        ("adamw", o.AdamW, {"lr": 0.01, "betas": (0.8, 0.99)}, True),
        ("adamw-amsgrad-maximize", o.AdamW, {"lr": 1e-3, "amsgrad": True, "maximize": True}, True),
        ("adagrad", o.Adagrad, {"lr": 0.05, "lr_decay": 1e-2, "initial_accumulator_value": 0.1}, True),
        ("adadelta", o.Adadelta, {"lr": 1.0}, False),
        ("adamax", o.Adamax, {"lr": 0.01}, False),
        ("asgd", o.ASGD, {"lr": 0.05, "t0": 5.0}, False),
        ("nadam", o.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 1e-2}, False),
        ("radam", o.RAdam, {"lr": 0.01}, False),
        ("rmsprop", o.RMSprop, {"lr": 0.005}, False),
        ("rmsprop-centered", o.RMSprop, {"lr": 0.005, "centered": True, "momentum": 0.9}, False),
        ("rprop", o.Rprop, {"lr": 0.01}, False),
        ("adafactor", o.Adafactor, {"lr": 0.05}, False),
    ]
    families = []
    for name, cls, options, has_fused in plain:
        families.append(Family(name, cls, {**options, "foreach": False}))
        families.append(Family(f"{name}-foreach", cls, {**options, "foreach": True}))
        if has_fused:
            families.append(Family(f"{name}-fused", cls, {**options, "fused": True}))
    families += [
        Family("adam-default", o.Adam, {}),
        Family("adam-tensor-lr", o.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
        Family("adam-tensor-lr-fused", o.Adam, {"lr": torch.tensor(0.01), "fused": True}),
        Family("adamw-capturable-flags", o.AdamW, {"lr": 0.01, "differentiable": False, "eps": 1e-6}),
        Family("muon", o.Muon, {"lr": 0.02}, matrices_only=True),
        Family("lbfgs", o.LBFGS, {"lr": 0.1, "max_iter": 3, "history_size": 4}, takes_groups=False, needs_closure=True),
        Family("own", OwnSignMomentum, {"lr": 0.01, "sharpness": 2.5}),
        Family("own-registered", RegisteredSignMomentum, {"lr": 0.01}),
    ]
    return {f.name: f for f in families}


FAMILIES = _families()
SPARSE_FAMILIES = {
    f.name: f
    for f in (
        Family("sparse-adam", torch.optim.SparseAdam, {"lr": 0.01}, takes_sparse=True),
        Family("sparse-sgd", torch.optim.SGD, {"lr": 0.1}, takes_sparse=True),
        Family("sparse-sgd-momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, takes_sparse=True),
        Family("sparse-sgd-momentum-foreach", torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "foreach": True},
               takes_sparse=True),
        Family("sparse-adagrad", torch.optim.Adagrad, {"lr": 0.1}, takes_sparse=True),
        Family("sparse-adagrad-foreach", torch.optim.Adagrad, {"lr": 0.1, "foreach": True}, takes_sparse=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How the loop is written. Defaults are those of the set-up."""

    accumulate: int = 1
    clip: str = ""
    """`norm`, `value` or empty."""
    scale: float = 0.0
    """Initial scale of a GradScaler; 0: none."""
    infs: tuple[int, ...] = ()
    """Batches whose loss is made infinite, so that the scaler skips their step."""
    zero: str = "after"
    """When and how gradients are cleared: after, before, after-zeros, before-zeros, model, model-zeros, by-hand or
    detach."""
    dtype: torch.dtype = torch.float32
    schedule: str = ""
    """`step`, `cycle` or `plateau`: stepped in every turn; `epoch`: after each pass."""
    closure: bool = False
    num_workers: int = 0
    generator: bool = False
    autocast: bool = False
    clamp: bool = False
    """WGAN: clamp the critic's weights through .data after each of its steps."""
    channels_last: bool = False
    spectral: bool = False
    """GAN: the critic's first weight is spectrally normalised, so that every forward moves buffers."""
    max_norm: bool = False
    """LSTM: forward renormalises rows of the embedding in place."""
    average: bool = False
    """MLP: a second model, the moving average of the first, which no optimizer knows."""
    loose: bool = False
    """MLP: a temperature that is in the optimizer and in no model."""
    reload: int = 0
    """MLP: at this batch weights and optimizer state are loaded by load_state_dict."""
    hooks: str = ""
    """MLP: the user's own hooks, set `early` or `late`, add noise to gradients before and shrink weights after a step."""
    shared: bool = False
    """MLP: the last layer is also in a second optimizer, which steps after the first."""
    compiled: bool = False
    size: int = 1


# ------------------------------------------------------------------------------------------ the loop


class Progress:
    """How far the user's loop has come: an extra of the user's own."""

    def __init__(self) -> None:
        self.batches = 0
        self.best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.best = state["batches"], state["best"]


class Samples(Dataset[Any]):
    """(index, x, y), with noise from one of the three global generators."""

    def __init__(self, x: Tensor, y: Tensor, noise: str = "") -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        x = self.x[i]
        if self.noise == "torch":
            x = x + 0.1 * torch.randn(x.shape)
        elif self.noise == "numpy":
            x = x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape).astype(np.float32))
        elif self.noise == "random":
            x = x.flip(-1) if random.random() < 0.5 else x
        return i, x, self.y[i]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@dataclass
class Training:
    """One run of a user's program: objects and the body of the loop."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    loader: DataLoader[Any]
    epochs: int
    options: Options
    needs_closure: bool = False
    extras: dict[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    scaler: Any = None
    schedulers: list[Any] = field(default_factory=list)
    epoch_schedulers: list[Any] = field(default_factory=list)
    body: Callable[[Training, Any], Tensor] = None  # type: ignore[assignment]
    moment: Callable[[str], None] = lambda what: None
    loose: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters of optimizers that no model has, by the names that Everstep gives them."""
    turns: list[tuple[int, tuple[int, ...], float]] = field(default_factory=list)
    """(batch number, sample indices, loss) of every turn of this process."""

    def __post_init__(self) -> None:
        self.extras = {"progress": self.progress, **self.extras}
        if self.options.scale:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=self.options.scale, growth_interval=3)
            self.extras["scaler"] = self.scaler
        for name, optimizer in self.optimizers.items():
            self._schedule(name, optimizer)

    def _schedule(self, name: str, optimizer: Optimizer) -> None:
        o = torch.optim.lr_scheduler
        kind = self.options.schedule
        if kind == "step":
            warmup = o.LambdaLR(optimizer, _warmup)
            self.schedulers.append(warmup)
            self.extras[f"warmup {name}"] = warmup
        elif kind == "cycle":
            cycle = o.OneCycleLR(optimizer, max_lr=0.02, total_steps=200, cycle_momentum=False)
            self.schedulers.append(cycle)
            self.extras[f"cycle {name}"] = cycle
        elif kind == "epoch":
            decay = o.SequentialLR(
                optimizer, [o.MultiStepLR(optimizer, [1, 2], gamma=0.5), o.ExponentialLR(optimizer, 0.9)], [2]
            )
            self.epoch_schedulers.append(decay)
            self.extras[f"decay {name}"] = decay
        elif kind == "plateau":
            plateau = o.ReduceLROnPlateau(optimizer, patience=1, factor=0.7, cooldown=1)
            self.schedulers.append(plateau)
            self.extras[f"plateau {name}"] = plateau

    @property
    def model(self) -> nn.Module | dict[str, nn.Module]:
        return self.models["model"] if list(self.models) == ["model"] else self.models

    @property
    def optimizer(self) -> Optimizer | dict[str, Optimizer]:
        return self.optimizers["optimizer"] if list(self.optimizers) == ["optimizer"] else self.optimizers

    # -- what a user's loop does --------------------------------------------------------------------------------------

    def turn(self, batch: Any) -> float:
        """One turn of the loop."""
        self.moment("fetched")
        self.progress.batches += 1
        loss = self.body(self, batch)
        full = self.progress.batches % self.options.accumulate == 0
        for scheduler in self.schedulers if full else ():
            scheduler.step(*([loss] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        value = float(loss)
        if self.progress.best is None or value < self.progress.best:
            self.progress.best = value
        self.turns.append((self.progress.batches, tuple(batch[0].tolist()), value))
        self.moment("end")
        return value

    def end_epoch(self) -> None:
        """What comes after a pass: validation that draws random numbers, and schedulers."""
        torch.rand(3), random.random(), np.random.rand(2)
        for scheduler in self.epoch_schedulers:
            scheduler.step()

    def reload(self) -> None:
        """In mid-run, load other weights and other optimizer state by load_state_dict."""
        for model in self.models.values():
            model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
        for optimizer in self.optimizers.values():
            state = copy.deepcopy(optimizer.state_dict())
            for values in state["state"].values():
                for value in values.values():
                    if isinstance(value, Tensor) and value.dim():
                        value.mul_(0.25)
            optimizer.load_state_dict(state)

    def learn(self, compute: Callable[[], Tensor], *names: str) -> Tensor:
        """Backward and, when the accumulation is full, a step of the optimizers named (all, if none)."""
        options = self.options
        optimizers = [self.optimizers[n] for n in names or self.optimizers]
        micro = self.progress.batches % options.accumulate
        if options.zero.startswith("before") and micro == 1 % options.accumulate:
            self._clear(optimizers)
        if options.closure or self.needs_closure:
            return self._learn_by_closure(compute, optimizers)
        loss = self._loss(compute) / options.accumulate
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        self.moment("backward")
        if micro == 0:
            for optimizer in optimizers:
                self._clip(optimizer)
                if self.scaler is not None:
                    self.scaler.step(optimizer)
                else:
                    optimizer.step()
                self.moment("step")
            if self.scaler is not None:
                self.scaler.update()
            if not options.zero.startswith("before"):
                self._clear(optimizers)
        return loss.detach()

    def _loss(self, compute: Callable[[], Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.autocast):
            loss = compute()
        return loss * float("inf") if self.progress.batches in self.options.infs else loss

    def _learn_by_closure(self, compute: Callable[[], Tensor], optimizers: list[Optimizer]) -> Tensor:
        def closure() -> Tensor:
            self._clear(optimizers)
            loss = self._loss(compute)
            loss.backward()
            self.moment("backward")
            for optimizer in optimizers:
                self._clip(optimizer)
            return loss

        loss = None
        for optimizer in optimizers:
            loss = optimizer.step(closure)
            self.moment("step")
        assert loss is not None
        return torch.as_tensor(loss).detach()

    def _clip(self, optimizer: Optimizer) -> None:
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not self.options.clip or any(p.grad.is_sparse for p in params):
            return
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if self.options.clip == "norm":
            nn.utils.clip_grad_norm_(params, 0.5)
        else:
            nn.utils.clip_grad_value_(params, 0.01)

    def _clear(self, optimizers: list[Optimizer]) -> None:
        how = self.options.zero
        for optimizer in optimizers:
            if how in ("after", "before"):
                optimizer.zero_grad()
            elif how in ("after-zeros", "before-zeros"):
                optimizer.zero_grad(set_to_none=False)
            else:
                for p in [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]:
                    if how == "by-hand":
                        p.grad = None
                    elif how == "detach":
                        p.grad.detach_()
                        p.grad.zero_()
        if how.startswith("model"):
            for model in self.models.values():
                model.zero_grad(set_to_none=how == "model")


def _warmup(n: int) -> float:
    return min(1.0, (n + 1) / 8) * 0.98**n


def _optimizers(family: Family, params: Groups | list[nn.Parameter]) -> dict[str, Optimizer]:
    """One optimizer of the family; what it does not take goes to a second one."""
    groups: Groups = params if params and isinstance(params[0], dict) else [{"params": list(params)}]  # type: ignore
    if not family.takes_groups:
        return {"optimizer": family([p for g in groups for p in g["params"]])}
    if not family.matrices_only:
        return {"optimizer": family(groups)}
    matrices = [p for g in groups for p in g["params"] if p.dim() == 2]
    others = [p for g in groups for p in g["params"] if p.dim() != 2]
    return {"matrices": family(matrices), "others": torch.optim.AdamW(others, lr=0.01)}


def _loader(data: Samples, options: Options, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5) if options.generator else None
    dataset: Dataset[Any] = everstep.data.SeededDataset(data, seed=7) if options.num_workers else data
    return DataLoader(
        dataset, batch_size=batch_size, shuffle=True, drop_last=True, generator=generator,
        num_workers=options.num_workers,
    )  # fmt: skip


def _data(*shape: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(shape))


# ------------------------------------------------------------------------------------------ set-ups


OWN_SETTINGS = {"limit": float("inf"), "kind": "biases", "range": (0, None)}


def mlp(seed: int, family: Family, options: Options) -> Training:
    """A classifier; weights and biases in two groups with settings of their own."""
    seed_all(seed)
    width = 24 * options.size
    layers = [nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5)]
    model: nn.Module = nn.Sequential(*layers).to(options.dtype)
    models = {"model": model}
    g = _data(32, 12)
    data = Samples(torch.randn(32, 12, generator=g), torch.randint(5, (32,), generator=g), "numpy")
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    temperature = nn.Parameter(torch.full((1,), 1.5, dtype=options.dtype))
    groups: Groups = [{"params": weights}, {"params": biases, "lr": family.options.get("lr", 0.01) * 2, **OWN_SETTINGS}]
    if options.loose:
        groups.append({"params": [temperature]})
    optimizers = _optimizers(family, groups)
    if options.shared:
        optimizers["second"] = torch.optim.SGD(layers[-1].parameters(), lr=0.01, momentum=0.5)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    if options.average:
        models["average"] = average
    if options.hooks == "early":
        _hook(optimizers)
    forward = torch.compile(model, backend="eager") if options.compiled else model

    def body(t: Training, batch: Any) -> Tensor:
        _, x, y = batch
        if options.reload == t.progress.batches:
            t.reload()
        if options.hooks == "late" and not t.turns:
            _hook(optimizers)
        loss = t.learn(lambda: F.cross_entropy(forward(x.to(options.dtype)).float() * temperature.float(), y))
        if options.average:
            average.update_parameters(model)
        return loss

    t = Training(
        models if not options.compiled else {"model": forward}, optimizers, _loader(data, options, 8), 3, options,
        family.needs_closure, body=body,
    )  # fmt: skip
    if options.loose:
        t.loose["param_groups.2.0"] = temperature
    return t


def _hook(optimizers: dict[str, Optimizer]) -> None:
    for optimizer in optimizers.values():
        optimizer.register_step_pre_hook(_add_noise)
        optimizer.register_step_post_hook(_shrink)


def _add_noise(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for p in [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]:
        p.grad = p.grad + 0.01 * torch.randn(p.shape)


@torch.no_grad()
def _shrink(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.mul_(0.999)


class Cnn(nn.Module):
    """Convolutions, BatchNorm in both of its momentum modes, a counter that is in no state_dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(width, momentum=None)
        self.head = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def cnn(seed: int, family: Family, options: Options) -> Training:
    """An image classifier with BatchNorm and random flips."""
    seed_all(seed)
    model = Cnn(6 * options.size).to(options.dtype)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
    g = _data(32, 1, 8, 8)
    data = Samples(torch.randn(32, 1, 8, 8, generator=g), torch.randint(3, (32,), generator=g), "random")
    optimizers = _optimizers(family, list(model.parameters()))

    def body(t: Training, batch: Any) -> Tensor:
        _, x, y = batch
        return t.learn(lambda: F.cross_entropy(model(x.to(options.dtype)).float(), y))

    return Training(
        {"model": model}, optimizers, _loader(data, options, 8), 3, options, family.needs_closure, body=body
    )  # fmt: skip


class Transformer(nn.Module):
    """A causal language model whose output weights are its embedding."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(10, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.2, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.triu(torch.full((10, 10), float("-inf")), 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places[: x.shape[1]]
        return self.head(self.norm(self.body(h, mask=self.mask[: x.shape[1], : x.shape[1]].to(h.dtype))))


def transformer(seed: int, family: Family, options: Options) -> Training:
    """Next-token prediction with dropout and tied weights."""
    seed_all(seed)
    model = Transformer(29, 16 * options.size).to(options.dtype)
    g = _data(32, 10)
    data = Samples(torch.randint(29, (32, 10), generator=g), torch.zeros(32, dtype=torch.int64))
    optimizers = _optimizers(family, list(model.parameters()))

    def body(t: Training, batch: Any) -> Tensor:
        _, x, _ = batch
        return t.learn(lambda: F.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten()))

    return Training(
        {"model": model}, optimizers, _loader(data, options, 8), 3, options, family.needs_closure, body=body
    )  # fmt: skip


class Recommender(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50, width, sparse=True, mode="mean")
        self.users = nn.Embedding(20, width, sparse=True)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))


def embedding(seed: int, family: Family, options: Options, sparse: str = "sparse-adam") -> Training:
    """A recommender whose embeddings have sparse gradients; its dense head is trained by the family."""
    seed_all(seed)
    model = Recommender(6 * options.size).to(options.dtype)
    g = _data(32, 6)
    data = Samples(torch.randint(20, (32, 6), generator=g), torch.randn(32, generator=g))
    tables = [model.items.weight, model.users.weight]
    chosen = SPARSE_FAMILIES[sparse]
    heads = _optimizers(family, list(model.head.parameters()))
    optimizers = {"tables": chosen(tables), **({"head": heads["optimizer"]} if "optimizer" in heads else heads)}

    def score(x: Tensor) -> Tensor:
        bags, users = x[:, :-1] + 10, x[:, -1]
        return model.head(torch.cat([model.items(bags), model.users(users)], 1)).squeeze(1)

    def body(t: Training, batch: Any) -> Tensor:
        _, x, y = batch
        if not (family.needs_closure or options.closure):
            return t.learn(lambda: F.mse_loss(score(x), y.to(options.dtype)))
        others = [n for n in optimizers if n != "tables"]
        loss = t.learn(lambda: F.mse_loss(score(x), y.to(options.dtype)), "tables")
        return loss + t.learn(lambda: F.mse_loss(score(x), y.to(options.dtype)), *others)

    return Training(
        {"model": model}, optimizers, _loader(data, options, 8), 3, options, family.needs_closure, body=body
    )  # fmt: skip


def gan(seed: int, family: Family, options: Options) -> Training:
    """Two models, two optimizers of the family: two steps of the critic and one of the generator in a turn."""
    seed_all(seed)
    width = 12 * options.size
    generator = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 6))
    critic = nn.Sequential(nn.Linear(6, width), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(width, 1))
    if options.spectral:
        nn.utils.parametrizations.spectral_norm(critic[0])
    models = {"generator": generator.to(options.dtype), "critic": critic.to(options.dtype)}
    optimizers = {
        f"{name} {key}" if len(made) > 1 else f"{name} optimizer": o
        for name, model in models.items()
        for made in [_optimizers(family, list(model.parameters()))]
        for key, o in made.items()
    }
    data = Samples(torch.randn(32, 6, generator=_data(32, 6)) * 0.5 + 2, torch.zeros(32))
    of = {name: [o for o in optimizers if o.startswith(name)] for name in models}

    def fake(n: int) -> Tensor:
        return generator(torch.randn(n, 4).to(options.dtype))

    def criticism(x: Tensor) -> Tensor:
        real, made = critic(x), critic(fake(len(x)).detach())
        if options.clamp:
            return made.mean() - real.mean()
        return F.softplus(-real).mean() + F.softplus(made).mean()

    def body(t: Training, batch: Any) -> Tensor:
        x = batch[1].to(options.dtype)
        for _ in range(2):
            of_critic = t.learn(lambda: criticism(x), *of["critic"])
            if options.clamp:
                for p in critic.parameters():
                    p.data.clamp_(-0.05, 0.05)
                t.moment("clamp")
        sign = (lambda s: -s.mean()) if options.clamp else (lambda s: F.softplus(-s).mean())
        of_generator = t.learn(lambda: sign(critic(fake(len(x)))), *of["generator"])
        critic.zero_grad(set_to_none=options.zero not in ("after-zeros", "before-zeros"))
        return of_critic + of_generator

    return Training(models, optimizers, _loader(data, options, 8), 3, options, family.needs_closure, body=body)


class Tagger(nn.Module):
    def __init__(self, width: int, max_norm: float | None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(23, width, max_norm=max_norm)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x))[0][:, -1])


UNFREEZE_LSTM, UNFREEZE_TOKENS = 5, 9


def lstm(seed: int, family: Family, options: Options) -> Training:
    """Only the head learns at first. The LSTM gets a group of its own in mid-run, then the embedding thaws in place."""
    seed_all(seed)
    model = Tagger(10 * options.size, 2.0 if options.max_norm else None).to(options.dtype)
    model.tokens.requires_grad_(False)
    model.lstm.requires_grad_(False)
    g = _data(32, 7)
    data = Samples(torch.randint(23, (32, 7), generator=g), torch.randint(4, (32,), generator=g))
    first = [*model.head.parameters(), *model.tokens.parameters()]
    if not family.takes_groups:
        first += list(model.lstm.parameters())
    optimizers = _optimizers(family, first)

    def body(t: Training, batch: Any) -> Tensor:
        _, x, y = batch
        if t.progress.batches == UNFREEZE_LSTM:
            model.lstm.requires_grad_(True)
            params = list(model.lstm.parameters())
            if family.matrices_only:
                t.optimizers["matrices"].add_param_group({"params": [p for p in params if p.dim() == 2], "lr": 0.01})
                t.optimizers["others"].add_param_group({"params": [p for p in params if p.dim() != 2]})
            elif family.takes_groups:
                optimizer = t.optimizers["optimizer"]
                optimizer.add_param_group({"params": params, "lr": optimizer.param_groups[0]["lr"] * 0.5})
        if t.progress.batches == UNFREEZE_TOKENS:
            model.tokens.requires_grad_(True)
        if t.progress.batches == UNFREEZE_TOKENS + 2:
            model.head.bias.requires_grad_(False)
        return t.learn(lambda: F.cross_entropy(model(x).float(), y))

    return Training(
        {"model": model}, optimizers, _loader(data, options, 8), 3, options, family.needs_closure, body=body
    )  # fmt: skip


SETUPS: dict[str, tuple[Callable[..., Training], Options]] = {
    "mlp": (mlp, Options(clip="norm", schedule="step", zero="before")),
    "cnn": (cnn, Options(schedule="epoch")),
    "transformer": (transformer, Options(clip="norm", schedule="step")),
    "embedding": (embedding, Options()),
    "gan": (gan, Options()),
    "lstm": (lstm, Options(clip="value")),
}


def build(setup: str, family: str, seed: int, sparse: str = "", **options: Any) -> Training:
    """A set-up by name; options on top of its defaults."""
    make, defaults = SETUPS[setup]
    chosen = replace(defaults, **options)
    return make(seed, FAMILIES[family], chosen, **({"sparse": sparse} if sparse else {}))
