"""Layer-wise updates: parameters are updated during backward, each when its gradient is final, and leave while it goes on.

A hook on every parameter is called when its gradient has been accumulated. Parameters are then updated, some MB at a time
(part.py); what is left over is updated by step() as ever. Under DistributedDataParallel a gradient is final when its bucket
has been reduced, which `early_hook` tells (early.py).

An update that was made cannot be taken back. So this is not guessed but learned, for each parameter: in its first steps it
is updated by step(), its gradient must come through to that unchanged in every bit, and step() must do what would have been
done in backward. What adds to gradients, clips or
unscales them, or means something else by step(), is refused then, with nothing done. What comes later is found at the step
at the latest (identities, version counters, hyperparameters, samples of bytes), and raises: what is in memory is then not
what the user's loop means, and is never committed.

Everything here runs on the thread that calls backward() and step(), except that any thread may tell of reduced buckets.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from everstep import forks
from everstep.capture import early
from everstep.capture.leaf import Leaf
from everstep.capture.part import Due, Outcome, Part, refusal
from everstep.errors import EverstepError, LayerwiseError, UsageError
from everstep.fold import class_name
from everstep.memory import same_bits

WATCHED_STEPS = 3
"""So many times a parameter is updated by step(), and its gradient is watched on its way there."""
BATCH_BYTES = 4 << 20
"""Parameters are updated so much at a time: a call takes some 100 µs whatever it updates."""
SAMPLED = 8
"""The first call is sampled and one of every so many, at each step others: whoever hides from version counters mostly does
so everywhere."""
_on_accumulated: Callable[..., Any] = torch.Tensor.register_post_accumulate_grad_hook
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_increment_version: Callable[[Iterable[torch.Tensor]], None] = torch.autograd.graph.increment_version
_NO_TASK = -1


@dataclass(frozen=True)
class LayerwiseStats:
    """Since the run was attached."""

    num_steps: int = 0
    in_backward: int = 0
    """Updates of single parameters that were made during backward."""
    at_step: int = 0
    """And by step()."""


@dataclass
class _Round:
    """From one step to the next."""

    hyper: list[dict[str, Any]] = field(default_factory=list)
    """As they were when backward began; empty before that."""
    state: Any = None
    """The optimizer's, as an object."""
    due: list[tuple[Leaf, torch.Tensor]] = field(default_factory=list)
    due_bytes: int = 0
    num_updated: int = 0
    """Parameters, in backward; in so many calls:"""
    num_calls: int = 0
    reason: str = ""
    """Why this step is refused."""
    has_forward: bool = False
    """A model was called after backward."""
    rest: list[torch.Tensor] = field(default_factory=list)
    """What step() itself updates."""


class Layerwise:
    """The parameters of one optimizer."""

    def __init__(
        self, optimizer: Optimizer, params_in_model_order: Sequence[torch.Tensor], *,
        before: Callable[[list[torch.Tensor]], None], after: Callable[[list[torch.Tensor]], None],
        model: nn.Module | Sequence[nn.Module] | None = None, batch_bytes: int = BATCH_BYTES,
    ) -> None:  # fmt: skip
        """`before` and `after` are called right before and after parameters are updated, with these, by the thread that does
        it: in backward, and in step() for the rest. What they raise reaches the caller of backward() or step().

        With `model` errors give names, and a forward pass of one with these parameters after backward() is noticed.
        """
        self._optimizer = optimizer
        self._before, self._after = before, after
        self._models = [] if model is None else [model] if isinstance(model, nn.Module) else list(model)
        self._batch_bytes = batch_bytes
        self._forks = forks.count
        self.reducing = threading.Event()
        """Set while a bucket of gradients is being reduced: whoever copies should give way then, unless training waits for
        the copy."""
        self._num_reducing = 0
        self._lock = threading.Lock()
        self._names = {id(p): f"parameter {i} {tuple(p.shape)}" for i, p in enumerate(params_in_model_order)}
        for root in self._models:
            self._names.update((id(p), name) for name, p in root.named_parameters())
        self._in_ddp = {id(p) for root in self._models for p in _reduced_by_ddp(root)}
        self._leaves: list[Leaf] = []
        self._reduced: deque[tuple[int, torch.Tensor]] = deque()
        """Of other threads: gradients whose bucket has been reduced."""
        self._predicted: list[tuple[Leaf, Outcome]] = []
        """For parameters that are watched for the last time: what an update in backward would give."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._failed: EverstepError | None = None
        self.stats = LayerwiseStats()
        self._round, self._task = _Round(), _NO_TASK
        self._read_groups()
        self._part = Part(optimizer)
        self._pre_handle = optimizer.register_step_pre_hook(self._pre)
        self._post_handle = optimizer.register_step_post_hook(self._post)
        mine = {id(leaf.param) for leaf in self._leaves}
        self._forward_handles = [
            root.register_forward_pre_hook(_Notice(self._on_forward))
            for root in self._models
            if any(id(p) in mine for p in root.parameters())
        ]

    def detach(self) -> None:
        """Take all hooks away. If `num_unfinished` is not 0, what is in memory is not what the user's loop means."""
        for handle in (self._pre_handle, self._post_handle, *self._forward_handles):
            handle.remove()
        for leaf in self._leaves:
            if leaf.handle is not None:
                leaf.handle.remove()
        early.unwatch(self, [leaf.param for leaf in self._leaves])
        self._show()

    @property
    def num_unfinished(self) -> int:
        """Parameters that backward has updated and that no step() has come for yet."""
        return self._round.num_updated

    def check_finished(self) -> None:
        """Before the state in memory is committed: raises if backward has updated parameters and step() has not come."""
        if self._round.num_updated and self._failed is not None:
            self._fail_again()
        if self._round.num_updated:
            self._fail("a commit came after backward() and before step(), or step() was left out")

    def reset(self) -> None:
        """Another state has been loaded: forget what happened since the last step, and errors too."""
        self._show()
        self._failed = None
        self._forget_step()

    # -- groups -------------------------------------------------------------------------------------------------------

    def _read_groups(self) -> None:
        reason = refusal(self._optimizer)
        known = {id(leaf.param): leaf for leaf in self._leaves}
        leaves = []
        self._groups = [list(group["params"]) for group in self._optimizer.param_groups]
        for i, params in enumerate(self._groups):
            for p in params:
                leaf = known.pop(id(p), None) or Leaf(p, _name(p, self._names))
                if early.watcher_of(p) not in (None, self):
                    reason = reason or f"{leaf.name} is watched by another optimizer's layerwise=True, or by early=True"
                leaf.group = i
                leaves.append(leaf)
        reason = reason or _shared_memory([leaf.param for leaf in leaves], self._models, self._names)
        if reason:
            self._fail(reason)
        for leaf in known.values():
            leaf.group = -1
            if leaf.handle is not None:
                leaf.handle.remove()
        early.unwatch(self, [leaf.param for leaf in self._leaves])
        self._leaves = leaves
        early.watch(self, [leaf.param for leaf in leaves])
        self._hook_unfrozen()

    def _hook_unfrozen(self) -> None:
        """Parameters that need a gradient now: a frozen one cannot be given a hook."""
        for leaf in self._leaves:
            if leaf.handle is None and leaf.param.requires_grad:
                leaf.handle = _on_accumulated(leaf.param, self._hook(leaf))
        self._frozen = [leaf.param for leaf in self._leaves if leaf.handle is None]

    def _groups_are_same(self, *, may_have_more: bool = False) -> bool:
        groups = self._optimizer.param_groups
        return (len(groups) == len(self._groups) or (may_have_more and len(groups) > len(self._groups))) and all(
            len(now["params"]) == len(known) and all(map(is_, now["params"], known))
            for now, known in zip(groups, self._groups, strict=False)
        )

    # -- during backward ----------------------------------------------------------------------------------------------

    def _hook(self, leaf: Leaf) -> Callable[[torch.Tensor], None]:
        def accumulated(p: torch.Tensor) -> None:
            if forks.count != self._forks:
                return  # a forked child trains for itself
            if self._failed is not None:
                self._fail_again()
            task = _graph_task()
            if task != self._task:
                self._backward_begins(task)
            if leaf.group < 0:
                return
            leaf.calls += 1
            grad = p.grad
            if leaf.num_watched < WATCHED_STEPS:
                self._watch(leaf, grad)
            elif leaf.calls > 1:
                self._fail(
                    f"backward reached {leaf.name} again before step(): gradients are accumulated over several backward "
                    "passes, or step() was left out"
                )
            elif grad is not None:
                # Also if it is left to step() then: whether that fails must not depend on what was fast enough.
                leaf.take(grad)
                if not leaf.by_bucket:
                    self._is_due(leaf, grad)
            if self._reduced:
                self._take_reduced()
            if self._round.due_bytes >= self._batch_bytes:
                self._update_due()

        return accumulated

    def _backward_begins(self, task: int) -> None:
        """Also another one, or one inside another (a checkpointed segment)."""
        self._task = task
        if not self._round.hyper:
            if not self._groups_are_same():
                self._read_groups()
            self._keep_order()
            self._reduced.clear()  # of a pass that was broken off
            self._round.hyper, self._round.state = self._hyper_now(), self._optimizer.state
        _queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        _queue_callback(self._backward_ended)  # DDP has asked to be called too, and comes first now

    def _backward_ended(self) -> None:
        """Reduced gradients are on their parameters, buckets may be filled anew: what is not updated is left to step()."""
        self._task = _NO_TASK
        self._take_reduced()
        self._round.due = [(leaf, grad) for leaf, grad in self._round.due if not leaf.by_bucket]
        self._round.due_bytes = sum(leaf.num_bytes for leaf, _ in self._round.due)
        for leaf in self._leaves:
            if leaf.by_bucket and leaf.taken is not None and leaf.taken.grad is None and leaf.param.grad is not None:
                leaf.taken.grad, leaf.taken.grad_version = leaf.param.grad, leaf.param.grad._version

    def _watch(self, leaf: Leaf, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        if grad.is_sparse:
            self._round.reason = f"the gradient of {leaf.name} is sparse"
            return
        leaf.take(grad, is_watched=True)

    def _is_due(self, leaf: Leaf, grad: torch.Tensor) -> None:
        """What is not as usual is left to step()."""
        p = leaf.param
        if not grad.is_sparse and grad.dtype == p.dtype and grad.shape == p.shape:
            self._round.due.append((leaf, grad))
            self._round.due_bytes += leaf.num_bytes

    def _take_reduced(self) -> None:
        while self._reduced:
            i, grad = self._reduced.popleft()
            leaf = self._leaves[i]
            on_param = leaf.param.grad
            if leaf.calls == 0 or on_param is None:
                continue  # not used in this process: whether by others, DDP knows when backward ends
            if leaf.num_watched < WATCHED_STEPS:
                leaf.by_bucket = True
                self._watch(leaf, grad)
            elif leaf.by_bucket and grad.stride() == on_param.stride():
                self._is_due(leaf, grad)

    def _update_due(self) -> None:
        due = self._round.due
        self._round.due, self._round.due_bytes = [], 0
        params = [leaf.param for leaf, _ in due]
        self._before(params)
        self._round.num_updated += len(due)
        try:
            self._part.update([Due(leaf.param, leaf.group, grad) for leaf, grad in due])
        except BaseException as e:
            self._failed = self._error(f"updating {due[0][0].name} in backward failed ({type(e).__name__}: {e})")
            raise
        # Fused kernels do not move it, and autograd must find out if it needs the values that are gone.
        _increment_version([leaf.param for leaf, _ in due if leaf.has_old_version()])
        is_sampled = self._round.num_calls == 0 or (self._round.num_calls + self.stats.num_steps) % SAMPLED == 0
        self._round.num_calls += 1
        largest = max(due, key=lambda d: d[0].num_bytes)[0] if is_sampled else None
        for leaf, grad in due:
            leaf.updated(grad if leaf is largest else None)
        self._after(params)

    # -- reductions (any thread) --------------------------------------------------------------------------------------

    def bucket_begins(self) -> None:
        with self._lock:
            self._num_reducing += 1
            self.reducing.set()

    def bucket_reduced(self, reduced: list[tuple[int, torch.Tensor]]) -> None:
        self._reduced.extend(reduced)
        with self._lock:
            self._num_reducing = max(0, self._num_reducing - 1)
            if not self._num_reducing:
                self.reducing.clear()

    # -- at the step --------------------------------------------------------------------------------------------------

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if forks.count != self._forks:
            return
        if self._failed is not None:
            self._fail_again()
        if self._hidden:
            self._fail("the step() before this one raised")
        if kwargs.get("closure") is not None or any(a is not None for a in args[1:]):
            self._fail("step(closure) runs backward by itself, perhaps several times")
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            self._fail("a GradScaler unscales gradients at step(), and skips steps")
        self._check()
        updated = [leaf for leaf in self._leaves if leaf.taken is not None and leaf.taken.is_updated]
        gone = {id(leaf.param) for leaf in updated}
        self._round.rest = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and id(p) not in gone
        ]
        if self._round.rest:
            self._before(self._round.rest)
        self._predicted = [
            (leaf, self._part.predict(Due(leaf.param, leaf.group, leaf.param.grad)))
            for leaf in self._leaves
            if leaf.num_watched == WATCHED_STEPS - 1 and leaf.taken is not None and leaf.param.grad is not None
        ]
        for leaf in updated:
            assert leaf.param.grad is not None
            self._hidden.append((leaf.param, leaf.param.grad))
            leaf.param.grad = None

    def _check(self) -> None:
        """Whether step() means what was done in backward, and in watched steps would have been done."""
        if self._round.reason:
            self._fail(self._round.reason)
        taken = [leaf for leaf in self._leaves if leaf.taken is not None]
        for leaf in taken:
            if id(leaf.param) in self._in_ddp and not leaf.by_bucket:
                self._fail(
                    f"DistributedDataParallel reduces the gradient of {leaf.name}, and tells nobody when it has. Register "
                    "everstep.early_hook: ddp.register_comm_hook(None, everstep.early_hook())"
                )
            reason = leaf.difference()
            if reason and not leaf.by_bucket and dist.is_available() and dist.is_initialized():
                reason += ". (If DistributedDataParallel does that, register everstep.early_hook)"
            if reason:
                self._fail(reason)
        if taken:
            if self._round.has_forward:
                self._fail("a forward pass ran between backward() and step()")
            if not self._groups_are_same(may_have_more=True):
                self._fail("parameter groups were changed between backward() and step()")
            if self._optimizer.state is not self._round.state:
                self._fail("the optimizer's state was replaced between backward() and step()")
            for i, (before, now) in enumerate(zip(self._round.hyper, self._hyper_now(), strict=False)):
                for key in sorted(before.keys() | now.keys()):
                    if not _same(before.get(key), now.get(key)):
                        self._fail(
                            f"{key!r} of group {i} was changed between backward() and step(). Do that after step() or "
                            "before backward()"
                        )
            if not self._is_last():
                self._fail("a step hook was registered between backward() and step()")

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if forks.count != self._forks:
            return
        num_updated = len(self._hidden)
        self._show()
        rest = self._round.rest
        for leaf in self._leaves:
            leaf.num_watched += leaf.taken is not None and not leaf.taken.is_updated
        self.stats = LayerwiseStats(
            self.stats.num_steps + 1, self.stats.in_backward + num_updated, self.stats.at_step + len(rest)
        )
        self._forget_step()
        if not self._groups_are_same():
            self._read_groups()
        elif any(p.requires_grad for p in self._frozen):
            self._hook_unfrozen()
        if rest:
            self._after(rest)
        for leaf, predicted in self._predicted:
            if self._part.outcome(leaf.param) != predicted:
                self._fail(
                    f"step() does something else to {leaf.name} than {class_name(type(optimizer))} by itself (is it "
                    "compiled, or replaced?)"
                )

    def _show(self) -> None:
        """Gradients of what backward has updated are on their parameters, but for the time of step()."""
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden = []

    def _forget_step(self) -> None:
        self._round, self._task = _Round(), _NO_TASK
        self._reduced.clear()
        with self._lock:
            self._num_reducing = 0
            self.reducing.clear()
        for leaf in self._leaves:
            leaf.calls, leaf.taken = 0, None

    def _hyper_now(self) -> list[dict[str, Any]]:
        return [
            {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self._optimizer.param_groups
        ]

    # -- order --------------------------------------------------------------------------------------------------------

    def _is_last(self) -> bool:
        """Whether others' hooks see all gradients: theirs run before ours, and after."""
        return bool(
            next(reversed(self._optimizer._optimizer_step_pre_hooks), None) == self._pre_handle.id
            and next(iter(self._optimizer._optimizer_step_post_hooks), None) == self._post_handle.id
        )

    def _keep_order(self) -> None:
        if not self._is_last():
            pre: Any = self._optimizer._optimizer_step_pre_hooks
            post: Any = self._optimizer._optimizer_step_post_hooks
            pre.move_to_end(self._pre_handle.id)
            post.move_to_end(self._post_handle.id, last=False)

    # -- what cannot be -----------------------------------------------------------------------------------------------

    def _on_forward(self) -> None:
        """A model of the user's is called; checkpointed segments that backward computes again are not meant."""
        if forks.count != self._forks or _graph_task() != _NO_TASK:
            return
        if self._failed is not None:
            self._fail_again()
        if self._round.num_updated:
            self._fail(
                "a forward pass ran between backward() and step(), or step() was left out: it would use parameters that "
                "are updated already"
            )
        self._round.has_forward = bool(self._round.hyper)

    def _error(self, reason: str) -> EverstepError:
        if self._round.num_updated:
            return LayerwiseError(
                f"layerwise=True: {reason}. {self._round.num_updated} parameters had been updated in backward by then, so "
                "that what is in memory is not what this loop means, and is not stored. resume() brings back the last "
                "committed step; go on from there without layerwise=True, or without that"
            )
        return UsageError(
            f"layerwise=True: {reason}. Nothing has been updated in backward since the last step(). Attach without "
            "layerwise=True"
        )

    def _fail(self, reason: str) -> NoReturn:
        self._failed = self._error(reason)
        self._show()
        raise self._failed

    def _fail_again(self) -> NoReturn:
        """Whoever catches it and goes on is told again."""
        assert self._failed is not None
        raise type(self._failed)(*self._failed.args)


def refuse(optimizers: Iterable[Optimizer], models: Sequence[nn.Module]) -> None:
    """UsageError if parameters of these must not be updated in backward, as far as can be told before training."""
    names = {id(p): name for root in models for name, p in root.named_parameters()}
    taken: set[int] = set()
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        twice = next((p for p in params if id(p) in taken), None)
        reason = refusal(optimizer) or _shared_memory(params, models, names)
        if not reason and twice is not None:
            reason = f"two optimizers update {_name(twice, names)}"
        if reason:
            raise UsageError(f"layerwise=True: {reason}. Attach without layerwise=True")
        taken.update(map(id, params))


def _name(param: torch.Tensor, names: Mapping[int, str]) -> str:
    return names.get(id(param), f"a parameter {tuple(param.shape)}")


def _shared_memory(params: Sequence[torch.Tensor], models: Sequence[nn.Module], names: Mapping[int, str]) -> str:
    """An update of one would be one of the other, which autograd may still need."""
    at: dict[int, torch.Tensor] = {}
    for p in [*params, *(p for root in models for p in root.parameters())]:
        address = p.untyped_storage().data_ptr() if type(p) in (nn.Parameter, torch.Tensor) else 0
        if address and at.setdefault(address, p) is not p:
            return f"{_name(at[address], names)} and {_name(p, names)} are two parameters in the same memory"
    return ""


class _Notice:
    """A forward hook that is not copied or pickled with its module."""

    def __init__(self, notice: Callable[[], None] | None = None) -> None:
        self._notice = None if notice is None else weakref.WeakMethod(notice)

    def __call__(self, module: nn.Module, args: Any) -> None:
        notice = None if self._notice is None or torch.compiler.is_compiling() else self._notice()
        if notice is not None:
            notice()

    def __deepcopy__(self, memo: Any) -> _Notice:
        return _Notice()

    def __reduce__(self) -> Any:
        return _Notice, ()


def _reduced_by_ddp(root: nn.Module) -> list[torch.Tensor]:
    return [
        p
        for ddp in root.modules()
        if isinstance(ddp, DistributedDataParallel)
        for name, p in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same_bits(a, b)
    return a is b or bool(a == b)
