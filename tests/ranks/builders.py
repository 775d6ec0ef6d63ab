"""Builders of every layout in layouts.py, and the whole state put together again.

A builder runs on every rank of an initialised world and gives the same training: the same weights at the start, the
same global batch at every step, and the same losses but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformer import (
    BATCH,
    BLOCKS,
    EXPERTS,
    LENGTH,
    OPTIMIZERS,
    VOCABULARY,
    WIDTH,
    Transformer,
    build_model,
    build_optimizer,
    loss_of,
    parameter_groups,
)

from support import equal

MICROBATCHES = 2
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Training:
    """One rank's part of a training."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[Batch], float]
    """Forward, backward, optimizer step, zero_grad; the loss of the global batch, the same on every rank."""


# ------------------------------------------------------------------------------------------ the loop, in its variants


def _training(
    model: nn.Module, optimizer: Optimizer, *, parts: int = 1, part: int = 0, group: Any = None,
    after_backward: Callable[[], None] = lambda: None,
) -> Training:  # fmt: skip
    """The usual loop on the part-th of `parts` equal slices of the batch."""

    def step(batch: Batch) -> float:
        tokens, wanted = (t.chunk(parts)[part] for t in batch)
        loss = loss_of(model(tokens), wanted)
        loss.backward()
        after_backward()
        optimizer.step()
        _count(model)
        optimizer.zero_grad()
        return _mean(loss.detach(), parts, group)

    return Training(model, optimizer, step)


def _count(model: nn.Module) -> None:
    """A buffer that the loop itself changes at every step."""
    module: Any = model.module if isinstance(model, DistributedDataParallel) else model
    module.updates.add_(1)


def _mean(loss: torch.Tensor, parts: int, group: Any) -> float:
    if parts > 1:
        dist.all_reduce(loss, group=group)
        loss /= parts
    return loss.item()


# ------------------------------------------------------------------------------------------ data parallelism


def one(kind: str, family: str = "dense") -> Training:
    model = build_model(family)
    return _training(model, build_optimizer(model, kind))


def ddp(kind: str) -> Training:
    model = DistributedDataParallel(build_model())
    return _training(model, build_optimizer(model, kind), parts=dist.get_world_size(), part=dist.get_rank())


def zero1(kind: str) -> Training:
    model = DistributedDataParallel(build_model())
    cls, options = OPTIMIZERS[kind]
    optimizer = ZeroRedundancyOptimizer(parameter_groups(model), cls, lr=1.0, **options)  # type: ignore[arg-type]
    return _training(model, optimizer, parts=dist.get_world_size(), part=dist.get_rank())


def _shard_fully(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp(kind: str) -> Training:
    model = build_model()
    _shard_fully(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return _training(model, build_optimizer(model, kind), parts=dist.get_world_size(), part=dist.get_rank())


def hsdp(kind: str) -> Training:
    model = build_model()
    _shard_fully(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return _training(model, build_optimizer(model, kind), parts=4, part=dist.get_rank())


# ------------------------------------------------------------------------------------------ tensor parallelism


def _shard_tensors(model: Transformer, mesh: DeviceMesh, sequence: bool) -> None:
    """Heads and hidden units over the ranks; with `sequence` the tokens too, wherever only norms look at them."""
    between: Any = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    norms = ["norm"]
    for i in range(BLOCKS):
        at = f"blocks.{i}"
        plan[f"{at}.attention.qkv"] = plan[f"{at}.feed.up"] = ColwiseParallel()
        plan[f"{at}.attention.proj"] = plan[f"{at}.feed.down"] = RowwiseParallel(output_layouts=between)
        norms += [f"{at}.norm1", f"{at}.norm2"]
        if sequence:
            for part in ("attention", "feed"):
                plan[f"{at}.{part}"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
    if sequence:
        plan |= {name: SequenceParallel() for name in norms}
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embed.weight


def tp(kind: str, sequence: bool = False) -> Training:
    model = build_model()
    _shard_tensors(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence)
    return _training(model, build_optimizer(model, kind))


def fsdp_tp(kind: str) -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = build_model()
    _shard_tensors(model, mesh["tensor"], sequence=True)
    _shard_fully(model, mesh["data"])
    group = mesh["data"].get_group()
    return _training(model, build_optimizer(model, kind), parts=2, part=mesh["data"].get_local_rank(), group=group)


# ------------------------------------------------------------------------------------------ pipelines


def pp(kind: str) -> Training:
    """Two stages, each trained by half of the ranks with DDP if it has more than one.

    Each stage is the whole model without what the other does, so that names are global. The tied weight is on both
    stages, whose gradients of it are summed.
    """
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "data"))
    stage, part, parts = mesh["stage"].get_local_rank(), mesh["data"].get_local_rank(), mesh["data"].size()
    model = build_model()
    model.first, model.last = stage == 0, stage == 1
    for i in range(BLOCKS):
        if (i < BLOCKS // 2) != model.first:
            del model.blocks[str(i)]
    if model.last:
        del model.updates
    else:
        del model.norm
    trained: nn.Module = model
    if parts > 1:
        # Rebuilding buckets fails with several microbatches (an internal assertion of torch); this one is not rebuilt.
        trained = DistributedDataParallel(model, process_group=mesh["data"].get_group(), find_unused_parameters=True)
    # With shapes given, torch runs no forward of its own to find them; DDP's first step would differ by it.
    size = BATCH // parts // MICROBATCHES
    tokens = torch.zeros(size, LENGTH, dtype=torch.int64)
    hidden, logits = (torch.zeros(size, LENGTH, width, requires_grad=True) for width in (WIDTH, VOCABULARY))
    inputs, outputs = (tokens, hidden) if model.first else (hidden, logits)
    group = mesh["stage"].get_group()
    pipe = PipelineStage(trained, stage, 2, torch.device("cpu"), inputs, outputs, group=group)
    schedule = ScheduleGPipe(pipe, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    optimizer = build_optimizer(trained, kind)

    def step(batch: Batch) -> float:
        tokens, wanted = (t.chunk(parts)[part] for t in batch)
        losses: list[torch.Tensor] = []
        if model.first:
            schedule.step(tokens)
        else:
            schedule.step(target=wanted, losses=losses)
        dist.all_reduce(model.embed.weight.grad, group=group)
        optimizer.step()
        if model.first:
            _count(model)
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item() / parts

    return Training(trained, optimizer, step)


# ------------------------------------------------------------------------------------------ expert parallelism


def ep(kind: str, family: str) -> Training:
    """Tokens are shared among the ranks and so are the experts; all other weights are on every rank.

    Every token goes to every rank, and what the experts there make of it is summed on its way back.
    """
    model = build_model(family)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mixture: Any = model.blocks["1"].feed
    mine = [int(i) for i in torch.arange(EXPERTS).chunk(mesh.size())[mesh.get_local_rank()]]
    if family == "stack":
        for name, p in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    else:
        for i in set(range(EXPERTS)) - set(mine):
            del mixture.experts[str(i)]

    def gather(module: nn.Module, args: Any) -> Any:
        whole = [DTensor.from_local(a, mesh, [Shard(0)]).redistribute(placements=[Replicate()]) for a in args]
        x, gates = (a.to_local(grad_placements=[Partial()]) for a in whole)
        return x, gates[..., mine] if family == "stack" else gates

    def scatter(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(output, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()

    mixture.experts.register_forward_pre_hook(gather)
    mixture.experts.register_forward_hook(scatter)
    spread = {id(p) for p in mixture.experts.parameters()}

    def average() -> None:
        for p in model.parameters():
            if id(p) not in spread:
                dist.all_reduce(p.grad)
            p.grad /= mesh.size()

    return _training(
        model, build_optimizer(model, kind), parts=mesh.size(), part=mesh.get_local_rank(), after_backward=average
    )


# ------------------------------------------------------------------------------------------ the whole state


def whole_state(t: Training) -> dict[str, Any] | None:
    """On rank 0 everything in whole tensors, copied: parameters and buffers by name, optimizer state and
    hyperparameters by parameter; None elsewhere. A collective. That replicas agree is asserted on the way."""
    module = t.model.module if isinstance(t.model, DistributedDataParallel) else t.model
    optimizer = t.optimizer.optim if isinstance(t.optimizer, ZeroRedundancyOptimizer) else t.optimizer
    names = {id(p): name for name, p in module.named_parameters()}
    state: dict[str, Any] = {"model": {}, "state": {}, "groups": {}}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        state["model"][name] = _whole(tensor)
    for group in optimizer.param_groups:
        for p in group["params"]:
            state["groups"][names[id(p)]] = {k: group[k] for k in sorted(group) if k != "params"}
            state["state"][names[id(p)]] = {k: _whole(v) for k, v in optimizer.state[p].items()}
    if not dist.is_initialized():
        return _joined([state])
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(state, gathered)
    return _joined(gathered) if gathered is not None else None


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _joined(states: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"model": {}, "state": {}, "groups": {}}
    for rank, state in enumerate(states):
        for part, entries in state.items():
            for name, value in entries.items():
                known = joined[part].setdefault(name, value)
                differences = equal(known, value, name)
                assert not differences, f"rank {rank} has another replica: {differences}"
    return {part: dict(sorted(entries.items())) for part, entries in joined.items()}
