"""From S(step) in memory into live models, optimizers and extras, in place; or a complete list of what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from everstep import sharding, tree
from everstep.atoms import RESIDUALS, Atom, owner_of_strays
from everstep.errors import MismatchError
from everstep.fold import OptimizerState, State, class_name
from everstep.naming import UNDECLARED, Declared, Inventory, outer_of, take_inventory


def check_fits(
    state: State, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], declared: Declared = UNDECLARED
) -> Inventory:
    """MismatchError that lists every difference, or the inventory of the live objects."""
    live = take_inventory(models, optimizers, declared)
    problems = _compare_atoms(state, live)
    for name, optimizer in optimizers.items():
        saved = state.optimizers.get(name)
        if saved is None:
            problems.append(f"optimizer {name!r} is not in the run (it has {', '.join(state.optimizers) or 'none'})")
        elif saved.spec.cls != class_name(type(optimizer)):
            problems.append(f"optimizer {name!r} is a {class_name(type(optimizer))}, the run has a {saved.spec.cls}")
        else:
            problems += _compare_groups(state, live, name, optimizer)
    problems += [f"optimizer {n!r} of the run was not given" for n in state.optimizers if n not in optimizers]
    if problems:
        raise MismatchError(
            f"step {state.step} does not fit the objects given ({len(problems)} difference"
            f"{'s' if len(problems) > 1 else ''}):\n  " + "\n  ".join(problems)
            + "\nBuild the same model and optimizer as the run was written with, or attach to another path."
        )  # fmt: skip
    return live


def _describe(atom: Atom) -> str:
    return f"{tuple(atom.shape)} {atom.dtype}"


def _compare_atoms(state: State, live: Inventory) -> list[str]:
    saved, now = state.layout.by_uid(), live.layout.by_uid()
    to_fill = live.to_fill(saved)
    problems = [
        f"{a.label()} ({a.role} {_describe(a)}) is in the run but not in the model"
        for uid, a in saved.items()
        if uid not in now and uid not in to_fill and not _made_by_optimizer(a, state) and a.placement != "rank-local"
    ]
    problems += [
        f"{a.label()} ({a.role} {_describe(a)}) is in the model but not in the run"
        for uid, a in now.items()
        if uid not in saved and not _made_by_optimizer(a, state) and a.placement != "rank-local"
    ]
    buffers: list[str] = []
    for uid, atom in now.items():
        old = saved.get(uid)
        if old is None or atom.placement == "rank-local":
            continue
        if old.shape == atom.shape and old.dtype == atom.dtype:
            value, tensor = state.tensors.get(uid), live.tensors[uid]
            if atom.role == "param" and value is not None and value.shape != tensor.shape:
                problems.append(f"{atom.label()}: this rank has {tuple(tensor.shape)} of it, the state {tuple(value.shape)}")
            continue
        text = f"{atom.label()}: the run has {_describe(old)}, the model has {_describe(atom)}"
        # A buffer that grows during training is the module's own affair, unless the model differs anyway.
        (buffers if atom.role == "buffer" and old.dtype == atom.dtype else problems).append(text)
    return problems + buffers if problems else []


def _made_by_optimizer(atom: Atom, state: State) -> bool:
    models = state.layout.models
    return atom.owner not in models and atom.owner in [owner_of_strays(name, models) for name in state.optimizers]


def _compare_groups(state: State, live: Inventory, name: str, optimizer: Optimizer) -> list[str]:
    labels = {**state_labels(state), **live.labels()}
    saved, now = state.optimizers[name].params, _whole_groups(live, name, optimizer)
    problems: list[str] = []
    if _can_regroup(state.optimizers[name], now):
        return []
    for i, (a, b) in enumerate(zip(saved, now, strict=False)):
        if sorted(a) != sorted(b):
            only_saved = [labels.get(u, str(u)) for u in a if u not in b]
            only_live = [labels.get(u, str(u)) for u in b if u not in a]
            problems.append(
                f"optimizer {name!r}, group {i}: only in the run: {', '.join(only_saved) or 'none'}; only in the live "
                f"group: {', '.join(only_live) or 'none'}"
            )
    if outer_of(optimizer) is not None and len(saved) != len(now):
        problems.append(f"optimizer {name!r} has {len(now)} groups, the run has {len(saved)}, and they cannot be regrouped")
    known = state.layout.by_uid()
    for i in range(len(saved), len(now)):
        strangers = [labels.get(u, str(u)) for u in now[i] if u not in known]
        if strangers:
            problems.append(f"optimizer {name!r}, group {i} is not in the run: {', '.join(strangers)}")
    for i in range(len(now), len(saved)):
        missing = [labels.get(u, str(u)) for u in saved[i] if u not in live.tensors]
        if missing:
            problems.append(f"optimizer {name!r}, group {i} of the run has no parameters here: {', '.join(missing)}")
    return problems


def _whole_groups(live: Inventory, name: str, optimizer: Optimizer) -> list[tuple[int, ...]]:
    """An optimizer's groups; with a ZeroRedundancyOptimizer those of all ranks together."""
    outer = outer_of(optimizer)
    if outer is None:
        return live.groups[name]
    return [tuple(live.uid_of[id(p)] for p in group["params"]) for group in outer.param_groups]


def _can_regroup(saved: OptimizerState, now: Sequence[tuple[int, ...]]) -> bool:
    """Whether the same parameters are merely grouped in another way, each with the hyperparameters it had."""
    hyper = {uid: h for uids, h in zip(saved.params, saved.hyper, strict=False) for uid in uids}
    uids = [uid for group in now for uid in group]
    return (
        sorted(uids) == sorted(hyper)
        and all(group or i < len(saved.hyper) for i, group in enumerate(now))
        and all(same_packed(hyper[group[0]], hyper[uid]) for group in now for uid in group)
    )


def same_packed(a: Any, b: Any) -> bool:
    """Whether two results of tree.pack are of equal values."""
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def _as_grouped(saved: OptimizerState, now: Sequence[tuple[int, ...]]) -> OptimizerState:
    """What was saved in the groups that there are now, if it fits them."""
    if [sorted(g) for g in saved.params] == [sorted(g) for g in now] or not _can_regroup(saved, now):
        return saved
    hyper = {uid: h for uids, h in zip(saved.params, saved.hyper, strict=True) for uid in uids}
    now_hyper = [hyper[group[0]] if group else saved.hyper[i] for i, group in enumerate(now)]
    return OptimizerState(saved.spec, now_hyper, list(now), saved.state)


def state_labels(state: State) -> dict[int, str]:
    return {a.uid: a.label() for a in state.layout.atoms}


@torch.no_grad()
def apply(
    state: State, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], declared: Declared = UNDECLARED
) -> None:
    """Put S(step) into the live objects. Nothing is changed if they do not fit."""
    live = check_fits(state, models, optimizers, declared)
    saved = state.layout.by_uid()
    for uid, tensor in live.tensors.items():
        if uid not in state.tensors:
            continue
        value = state.tensors[uid]
        if value.shape == tensor.shape and not _overlaps(tensor):
            if value.data_ptr() != tensor.data_ptr():  # else it was read straight into its place
                tensor.copy_(value)
        else:
            for place in live.places:
                if place.uid == uid:
                    place.container[place.key] = value.clone().to(tensor.device)
        if saved[uid].role == "param":
            param = live.live[uid]
            param.requires_grad_(saved[uid].requires_grad)
            carried = state.carried.get(uid)
            param.grad = None if carried is None else sharding.like(carried.clone().to(tensor.device), param)
    device = next((tensor.device for tensor in live.tensors.values()), torch.device("cpu"))
    to_fill = live.to_fill(saved).keys() & state.tensors.keys()
    for place in live.empty:
        if place.uid in to_fill:
            place.container[place.key] = state.tensors[place.uid].clone().to(device)
    for name, optimizer in optimizers.items():
        _apply_optimizer(state, live, name, optimizer)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements share memory (an expanded buffer): such a tensor cannot be written to."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _apply_optimizer(state: State, live: Inventory, name: str, optimizer: Optimizer) -> None:
    outer = outer_of(optimizer)
    saved = _as_grouped(state.optimizers[name], _whole_groups(live, name, optimizer))
    updated = {u for group in live.groups[name] for u in group} if outer is not None else saved.state.keys()
    hyper = [tree.unpack(h) for h in saved.hyper]
    del optimizer.param_groups[len(saved.params) :]
    for i, uids in enumerate(saved.params):
        params = [live.live[u] for u in uids]
        if i == len(optimizer.param_groups):
            optimizer.add_param_group({"params": params, **hyper[i]})
        group = optimizer.param_groups[i]
        # The dict and its list stay the same objects: schedulers and users may hold them.
        if outer is None:  # else the parameters that are updated here stay those that are
            group["params"][:] = params
        for key in [k for k in group if k != "params" and k not in hyper[i]]:
            del group[key]
        for key, value in hyper[i].items():
            old = group.get(key)
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == value.shape:
                old.copy_(value)
            else:
                group[key] = value
    if state.step:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether it has ever stepped
    optimizer.state.clear()
    for uid, values in saved.state.items():
        if uid == 0:
            optimizer.state.update(values)  # type: ignore[arg-type]
        elif uid in updated:
            p = live.live[uid]
            optimizer.state[p] = {k: _placed(v, p) for k, v in values.items()}
    if outer is not None:  # its groups are copied into the inner one's before every step
        for group, values in zip(outer.param_groups, optimizer.param_groups, strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})


def _placed(value: Any, p: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return sharding.like(value.to(p.device) if value.dim() and p.device.type != "cpu" else value, p)


def public_state(state: State, cursor: dict[str, Any]) -> dict[str, Any]:
    """What History.state returns: plain nested dicts of whole tensors, by names. Residuals of compression are no model's."""
    models: dict[str, dict[str, Any]] = {m: {} for m in state.layout.models if m != RESIDUALS}
    for atom in state.layout.atoms:
        if atom.owner not in models or not atom.persistent:
            continue
        models[atom.owner][atom.name] = state.tensors[atom.uid]
        for alias in atom.aliases:
            owner, _, other = alias.rpartition(":")
            models[owner or atom.owner][other] = state.tensors[atom.uid]
    for key, value in cursor.get("modules", {}).items():
        owner, _, name = key.partition(":")
        models.setdefault(owner, {})[name] = value
    optimizers = {}
    for name, saved in state.optimizers.items():
        names = _names_of(state, {uid for group in (*saved.params, saved.state) for uid in group})
        optimizers[name] = {
            "state": {names[u]: values for u, values in saved.state.items() if u in names},
            "param_groups": [
                {"params": [names[u] for u in uids], **tree.unpack(h)}
                for uids, h in zip(saved.params, saved.hyper, strict=True)
            ],
        }
    return {
        "model": models["model"] if list(models) == ["model"] else models,
        "optimizer": optimizers["optimizer"] if list(optimizers) == ["optimizer"] else optimizers,
        "extras": cursor.get("extras", {}),
    }


def _names_of(state: State, uids: Set[int]) -> dict[int, str]:
    """What an optimizer's parameters are called in its state: their names, after their models' if two are equal."""
    atoms = state.layout.by_uid()
    names = {u: atoms[u].name for u in uids if u in atoms}
    if len(set(names.values())) == len(names):
        return names
    return {u: f"{atoms[u].owner}.{name}" for u, name in names.items()}
