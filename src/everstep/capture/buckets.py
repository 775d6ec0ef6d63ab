"""DDP's buckets after a resume: as they were before it.

DistributedDataParallel packs gradients into buckets, and where a gradient lies in its bucket decides in which order the
ranks' values are added: from three ranks on, it decides the last bits. The first backward pass is reduced in provisional
buckets; the order in which gradients became ready in it makes the final ones, which the next forward builds. A resumed
process would go through the provisional buckets once more, at steps for which the uninterrupted run had final ones.

So that order is state. `BucketOrders` reads it off the reducers of a run, without hooks and without a collective. `warm`
gives a resumed DDP module a new reducer (as unpickling the module would), with its parameters in that order, and has it
build the final buckets before the first backward: the same calls by which DDP's Join context lets a rank follow that
has no data. No gradient is made, so there is nothing to undo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.naming import walk

Orders = dict[str, list[list[str]]]
"""By model: for each DDP module in it that knows its order, the canonical names of its parameters in that order."""

_given: WeakKeyDictionary[DistributedDataParallel, list[str]] = WeakKeyDictionary()
"""The orders of modules that were warmed in this process."""

_LEAVE, _RENEW, _FORGET, _UNKNOWN, _UNSUPPORTED = range(5)
_NOTICES = {
    _UNKNOWN: "DDP with static_graph=True had not yet settled its buckets at this step",
    _UNSUPPORTED: "the buckets of DDP with mixed_precision cannot be restored",
}


class BucketOrders:
    """The orders that the DDP modules among `models` have learned so far. Reads only; once all are known, free.

    An order is state from the commit after which it is known: what was committed before must be resumed without it.
    It counts on the first rank of a module's process group; others may know another one until buckets are rebuilt.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Looks once: a module that was trained or warmed before has its order already."""
        self.value: Orders = {}
        self._waiting = [(name, module) for name, model in models.items() for module in _rebuilding(model)]
        self.look()

    def look(self) -> bool:
        """Whether something was learned since the last look. For every commit, so after a step's backward passes."""
        before = len(self._waiting)
        for name, module in list(self._waiting):
            order = module.learned()
            if order is not None:
                self.value.setdefault(name, []).append(order)
                self._waiting.remove((name, module))
        return len(self._waiting) < before


def warm(models: Mapping[str, nn.Module], orders: Orders) -> list[str]:
    """Bring DDP modules to where `orders` was known; returns what cannot be, in sentences for an InexactWarning.

    For a resume at step 1 or later, before the next forward. Every rank calls it with the same models; `orders` is that of
    the first rank of each module's process group, whatever the others give. Collective, on those groups: a few broadcasts
    of integers. Parameters, buffers, gradients, RNG and the state of communication hooks are not touched. Orders of
    modules that are no longer in DDP are passed over: under another layout, no last bits are promised.
    """
    notices = []
    for name, model in models.items():
        for module in _rebuilding(model):
            what, order = module.agree(module.compare(orders.get(name, [])))
            if what == _RENEW:
                module.renew(order)
            elif what == _FORGET:
                module.renew(None)
            elif what != _LEAVE:
                notices.append(
                    f"model {name!r}: {_NOTICES[what]}. Gradients of the next steps may differ in their last bits from "
                    "those of the uninterrupted run"
                )
    return notices


def _rebuilding(model: nn.Module) -> Iterator[_Module]:
    """The DDP modules in `model` that rebuild their buckets."""
    names: dict[int, str] = {}
    for prefix, module in walk(model):
        for key, p in module._parameters.items():
            names.setdefault(id(p), f"{prefix}{key}")
    ddp: Any
    for ddp in model.modules():
        if (
            isinstance(ddp, DistributedDataParallel)
            and (ddp.static_graph or not ddp.find_unused_parameters)
            and not ddp._use_python_reducer
            and not ddp._delay_all_reduce_all_params
        ):
            parameters, sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
            yield _Module(ddp, parameters, sparse, [names[id(p)] for p in parameters])


@dataclass(eq=False)
class _Module:
    """A DDP module with the parameters that its reducer has by index, and their names."""

    ddp: Any
    """Not typed: torch has no types for what is needed of it here."""
    parameters: list[nn.Parameter]
    sparse: list[bool]
    names: list[str]

    def learned(self) -> list[str] | None:
        """Names in the order in which gradients became ready in the backward that decides the buckets; None before it."""
        ddp = self.ddp
        if ddp in _given:
            return _given[ddp]
        ready_ns = ddp.reducer.get_backward_stats()
        if len(ready_ns) != len(self.names):
            return None  # parameters were frozen since DDP was made: what its reducer has cannot be told
        if ddp._has_rebuilt_buckets:
            return self._in_buckets()
        if not all(ready_ns):
            return None
        if ddp.static_graph and not bool((ddp.reducer._get_local_used_map() == ddp.process_group.size()).all()):
            return None  # unused parameters count as ready at once, but come last in the buckets: read it there
        return [name for _, name in sorted(zip(ready_ns, self.names, strict=True))]

    def _in_buckets(self) -> list[str] | None:
        name_of = {id(p): name for p, name in zip(self.parameters, self.names, strict=True)}
        try:
            buckets = [bucket.parameters() for bucket in self.ddp.reducer._get_zeros_like_grad_buckets()]
        except RuntimeError:
            if any(self.sparse):
                return None  # a bucket of sparse gradients has no memory before the first of them: look again later
            raise
        if os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1":  # DDP then fills its buckets from the back
            buckets = [bucket[::-1] for bucket in buckets]
        return [name_of[id(p)] for bucket in buckets for p in bucket]

    def compare(self, orders: list[list[str]]) -> tuple[int, list[int]]:
        """What is to be done, and the indices of the parameters in the order that is to be."""
        order = next((o for o in orders if sorted(o) == sorted(self.names)), None)
        if order is None and self.ddp.static_graph:
            return _UNKNOWN, []
        if order == self.learned():
            return _LEAVE, []
        if self.ddp.mixed_precision is not None:
            return _UNSUPPORTED, []
        if order is None:
            return _FORGET, []
        index_of = {name: i for i, name in enumerate(self.names)}
        return _RENEW, [index_of[name] for name in order]

    def agree(self, mine: tuple[int, list[int]]) -> tuple[int, list[int]]:
        """The first rank's answer, on every rank: reducers with different orders would add up different parameters."""
        group = self.ddp.process_group
        what, order = mine
        plain = [what, *order] + [0] * (len(self.names) - len(order))
        message = torch.tensor(plain, dtype=torch.int64, device=self.parameters[0].device)
        dist.broadcast(message, src=dist.get_global_rank(group, 0), group=group)
        what, *order = message.tolist()
        return what, order

    def renew(self, order: list[int] | None) -> None:
        """Give DDP a new reducer, set up as the old one was. With an order, its buckets are final; without, provisional."""
        ddp = self.ddp
        hooks, ddp._comm_hooks = ddp._comm_hooks, []
        built_in = None if hooks else ddp._get_ddp_logging_data().get("comm_hook")
        indices = range(len(self.names)) if order is None else order
        parameters = [self.parameters[i] for i in indices]
        sparse = [self.sparse[i] for i in indices]
        ddp._remove_autograd_hooks()
        del ddp.reducer  # with its buckets: the new ones need as much memory
        ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = False
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        numbered = _Numbering() if ddp.static_graph else None
        for hook, state in hooks:
            ddp.register_comm_hook(state, hook if numbered is None else numbered.around(hook))
        ddp._comm_hooks = hooks
        if built_in:
            kinds = dist.BuiltinCommHookType  # type: ignore[attr-defined]
            ddp._register_builtin_comm_hook(getattr(kinds, built_in.rpartition(".")[2]))
        ddp._has_rebuilt_buckets = False
        _given.pop(ddp, None)
        if order is not None:
            ddp.reducer._push_all_rebuilt_params()
            ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
            if numbered is not None and not any(self.sparse):
                numbered.buckets = [bucket.parameters() for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
            _given[ddp] = [self.names[i] for i in order]


class _Numbering:
    """In its first backward with static_graph=True a reducer hands over its buckets when all are full, one after the other,
    and calls each of them the first: hooks would take them for that one's parameters. (DDP itself never sees it: it has
    but one bucket then.)"""

    def __init__(self) -> None:
        self.buckets: list[list[torch.Tensor]] = []
        """Parameters of those that are still to come in that backward."""
        self._seen = 0

    def around(self, hook: Any) -> Any:
        @wraps(hook)
        def numbered(state: Any, bucket: Any) -> Any:
            if self._seen < len(self.buckets):
                self._seen += 1
                is_last = self._seen == len(self.buckets)
                bucket = _Numbered(bucket, self._seen - 1, self.buckets[self._seen - 1], is_last)
            return hook(state, bucket)

        return numbered


@dataclass
class _Numbered:
    """A dist.GradBucket that knows which one it is."""

    _bucket: Any
    _index: int
    _parameters: list[torch.Tensor]
    _is_last: bool

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return self._is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)
