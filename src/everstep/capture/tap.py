"""An optimizer's own hooks: gradients exactly as consumed, hyperparameters as used.

Who owns a gradient is learned. In the first updates gradients are copied while the tap watches what becomes of them.
If each time they were let go untouched (`zero_grad(set_to_none=True)` after or before the next backward), later ones are
held by reference, under a Seal. If anything deviates, the results of that update are stored in place of its gradients
and the tap goes back to copying: nothing wrong is ever logged as right.

Everything here runs on the training thread, except that the writer's finds out whether gradients have been let go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Protocol

import msgspec
import torch
from torch.optim import Optimizer

from everstep import forks, native, payloads, sharding, tree
from everstep.capture.carry import Carry
from everstep.capture.early import Early
from everstep.capture.held import Held, clone, unshared, version_of, versions_of
from everstep.capture.pending import (
    Item,
    PendingGroups,
    PendingState,
    PendingTensor,
    PendingUpdate,
    Seal,
)
from everstep.capture.trial import Trial
from everstep.errors import InexactWarning
from everstep.fold import class_name
from everstep.memory import same_bits
from everstep.naming import follow_outer, outer_of

LEARNING_UPDATES = 3
LOOK_AT_ONCE = 48
"""Up to so many gradients are looked at as soon as zero_grad has let them go, and not only when their frame ends."""
LOOK_EVERY = 4
"""Of more, some are, at one update in so many."""
_FIXED = frozenset((int, float, bool, str, bytes, complex, type(None)))
MAX_DEVIATIONS = 8
"""After so many updates whose gradients were not let go, they are copied for good."""
NEVER_REPLAYED = frozenset(("torch.optim.LBFGS",))
ONE_CALL = frozenset(f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "Adagrad"))
"""Their fused steps are one call of torch's that reads gradients, writes to none, and lets other threads run meanwhile."""
_grad = attrgetter("grad")


class Recorder(Protocol):
    """What a tap needs from the run."""

    stall_s: float
    """Seconds that the training thread has waited for others."""

    def before_update(self, tap: Tap) -> None: ...

    def put(self, item: Item) -> None: ...

    def after_update(self, optimizer: str) -> None: ...

    def warn(self, message: str, category: type[Warning]) -> None: ...

    def dispose(self, tensors: list[Any]) -> None: ...

    def state_loaded(self, optimizer: str) -> None: ...

    def is_quiet(self) -> bool: ...

    def changed_since_commit(self) -> set[int]: ...


class Tap:
    """Hooks of one optimizer."""

    def __init__(
        self, name: str, optimizer: Optimizer, uids: Callable[[], tuple[list[tuple[int, ...]], Mapping[int, int]]],
        recorder: Recorder, early: Early | None = None,
    ) -> None:  # fmt: skip
        """`uids`, when it is called: those of each group's parameters that this rank stores, and uids by id(parameter).

        `early` hands gradients over before their step.
        """
        self.name = name
        self._forks = forks.count
        self.optimizer = optimizer
        self._uids_now = uids
        self._recorder = recorder
        self._early = early
        self._native = native.part()
        self._lock = threading.Lock()
        """Two threads that look at the same gradients at once would take each other for somebody else."""
        self._depth = 0
        self._grads: list[torch.Tensor | None] | None = None
        self._versions: list[int] = []
        self._copies: list[torch.Tensor | None] | None = None
        self._take_after = False
        self._skipped = self._steady = False
        self._usual = False
        """The last update was taken by reference before its step, as those before it."""
        self._scale: torch.Tensor | None = None
        self._held: Held | None = None
        self._clean = 0
        self._never_shared = False
        self._deviations = 0
        self.overwrite = class_name(type(optimizer)) in NEVER_REPLAYED
        """Results are stored in place of gradients: this optimizer cannot be replayed."""
        self.results_due = False
        self.interrupted = False
        """A step raised: what it left behind is unknown."""
        self._writes_grads = False
        self._trials_left = 2
        self._warned_unkept = False
        self._trial: Trial | None = None
        self.carry = Carry()
        self.updates = self._told_updates = 0
        self.thread_s = 0.0
        """Time that hooks have taken from the training thread."""
        self.copied_bytes = 0
        self._read_groups()
        self.carry.begin()
        self._handles = [
            optimizer.register_step_pre_hook(self._pre),
            optimizer.register_step_post_hook(self._post),
            optimizer.register_load_state_dict_post_hook(lambda _: recorder.state_loaded(name)),
        ]
        # The first of all: what another's hook edits after an update is no part of it.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._handles[1].id, last=False)
        self._wrap_zero_grad()
        payloads.readers.add(self)

    def detach(self) -> None:
        payloads.readers.discard(self)
        if self._early is not None:
            self._early.remove()
        for handle in self._handles:
            handle.remove()
        if self.optimizer.__dict__.get("zero_grad") is self._zero_grad:
            del self.optimizer.__dict__["zero_grad"]

    # -- parameter groups ---------------------------------------------------------------------------------------------

    def _read_groups(self) -> None:
        self._is_wrapped = outer_of(self.optimizer) is not None
        follow_outer(self.optimizer)
        groups = self.optimizer.param_groups
        self.group_uids, uid_of = self._uids_now()
        self._all: list[torch.Tensor] = [p for g in groups for p in g["params"]]
        self.params = [p for p in self._all if id(p) in uid_of]
        self._not_stored = [p for p in self._all if id(p) not in uid_of]
        self.group_sizes = [len(g["params"]) for g in groups]
        self.uids = [uid for group in self.group_uids for uid in group]
        self._is_sharded = any(map(sharding.is_sharded, self._all))
        self._grad_of: Callable[[Any], Any] = sharding.local_grad if self._is_sharded else _grad
        self.param_bytes = sum(p.numel() * p.element_size() for p in map(sharding.local, self.params))
        self.overwrite = self.overwrite or is_broken_in_torch(self.optimizer)
        self._hyper_bytes = self._encode_hyper()
        self._hyper_values: list[Any] = []
        self._hyper_is_fixed = False
        """None of them can be changed in place."""
        self._is_one_call = False
        self.recorded_hyper: list[dict[str, Any]] = tree.freeze(self.hyper(), path=self.name)
        self.carry.install(self.params, self.uids, self._grad_of)
        if self._early is not None:
            self._early.install([] if self.overwrite else self.params, [] if self.overwrite else self.uids)

    def groups_changed(self) -> bool:
        """Whether parameters were added, removed or regrouped."""
        groups = self.optimizer.param_groups
        return [len(g["params"]) for g in groups] != self.group_sizes or not all(
            map(is_, chain.from_iterable([g["params"] for g in groups]), self._all)
        )

    def regroup(self) -> None:
        """Learn the groups anew; what was learned of gradients starts over."""
        self._read_groups()
        self._held, self._clean, self._usual = None, 0, False
        self._trials_left = max(self._trials_left, 1)

    def hyper(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def _encode_hyper(self) -> bytes | None:
        """The hyperparameters as bytes, to compare bit for bit; None if some are not plain."""
        try:
            return msgspec.msgpack.encode(self.hyper())
        except (TypeError, ValueError, OverflowError):
            return None

    def groups_item(self) -> PendingGroups:
        self.recorded_hyper = tree.freeze(self.hyper(), path=self.name)
        return PendingGroups(self.name, self.recorded_hyper, list(self.group_uids))

    def changed_groups(self) -> list[Item]:
        """The groups, if any hyperparameter differs from what was last recorded."""
        if self._is_wrapped:
            follow_outer(self.optimizer)
        if self.groups_are_as_recorded():
            return []
        groups = self.optimizer.param_groups
        self._hyper_values = list(chain.from_iterable(map(dict.values, groups)))
        self._hyper_is_fixed = all(_cannot_change(v) for g in groups for k, v in g.items() if k != "params")
        self._is_one_call = class_name(type(self.optimizer)) in ONE_CALL and all(g.get("fused") for g in groups)
        now = self._encode_hyper()
        if now is not None and now == self._hyper_bytes:
            return []
        self._hyper_bytes = now
        return [self.groups_item()]

    def groups_are_as_recorded(self, *, params: bool = False) -> bool:
        """Whether every hyperparameter is the very object that was last recorded, and cannot have changed, and groups are of
        as many parameters as they were; with `params`, of the same ones."""
        if not self._hyper_is_fixed or self._hyper_bytes is None:
            return False
        groups, all_params = self.optimizer.param_groups, self._all if params else None
        if self._native is not None:
            found = self._native.same_groups(groups, self._hyper_values, self.group_sizes, all_params)
            if found is not None:
                return found
        values, lists = list(chain.from_iterable(map(dict.values, groups))), [g["params"] for g in groups]
        if len(values) != len(self._hyper_values) or not all(map(is_, values, self._hyper_values)):
            return False
        if list(map(len, lists)) != self.group_sizes:
            return False
        return all_params is None or all(map(is_, chain.from_iterable(lists), all_params))

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if forks.count != self._forks:
            return None  # a forked child trains for itself
        self._depth += 1
        if self._depth > 1:
            return None
        begun, stalled = time.perf_counter(), self._recorder.stall_s
        try:
            if self._usual and len(args) < 2 and not kwargs and self._recorder.is_quiet() and self._take_as_usual():
                return None
            return self._before_step(args, kwargs)
        finally:
            self.thread_s += time.perf_counter() - begun - (self._recorder.stall_s - stalled)

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if forks.count != self._forks:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        begun = time.perf_counter()
        held = self._held
        if self._steady and held is not None:
            # What is usual: the writer has the gradients already. (Ours was the last hook when they were taken.)
            if not held.is_gathered:
                held.gather()
            self.updates += 1
            self._grads = None
            self._recorder.after_update(self.name)
        else:
            self._after_step()
        self.thread_s += time.perf_counter() - begun

    def _before_step(self, args: Any, kwargs: Any) -> Any:
        self._recorder.before_update(self)
        if self._is_sharded:
            self._sum_partial()
        self._learn()
        self._grads = self._copies = None
        self._take_after, self._scale, self._skipped, self._steady, self._usual = False, None, False, False, False
        if self._trials_left > 0 and not self.overwrite:
            self._trial = Trial(self.name, self.optimizer, self.params, self.uids, self.group_uids)
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if closure is None or self.overwrite:
            self._take()
            return None

        def wrapped(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            begun = time.perf_counter()
            self._take(has_closure=True)
            self.thread_s += time.perf_counter() - begun
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _sum_partial(self) -> None:
        """Gradients that the step would sum over ranks (SequenceParallel's) are summed now: the one collective of ours."""
        for p in self._all:
            if p.grad is not None and sharding.is_partial(p.grad):
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]

    def _take_as_usual(self) -> bool:
        """The same as _before_step after an update like all others, if this one is too; else nothing is done.

        What is touched here for the first time in a step costs more than what is done with it: see decision 0008.
        """
        held = self._held
        if held is None or not held.was_released or self.carry.is_learning or self.results_due or not self._is_last():
            return False
        # Parameters that were exchanged within a group's list are found at the commit, which then stores the new ones.
        if not self.groups_are_as_recorded():
            return False
        own = vars(self.optimizer)
        if "grad_scale" in own or "found_inf" in own:
            return False
        if self._is_one_call and self._early is None:
            self._clean += 1
            self._hand_over_unread()
            return True
        grads = list(map(_grad, self.params))
        try:
            self._versions = list(map(version_of, grads))
        except AttributeError:  # some have none
            return False
        if self._early is not None:
            self.thread_s += self._early.step_begins()
        self._grads = grads
        self._clean += 1
        self._hand_over_steady()
        return True

    def _take(self, *, has_closure: bool = False) -> None:
        """The gradients that are about to be consumed. (A closure may be called again: then these were not the last.)"""
        if self._early is not None:
            self.thread_s += self._early.step_begins()
        if self.overwrite:
            return
        self._grads = list(map(self._grad_of, self.params))
        scale = getattr(self.optimizer, "grad_scale", None)
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0.0:
            self._skipped = True
            return
        if scale is not None:
            if _unscaling_is_exact(scale, self._grads):
                self._take_after = True
                return
            self._scale = scale.detach().clone()
            self._copies = self._copy(self._grads)
        elif self._must_copy():
            self._copies = self._copy(self._grads)
        else:
            self._steady = self._trial is None and self._is_last() and self._never_shared
        self._versions = versions_of(self._grads)
        if self._steady and not has_closure:
            self._hand_over_steady()
            self._usual = self._deviations < MAX_DEVIATIONS and not self._is_sharded

    def _must_copy(self) -> bool:
        return self._writes_grads or self._clean < LEARNING_UPDATES

    def _copy(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        copies = [None if g is None else clone(g) for g in grads]
        self.copied_bytes += sum(g.numel() * g.element_size() for g in copies if g is not None and not g.is_sparse)
        return copies

    def _after_step(self) -> None:
        late_hook = not self._is_last()
        self._usual = False
        self._move_last()
        self.updates += 1
        if self.overwrite or self._grads is None:
            self.results_due = True
            self._recorder.after_update(self.name)
            return
        if late_hook:
            # Somebody's new hook ran between ours and the step, and may have changed anything: store what came out.
            self._take_back()
            self._trial, self._held, self.results_due = None, None, True
        elif self._skipped:
            self._after_skipped()
        else:
            self._hand_over()
        self._grads = self._copies = None
        self._recorder.after_update(self.name)

    def _after_skipped(self) -> None:
        assert self._grads is not None
        self._recorder.put(PendingUpdate(self.name, self.uids, [g if g is None else g.detach() for g in self._grads],
                                         skipped=True))  # fmt: skip
        # A kernel that skips may still have made state, and fused SGD leaves it uninitialised: store it as it is.
        for item in self.state_items():
            self._recorder.put(item)
        self._trial = None

    def _hand_over_steady(self) -> None:
        """By reference, before the step has run: the writer reads them while the step does.

        Ours was the last hook before the step, and whoever writes into these from here on moves their counters. Memory
        that others share is found when the seal is to be opened.
        """
        assert self._grads is not None
        seal = Seal()
        versions = None if -1 in self._versions else self._versions
        self._held = Held(self.params, self._grads, seal, versions, grad_of=self._grad_of, lock=self._lock)
        self._held.update = update = self._pending(self._grads, seal)
        self._recorder.put(update)

    def _hand_over_unread(self) -> None:
        """The same, but the writer takes them off their parameters itself, while the step runs; or else the hook after it.

        To look at a gradient for the first time costs more than all else here, and the step looks at each anyway.
        """
        seal = Seal()
        held = self._held = Held(self.params, None, seal, grad_of=_grad, lock=self._lock)
        held.update = update = self._pending([], seal)
        update.gather = held.gather
        self._recorder.put(update)

    def _pending(
        self, grads: list[torch.Tensor | None], seal: Seal | None, scale: torch.Tensor | None = None
    ) -> PendingUpdate:
        known = payloads.take(self.params, self._not_stored)
        return PendingUpdate(self.name, self.uids, grads, seal, scale, num_bytes=self.param_bytes, payloads=known)

    def _take_back(self) -> None:
        """What was handed over before the step is not what it consumed: results follow instead."""
        if self._held is not None and self._held.seal is not None:
            self._held.seal.instead = []
            self._held.seal.break_open()

    def _hand_over(self) -> None:
        assert self._grads is not None
        if self._steady:
            if self._held is None:
                self._hand_over_steady()
            return
        now: list[torch.Tensor | None] = list(map(self._grad_of, self.params))
        if self._take_after:
            self._grads, self._versions = now, versions_of(now)
            if self._must_copy():
                self._copies = self._copy(now)
        deviation = self._compare(now)
        if self._copies is not None:
            update = self._pending(self._copies, None, self._scale)
            self._held = Held(self.params, self._grads, None, grad_of=self._grad_of, lock=self._lock)
            if self._deviations < MAX_DEVIATIONS:
                self._held.copies = [c for c in self._copies if c is not None]
        elif deviation:
            self._deviations += 1
            self._clean, self._held, self.results_due = 0, None, True
            return
        else:
            seal = Seal()
            grads, shared = unshared(self._grads)
            self._never_shared = not shared
            update = self._pending(grads, seal)
            kept = [None if s else g for g, s in zip(self._grads, shared, strict=True)] if shared else grads
            self._held = Held(self.params, kept, seal, grad_of=self._grad_of, lock=self._lock)
        if self._trial is not None:
            self._try(update)
            if self.overwrite:
                self.results_due = True
                return
        self._recorder.put(update)

    def _compare(self, now: list[torch.Tensor | None]) -> str:
        """What is different from before the step, in words; empty if nothing."""
        assert self._grads is not None
        if self._take_after:
            return ""
        written = versions_of(self._grads) != self._versions
        if not all(map(is_, self._grads, now)):
            replaced = [i for i, (a, b) in enumerate(zip(self._grads, now, strict=True)) if a is not b]
            # Somebody's hook ran after ours. What they put there is what was consumed, if the step left it alone; the
            # trial or the audit will tell. Our hook is last from now on.
            if self._copies is not None:
                for i in replaced:
                    g = now[i]
                    self._copies[i] = None if g is None else clone(g)
            return "a gradient was replaced by a hook that ran after Everstep's"
        if not self._writes_grads and self._copies is not None and not written and self._clean < LEARNING_UPDATES:
            # A step that writes into gradients without moving their version counters.
            written = self._scale is None and any(
                a is not None and b is not None and not a.is_sparse and not same_bits(a, b)
                for a, b in zip(self._copies, now, strict=True)
            )
        if written:
            self._writes_grads = True
            return "the optimizer writes into its gradients"
        return ""

    def _try(self, update: PendingUpdate) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None
        self._trials_left -= 1
        unkept = trial.unkept()
        if unkept and not self._warned_unkept:
            self._warned_unkept = True
            self._recorder.warn(
                f"{class_name(type(self.optimizer))} ({self.name!r}) counts in {', '.join(unkept)}, outside of its state "
                "and param_groups: that is not stored, and begins anew when the run is resumed. Keep it in a group, in the "
                "state of a parameter, or in an object of extras",
                InexactWarning,
            )
        wrong = trial.differs(update)
        if wrong:
            self.overwrite, self._held = True, None
            if self._early is not None:
                self._early.remove()
            self._recorder.warn(
                f"{class_name(type(self.optimizer))} ({self.name!r}) cannot be replayed bit for bit here: {wrong}. Its "
                "results are stored at every step instead of its gradients; that costs more bytes and a copy",
                InexactWarning,
            )

    def _is_last(self) -> bool:
        """Whether no other instance hook runs between ours and the step."""
        return bool(next(reversed(self.optimizer._optimizer_step_pre_hooks)) == self._handles[0].id)

    def _move_last(self) -> None:
        if not self._is_last():
            hooks: Any = self.optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(self._handles[0].id)

    # -- what becomes of gradients ------------------------------------------------------------------------------------

    def settle(self, *, force: bool = False) -> None:
        """Open the seal of the last update if that can be done now. `force`: wait for the writer if it must be."""
        held = self._held
        if held is None or held.seal is None or held.seal.open.is_set():
            return
        if not held.is_gathered:  # the step has raised
            held.gather()
        if self._early is not None and self._early.is_read():
            # While the writer reads one, it has a hold on it that would be taken for somebody else's.
            if not force:
                return
            self._wait_until_read(held.seal)
        grads, update = held.grads, held.update
        if held.release():
            if held.seal.read.is_set():
                self._recorder.dispose([grads, update])  # else the writer is the last to hold them
            return
        held.suspect = held.suspect or (not held.attached() and held.shared())
        if force:
            self.carry.late(held)
            self._wait_until_read(held.seal)
        if held.seal.read.is_set() and not held.open(self._late_results):
            self._never_shared = self._usual = False
            self._clean, self._held = 0, None
            self._deviations += 1

    def _late_results(self, seal: Seal) -> list[Item]:
        """What the last update led to. If its step has been committed, that may have been edited since."""
        if self.updates == self._told_updates:
            seal.spoiled = self._recorder.changed_since_commit()
        return self.result_items()

    def _wait_until_read(self, seal: Seal) -> None:
        begun = time.perf_counter()
        seal.read.wait()
        self._recorder.stall_s += time.perf_counter() - begun

    def _learn(self) -> None:
        """At this optimizer's next update: were the last gradients let go untouched?"""
        held, self._held = self._held, None
        if held is not None and held.grads:
            held.update = None
            self._recorder.dispose(held.grads)
        self.carry.learn()
        if held is None:
            return
        if held.was_released or (held.released() and held.still_equal()):
            self._clean += self._deviations < MAX_DEVIATIONS
        else:
            self._clean = 0
            self._deviations += held.seal is None

    def _wrap_zero_grad(self) -> None:
        original = self.optimizer.zero_grad
        tap = self

        def zero_grad(set_to_none: bool = True) -> None:
            if forks.count != tap._forks:
                original(set_to_none=set_to_none)
                return
            if not set_to_none:
                tap.settle(force=True)
            original(set_to_none=set_to_none)
            begun = time.perf_counter()
            tap._dropped()
            tap.thread_s += time.perf_counter() - begun

        self._zero_grad = zero_grad
        self.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def _dropped(self) -> None:
        """The gradients have been taken off their parameters: of many, the writer thread finds out what else has them."""
        held = self._held
        if held is None or held.seal is None:
            return
        if not held.is_gathered:  # the step has raised
            held.gather()
        if len(held.grads) <= LOOK_AT_ONCE:
            self.settle()
        elif self.updates % LOOK_EVERY == 0:
            held.look_at_some(self.updates // LOOK_EVERY)
        held.seal.dropped.set()

    # -- results and carried gradients --------------------------------------------------------------------------------

    def result_items(self) -> list[Item]:
        """Parameters and state as they are now."""
        items: list[Item] = [
            PendingTensor(u, sharding.local(p).detach().clone()) for u, p in zip(self.uids, self.params, strict=True)
        ]
        return items + self.state_items()

    def state_items(self) -> list[Item]:
        state = self.optimizer.state
        items: list[Item] = []
        for uid, p in zip(self.uids, self.params, strict=True):
            values = state.get(p)
            frozen = None if values is None else tree.freeze(sharding.local_values(values), path=self.name)
            items.append(PendingState(self.name, uid, frozen))
        other = {k: v for k, v in state.items() if not isinstance(k, torch.Tensor)}
        if other:
            items.append(PendingState(self.name, 0, tree.freeze(other, path=self.name)))
        return items

    def carried(self) -> list[Item]:
        """At a commit: gradients that stay on the parameters and that the next backward may add to."""
        self.carry.left = False
        if self.carry.is_rare and self._leaves_alone(self._held):
            return self.carry.gone()
        return self.carry.look(
            self._held, is_updated=self.updates != self._told_updates, steps_write=self._writes_grads
        )

    def carried_now(self) -> list[tuple[int, str, torch.Tensor]]:
        """(uid, kind, gradient) that a base of the last commit has."""
        self.carry.tell_left(self._held)
        return self.carry.now()

    def _leaves_alone(self, held: Held | None) -> bool:
        """Whether the usual can be assumed: gradients that are still there now will be dropped, not added to.

        Should they be added to after all, the next update notices it and says so in this frame (Carry.late).
        """
        if held is None or held.seal is None:
            return False
        if held.seal.dropped.is_set() or not held.attached():
            return self.updates != self._told_updates and not self._has_gradients()
        # Whoever writes into one of them in place mostly writes into all: two are looked at here, all at the next update.
        ends = (0, -1)
        self.carry.left = all(held.grads[i]._version == held.versions[i] for i in ends)
        if not self.carry.left:
            self.settle(force=True)
        return self.carry.left

    def _has_gradients(self) -> bool:
        """Whether there are gradients after those of the update are gone; of many parameters the first and the last tell."""
        params = self.params if len(self.params) <= LOOK_AT_ONCE else (self.params[0], self.params[-1])
        return any(p.grad is not None for p in params)

    def after_commit(self) -> None:
        """What has been told of is told."""
        self._told_updates = self.updates

    def accumulating(self) -> bool:
        """Whether gradients have appeared or grown since the last update: an accumulation is under way."""
        held = self._held
        consumed = {} if held is None else {id(g): v for g, v in zip(held.grads, held.versions, strict=True)}
        return any(g is not None and consumed.get(id(g)) != g._version for g in map(self._grad_of, self.params))

    def reset_after_exception(self) -> bool:
        """Whether a step raised before its post-hook: what it changed is unknown, and is stored as it is."""
        if not self._depth:
            return False
        self._depth = 0
        self._usual = False
        self.results_due = True
        if self._steady:
            self._take_back()
        self._held = None
        return True


def _cannot_change(value: Any) -> bool:
    return type(value) in _FIXED or (type(value) is tuple and all(map(_cannot_change, value)))


def is_broken_in_torch(optimizer: Optimizer) -> bool:
    """Fused SGD on 16-bit CPU parameters is not even reproducible by itself (pytorch #191763)."""
    return class_name(type(optimizer)) == "torch.optim.SGD" and any(
        group.get("fused") and any(p.dtype in (torch.bfloat16, torch.float16) for p in group["params"])
        for group in optimizer.param_groups
    )


def _unscaling_is_exact(scale: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether the unscaled gradients that a fused step leaves behind give the same update as the scaled ones."""
    mantissa = float(torch.frexp(scale.detach().float().cpu())[0].item()) if scale.numel() == 1 else 0.0
    wide = all(g is None or g.dtype in (torch.float32, torch.float64) for g in grads)
    return mantissa == 0.5 and wide

