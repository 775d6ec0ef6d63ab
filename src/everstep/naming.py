"""Live models and optimizers as named atoms.

Names are canonical: those of the user's own modules, without what DataParallel, DistributedDataParallel and
torch.compile put in front (`module.`, `_orig_mod.`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from msgspec import structs
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer

from everstep import sharding, tree
from everstep.atoms import RESIDUALS, Atom, Layout, OptimizerSpec, buffer_uid, owner_of_strays, param_uid
from everstep.boxes import Share, filled
from everstep.errors import UsageError
from everstep.fold import class_name
from everstep.layout import Local, Pattern, Patterns
from everstep.memory import CODE_BY_DTYPE, dtype_name, strides_of


def named(objects: Any, kind: type, default: str) -> dict[str, Any]:
    """One object or a dict of named ones, as a dict. UsageError for anything else."""
    found = dict(objects) if isinstance(objects, Mapping) else {default: objects}
    for name, value in found.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"names of {default}s must be strings, not {name!r}")
        inner = getattr(value, "optimizer", None)
        if kind is Optimizer and not isinstance(value, kind) and isinstance(inner, Optimizer):
            found[name] = inner  # accelerate's AcceleratedOptimizer and the like
        elif kind is Optimizer and isinstance(inner, Optimizer) and type(value).__name__ == "AcceleratedOptimizer":
            found[name] = inner
        elif kind is Optimizer and type(value).__name__ == "ZeroRedundancyOptimizer":
            found[name] = value.optim  # it has the state; the outer one's groups are copied into its own at each step
            _outer[value.optim] = weakref.ref(value)
        elif not isinstance(value, kind):
            raise UsageError(f"{default} {name!r} is a {type(value).__name__}, not a {kind.__name__}")
    if not found:
        raise UsageError(f"there is no {default} to attach to")
    return found


_outer: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()


def outer_of(optimizer: Optimizer) -> Optimizer | None:
    """The ZeroRedundancyOptimizer that was given, where this is what it wraps."""
    found = _outer.get(optimizer)
    return None if found is None else found()


def follow_outer(optimizer: Optimizer) -> None:
    """What schedulers have set in a ZeroRedundancyOptimizer, what it wraps has from now on, not only from its next step."""
    outer = outer_of(optimizer)
    if outer is not None:
        for group, theirs in zip(optimizer.param_groups, outer.param_groups, strict=False):
            group.update({k: v for k, v in theirs.items() if k != "params"})


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside wrappers that add a prefix to names."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule":
            inner = module._modules["_orig_mod"]
            assert inner is not None
            module = inner
        else:
            return module


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under its canonical prefix; a module that is reached twice comes twice."""
    module = unwrapped(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}{name}.")


@dataclass
class Place:
    """Where a tensor hangs: replacing it there is seen by comparing identities."""

    container: dict[str, Any]
    key: str
    uid: int


@dataclass
class Inventory:
    """All atoms of the live objects, with the tensors themselves."""

    layout: Layout
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """The memory of each: what this process has of a DTensor, else the tensor itself."""
    live: dict[int, torch.Tensor] = field(default_factory=dict)
    """The objects that hang in modules and groups."""
    replicas: dict[int, torch.Tensor] = field(default_factory=dict)
    """In a part: the memory of parameters that another rank stores, and that must be equal to its own."""
    places: list[Place] = field(default_factory=list)
    empty: list[Place] = field(default_factory=list)
    """Where a parameter or buffer is registered and None: a tensor may be put there later."""
    children: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    """(dict, key, module or None): another module there has other tensors."""
    containers: list[tuple[Any, int]] = field(default_factory=list)
    """Dicts of modules with their lengths: a new entry anywhere is seen by a changed length."""
    groups: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    uid_of: dict[int, int] = field(default_factory=dict)
    """id of a live tensor -> uid"""
    gathering: list[Any] = field(default_factory=list)
    """Modules that have other parameters while they compute (FSDP2): sharding.let_go() gives them back their own."""
    matched: set[str] = field(default_factory=set)
    """Which of the declared patterns are about something here."""

    def labels(self) -> dict[int, str]:
        return {atom.uid: atom.label() for atom in self.layout.atoms}

    def to_fill(self, atoms: Mapping[int, Atom]) -> dict[int, Atom]:
        """Of these, the buffers that are None here: a module makes them when it first needs them."""
        uids = {place.uid for place in self.empty}
        return {uid: atom for uid, atom in atoms.items() if uid in uids and atom.role == "buffer"}

    def params(self) -> dict[int, torch.Tensor]:
        """The live parameters; in a part, those that it has."""
        roles = {a.uid: a.role for a in self.layout.atoms}
        return {uid: t for uid, t in self.live.items() if roles.get(uid) == "param"}

    def part(self, uids: Set[int], rank: int, world_size: int, aliases: Mapping[int, tuple[str, ...]]) -> Inventory:
        """What this rank stores of it, these atoms, as a layout that says which boxes they are.

        `aliases`: their other names on all ranks.
        """
        atoms = tuple(
            structs.replace(a, boxes=tuple((rank, box) for _, box in a.boxes), aliases=aliases.get(a.uid, a.aliases))
            for a in self.layout.atoms
            if a.uid in uids
        )
        layout = structs.replace(
            self.layout, atoms=atoms, world_size=world_size, rank=rank, order=tuple(self.tensors),
            groups=tuple((name, tuple(map(tuple, groups))) for name, groups in self.groups.items()),
        )  # fmt: skip
        return replace(
            self, layout=layout,
            tensors={u: t for u, t in self.tensors.items() if u in uids},
            replicas={
                a.uid: self.tensors[a.uid]
                for a in self.layout.atoms
                if a.role == "param" and a.uid not in uids and self.tensors[a.uid].numel()
            },
            uid_of={i: u for i, u in self.uid_of.items() if u in uids},
            groups={n: [tuple(u for u in g if u in uids) for g in groups] for n, groups in self.groups.items()},
        )  # fmt: skip


Rename = Mapping[str, str] | Callable[[str], str] | None
"""From a live object's name to the run's: a function, or prefixes and what stands for them."""


def _text(name: Any, of: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"rename must give names: {name!r}, for {of!r}, is none")
    return name


def renamer(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return lambda name: _text(rename(name), name)
    prefixes = sorted(((_text(a, "a prefix"), _text(b, a)) for a, b in rename.items()), key=lambda e: -len(e[0]))

    def by_prefix(name: str) -> str:
        for prefix, other in prefixes:
            if name.startswith(prefix):
                return other + name[len(prefix) :]
        return name

    return by_prefix


@dataclass(frozen=True)
class Declared:
    """What the user says about the live objects that they do not tell themselves."""

    rename: Rename = None
    layout: Sequence[Pattern] = ()

    def check(self, matched: Iterable[Iterable[str]]) -> None:
        """UsageError if a pattern has matched on no rank; `matched`: those that have, of each rank."""
        used = {pattern for each in matched for pattern in each}
        unused = [str(p) for p in self.layout if str(p) not in used]
        if unused:
            raise UsageError(
                f"layout: {', '.join(unused)} matches no parameter or buffer. Patterns are matched to canonical names: "
                "without what wrappers put in front, after rename"
            )


UNDECLARED = Declared()


def take_inventory(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], declared: Declared = UNDECLARED
) -> Inventory:
    """Read the live objects. UsageError for what cannot be stored."""
    called = renamer(declared.rename)
    patterns = Patterns(declared.layout)
    of_residuals = Patterns((Local("*"),))
    found: dict[int, _Found] = {}
    inventory = Inventory(Layout((), (), ()), gathering=sharding.gathering(models.values()))
    sharding.let_go(inventory.gathering)
    for model_name, model in models.items():
        visited: set[int] = set()
        for prefix, module in walk(model):
            if id(module) not in visited:
                visited.add(id(module))
                _refuse_fsdp1(model_name, prefix, module)
                for container in (module._parameters, module._buffers, module._modules):
                    inventory.containers.append((container, len(container)))
                inventory.children += [(module._modules, key, child) for key, child in module._modules.items()]
            if model_name == RESIDUALS:
                _add(found, inventory, model_name, prefix, module, renamer(None), of_residuals)
            else:
                _add(found, inventory, model_name, prefix, module, called, patterns)
    for name, optimizer in optimizers.items():
        groups = []
        owner = owner_of_strays(name, models)
        for g, group in enumerate(optimizer.param_groups):
            uids = []
            for i, p in enumerate(group["params"]):
                if id(p) not in found:
                    stray = f"param_groups.{g}.{i}"
                    found[id(p)] = _Found(param_uid(owner, stray), p, "param", owner, stray)
                uids.append(found[id(p)].uid)
            groups.append(tuple(uids))
        inventory.groups[name] = groups
    atoms = []
    for f in found.values():
        _check(f)
        memory = sharding.local(f.tensor)
        box = sharding.box_of(f.tensor)
        if box.size != tuple(memory.shape):
            raise UsageError(
                f"{f.owner}: {f.name} has {tuple(memory.shape)} here, where {f.tensor.placements} of "  # type: ignore[attr-defined]
                f"{tuple(f.tensor.shape)} should give {box.size}: Everstep does not understand how it is sharded"
            )
        about = of_residuals if f.owner == RESIDUALS else patterns
        shape, share = about.spread(f.name, f"{f.owner}: {f.name}", tuple(f.tensor.shape), filled(box))
        placement = about.placement(f.name) or ("replicated" if share.numel == prod(shape) else "sharded")
        inventory.tensors[f.uid] = memory
        inventory.live[f.uid] = f.tensor
        inventory.uid_of[id(f.tensor)] = f.uid
        atoms.append(
            Atom(
                uid=f.uid, role=f.role, owner=f.owner, name=f.name, shape=shape,
                dtype=dtype_name(f.tensor.dtype), strides=strides_of(memory), aliases=tuple(f.aliases),
                requires_grad=f.tensor.requires_grad, persistent=f.persistent, placement=placement, **_held(share, shape),
            )
        )  # fmt: skip
    if len({a.uid for a in atoms}) != len(atoms):
        raise UsageError(
            "two tensors have the same name (by rename or Tied?), or their names have the same hash: rename one of them"
        )
    specs = tuple(OptimizerSpec(n, class_name(type(o)), tree.to_text(o.defaults, path=n)) for n, o in optimizers.items())
    inventory.layout = Layout(tuple(atoms), specs, tuple(models))
    inventory.matched = patterns.matched
    return inventory


def _held(share: Share, shape: tuple[int, ...]) -> dict[str, Any]:
    """The fields of an atom that say so; most need none."""
    if share.is_whole(shape):
        return {}
    boxes = tuple((0, box) for box in share.boxes)
    return {"boxes": boxes} if share == filled(share.boxes[0]) else {"boxes": boxes, "at": share.at, "held": share.size}


@dataclass
class _Found:
    uid: int
    tensor: torch.Tensor
    role: str
    owner: str
    name: str
    aliases: list[str] = field(default_factory=list)
    persistent: bool = True


def _add(
    found: dict[int, _Found], inventory: Inventory, model: str, prefix: str, module: nn.Module,
    called: Callable[[str], str], patterns: Patterns,
) -> None:  # fmt: skip
    for role, container in (("param", module._parameters), ("buffer", module._buffers)):
        for key, tensor in container.items():
            if tensor is not None and not sharding.is_held(tensor):
                continue
            name = called(f"{prefix}{key}")
            stored = patterns.name(name)
            uid = (param_uid if role == "param" else buffer_uid)(model, stored)
            if tensor is None:
                inventory.empty.append(Place(container, key, uid))
                continue
            old = found.get(id(tensor))
            if old is None:
                persistent = role == "param" or key not in module._non_persistent_buffers_set
                old = found[id(tensor)] = _Found(uid, tensor, role, model, stored, persistent=persistent)
            alias = name if old.owner == model else f"{model}:{name}"
            if (old.owner, old.name) != (model, name) and alias not in old.aliases:
                old.aliases.append(alias)
            inventory.places.append(Place(container, key, found[id(tensor)].uid))


def _refuse_fsdp1(model: str, prefix: str, module: nn.Module) -> None:
    """UsageError for FullyShardedDataParallel: its parameters are pieces of flat ones, and no box of any tensor."""
    if any(c.__module__.startswith("torch.distributed.fsdp.") and c.__name__ == "FullyShardedDataParallel"
           for c in type(module).__mro__):  # fmt: skip
        raise UsageError(
            f"{model}: {prefix.rstrip('.') or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), which cuts "
            "parameters in flat pieces: Everstep does not record it. Use torch.distributed.fsdp.fully_shard (FSDP2). What "
            "an FSDP1 job has goes into such a model, and a run's state into an FSDP1 job, by state dicts: docs/fsdp1.md"
        )


def _check(f: _Found) -> None:
    where = f"{f.owner}: {f.name}"
    if isinstance(f.tensor, UninitializedTensorMixin):
        raise UsageError(f"{where} is lazy and has no shape yet: run one forward pass before attach")
    if f.tensor.layout is not torch.strided:
        raise UsageError(f"{where} is a {f.tensor.layout} tensor; only dense parameters and buffers can be stored")
    if f.tensor.dtype not in CODE_BY_DTYPE:
        raise UsageError(f"{where} has dtype {f.tensor.dtype}, which cannot be stored")
    if f.tensor.device.type == "meta":
        raise UsageError(f"{where} is on the meta device: materialise the model before attach")
    if sharding.is_partial(f.tensor):
        raise UsageError(f"{where} is a DTensor whose values have yet to be summed over ranks: redistribute it first")
