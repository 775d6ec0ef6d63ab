"""Early hand-over: gradients leave during backward, each when it has become final. Runs on the training thread.

A hook on every larger parameter is called when its gradient has been accumulated. It takes hold of the gradient, while that
is in the cache, and does nothing else; now and then the writer is woken. What is handed over is a guess: which of these are
final is the writer's to find out (final.py), and at the step it proves whether what left is what the optimizer consumed
(sent.py), and writes the consumed gradient where it is not. So nothing here has to be right; what is wrong costs bytes.

Where gradients are reduced between processes they are final when that is done. DistributedDataParallel does it after these
hooks, bucket by bucket, and says so to nobody but the one communication hook that is the user's to set: `early_hook` makes
such a hook into one that hands a bucket over when it has been reduced. Without it they are handed over when backward ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from everstep import forks
from everstep.atoms import PACK_BELOW_BYTES
from everstep.capture.final import Final
from everstep.capture.pending import Item, PendingEarly
from everstep.capture.sent import Ledger

BATCH_BYTES = 16 << 20
"""The writer is woken for about so much: of what this takes the training thread, that is the most."""
MIN_BYTES = PACK_BELOW_BYTES
"""Smaller gradients share a record, and leave at the step."""
_on_accumulated: Callable[..., Any] = torch.Tensor.register_post_accumulate_grad_hook
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
_by_parameter: dict[int, tuple[Watcher, int]] = {}
"""By id: who watches a parameter, and under which number."""


class Watcher(Protocol):
    """Who wants to know when gradients have been reduced."""

    def bucket_begins(self) -> None:
        """A bucket with some of its parameters is about to be reduced. Training thread."""

    def bucket_reduced(self, reduced: list[tuple[int, torch.Tensor]]) -> None:
        """It has been, with these gradients (none, if that failed or cannot be told). Any thread; must not raise."""


class Early:
    """The parameters of one optimizer."""

    def __init__(self, put: Callable[[Item], None], ledger: Ledger) -> None:
        self._put = put
        self._ledger = ledger
        self._forks = forks.count
        self._params: list[torch.Tensor] = []
        self._handles: list[Any] = []
        self._seconds = 0.0

    def install(self, params: Sequence[torch.Tensor], uids: Sequence[int]) -> None:
        """Watch these parameters in place of those before."""
        self.remove()
        chosen = [
            (p, uid) for p, uid in zip(params, uids, strict=True)
            if type(p) in (torch.nn.Parameter, torch.Tensor) and p.requires_grad and p.device.type == "cpu"
            and p.numel() * p.element_size() >= MIN_BYTES
        ]  # fmt: skip
        self._params = [p for p, _ in chosen]
        self._final = Final([uid for _, uid in chosen], self._ledger)
        self._unread_bytes = 0
        """Of what the writer has not been woken for."""
        self._reduced: set[int] = set()
        """Those that come by way of early_hook."""
        self._waiting: list[int] = []
        """Those whose reduction is waited for until backward ends."""
        self._num_hopeless = 0
        self._is_called_back = False
        self._waits = _is_distributed()
        self._handles = [_on_accumulated(p, self._hook(i)) for i, p in enumerate(self._params)]
        watch(self, self._params)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        unwatch(self, self._params)

    # -- during backward ----------------------------------------------------------------------------------------------

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        """What is looked at again later has left the cache: so the gradient is taken now, and nothing else is touched."""
        final, now = self._final, time.perf_counter
        note = final.notes.append
        size = self._params[i].numel() * self._params[i].element_size()

        def accumulated(p: torch.Tensor) -> None:
            begun = now()
            if self._waits:
                self._waiting.append(i)
            else:
                note((i, p.grad))
                self._unread_bytes += size
            if not self._is_called_back:
                self._is_called_back = True
                _queue_callback(self._backward_ends)
            if self._unread_bytes >= BATCH_BYTES and not final.busy:  # else it comes to these by itself
                self._wake()
            self._seconds += now() - begun

        return accumulated

    def _wake(self) -> None:
        self._unread_bytes = 0
        if forks.count == self._forks:
            self._put(PendingEarly(self._final, self._final.num_steps))
        else:
            self._final.notes.clear()  # a forked child trains for itself

    def bucket_begins(self) -> None:
        """Nothing to do."""

    def bucket_reduced(self, reduced: list[tuple[int, torch.Tensor]]) -> None:
        """These are final, as far as the reduction is concerned. Called by the thread that has reduced them."""
        if not reduced:
            return
        self._reduced.update(i for i, _ in reduced)
        self._final.notes.extend(reduced)
        self._wake()

    def _backward_ends(self) -> None:
        if self._waits:
            # Whoever reduces gradients has asked to be called at the end too, perhaps after this was.
            _queue_callback(self._backward_ended)
        else:
            self._backward_ended()

    def _backward_ended(self) -> None:
        begun = time.perf_counter()
        self._is_called_back = False
        waited = [(i, self._params[i].grad) for i in self._waiting if i not in self._reduced]
        self._waiting.clear()
        self._final.notes.extend(waited)
        if waited or self._unread_bytes:
            self._wake()
        self._seconds += time.perf_counter() - begun

    # -- at the step --------------------------------------------------------------------------------------------------

    def step_begins(self) -> float:
        """What the writer has not read by now goes with the update.

        Returns the seconds that hooks have taken since the last.
        """
        self._final.step_begins()
        self._unread_bytes = 0
        self._waiting.clear()
        self._is_called_back = False  # a backward pass that raised has not called back
        if self._num_hopeless != len(self._ledger.hopeless):
            hopeless = set(self._ledger.hopeless)
            self._num_hopeless = len(hopeless)
            for uid, handle in zip(self._final.uids, self._handles, strict=True):
                if uid in hopeless:
                    handle.remove()
        self._waits = _is_distributed()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def is_read(self) -> bool:
        """Whether the writer has one of these gradients in hand (never after step_begins() and before the next backward,
        once it has put down the one it had)."""
        return self._final.busy


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


# -- reduced gradients ------------------------------------------------------------------------------------------------


def watch(watcher: Watcher, params: Sequence[torch.Tensor]) -> None:
    """Tell `watcher` of buckets that hold these, by their place in `params`, if they are reduced by an early_hook."""
    _by_parameter.update((id(p), (watcher, i)) for i, p in enumerate(params))


def watcher_of(param: torch.Tensor) -> Watcher | None:
    watched = _by_parameter.get(id(param))
    return None if watched is None else watched[0]


def unwatch(watcher: Watcher, params: Sequence[torch.Tensor]) -> None:
    for p in params:
        if _by_parameter.get(id(p), (None, 0))[0] is watcher:
            del _by_parameter[id(p)]


def early_hook(hook: Callable[[Any, Any], Any] | None = None) -> Callable[[Any, Any], Any]:
    """A communication hook for DistributedDataParallel that does what `hook` does, and hands each bucket over when it has
    been reduced, if attach(..., early=True) watches its parameters: `ddp.register_comm_hook(state, early_hook(hook))`.

    Without `hook`, gradients are averaged as DDP does it when it has no hook, and `state` is the process group (None: the
    default one). The bits are those of DDP without a hook, except with `gradient_as_bucket_view=True` on a number of ranks
    that is not a power of two, and in `join(divide_by_initial_world_size=False)`, where no hook knows by what to divide. DDP
    leaves the division to its hook: one pass more over all gradients.
    """
    return _EarlyHook(average if hook is None else hook)


class _EarlyHook:
    """A class, so that a DDP module that has one can be copied and pickled."""

    def __init__(self, hook: Callable[[Any, Any], Any]) -> None:
        self.hook = hook
        for name in ("__name__", "__qualname__"):  # DDP looks at them
            setattr(self, name, getattr(hook, name, type(hook).__name__))

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and wants its own
        places = [_by_parameter.get(id(p)) for p in bucket.parameters()]
        watchers = {watched[0] for watched in places if watched is not None}

        def reduced(done: Any) -> Any:
            found: dict[Watcher, list[tuple[int, torch.Tensor]]] = {}
            try:
                value = done.value()
                found = _find(bucket, places, value[0] if isinstance(value, (list, tuple)) else value)
            finally:
                for watcher in watchers:
                    watcher.bucket_reduced(found.get(watcher, []))
            return value

        for watcher in watchers:
            watcher.bucket_begins()
        return self.hook(state, bucket).then(reduced)


def average(state: Any, bucket: Any) -> Any:
    """As DDP without a hook: divided (by multiplying), then summed."""
    group: Any = dist.group.WORLD if state is None else state
    buffer = bucket.buffer()
    if buffer.is_sparse:
        buffer.div_(group.size())
    else:
        buffer.mul_(1.0 / group.size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(_first)


def _first(done: Any) -> Any:
    return done.value()[0]


def _find(
    bucket: Any, places: Sequence[tuple[Watcher, int] | None], result: torch.Tensor
) -> dict[Watcher, list[tuple[int, torch.Tensor]]]:
    """The gradients in a bucket, as DDP will take them from the hook's result, by who watches them."""
    found: dict[Watcher, list[tuple[int, torch.Tensor]]] = {}
    buffer = bucket.buffer()
    if result.is_sparse or result.dtype != buffer.dtype or result.numel() != buffer.numel():
        return found
    start = result.storage_offset() - buffer.storage_offset()
    for watched, view in zip(places, bucket.gradients(), strict=True):
        if watched is not None:
            watcher, i = watched
            at = start + view.storage_offset()
            found.setdefault(watcher, []).append((i, result.as_strided(view.size(), view.stride(), at)))
    return found
