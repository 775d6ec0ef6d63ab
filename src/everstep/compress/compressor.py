"""What all compressors share: error feedback, the two ways in which they are used, and what of them is state.

Without DDP a compressor transforms gradients right before the optimizer's step. As a communication hook it replaces DDP's
all-reduce: every rank compresses its own gradient, the payloads go to all ranks, and each makes the same mean of them, which
is again of the payload's form. Everything is by parameter: DDP packs gradients into buckets, and packs them anew after the
first backward.

A gradient with NaN or infinite elements (on any rank) is not compressed at that step: it goes on as it is, bit for bit, is
counted and told of. Its residual waits. Ranks tell each other of such gradients in the messages that they send anyway;
when backward has ended, and if there are any, their dense mean is made.
"""

# No `from __future__ import annotations`: DDP looks at the annotations of hooks, and wants classes.

import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.autograd.graph import increment_version
from torch.futures import Future
from torch.optim import Optimizer

from everstep import payloads, sharding
from everstep.compress.agree import agree
from everstep.errors import NonFiniteWarning, UsageError
from everstep.payloads import Payload

RESIDUALS = ("base", "log")
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
P = TypeVar("P", bound=Payload)


@dataclass
class _Known:
    """A parameter that has been seen, or told of."""

    param: torch.Tensor
    index: int
    """Its random numbers depend on this: it is the same with Everstep and without, and after a resume."""
    residual: torch.Tensor | None
    """Nobody writes to it: a step makes another. So whoever stores it may hold it by reference."""
    shown: torch.Tensor | None = None
    """A tensor that stays the same object and always has the residual's memory: what is stored."""
    of_optimizer: bool = False
    """Whether `index` is its place in the optimizers that the compressor is attached to."""

    def leave_out(self, rest: torch.Tensor) -> None:
        """This is the residual from now on."""
        self.residual = rest
        if self.shown is not None:
            self.shown.data = rest.view(self.shown.shape)
            increment_version(self.shown)  # `.data` does not, and snapshots go by it


class Compressor(Generic[P]):
    """Compresses gradients; TopK, Quantize and Half say how."""

    def __init__(self, *, error_feedback: bool, residual: str) -> None:
        if residual not in RESIDUALS:
            raise UsageError(f"residual must be one of {', '.join(RESIDUALS)}, not {residual!r}")
        self.error_feedback = error_feedback
        self.residual = residual
        """Where residuals are found after a crash: `log`, exactly as they were, or `base`, as of some steps before."""
        self.residuals = nn.Module()
        """Buffers: by parameter, what was left out of the gradients so far."""
        self.nonfinite_gradients = 0
        """Gradients that were not compressed, since they had NaN or infinite elements."""
        self.process_group: Any = None
        """That of the DDP module, where it is not the default one."""
        self._known: dict[int, _Known] = {}
        self._turn = 0
        """Counts steps, or backward passes."""
        self._agreed = False

    # -- what a compressor does -----------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What must be the same on all ranks and after a resume."""
        return {"kind": type(self).__name__, "error_feedback": self.error_feedback}

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether gradients of this dtype are compressed; others go on as they are."""
        return dtype is torch.float32

    def compress(self, flat: torch.Tensor, seed: int) -> P:
        """The payload of a gradient, all finite."""
        raise NotImplementedError

    def write(self, payload: P, out: torch.Tensor) -> None:
        """Fill `out`, which is flat, with what the payload stands for."""
        raise NotImplementedError

    def exchange(
        self, mine: list[P], odd: list[bool], seeds: list[int], group: Any
    ) -> "Future[tuple[list[P], list[bool]]]":
        """The mean of these payloads over all ranks, the same on each, and which of them are `odd` on any. One collective,
        which nobody waits for here."""
        raise NotImplementedError

    # -- without DDP ----------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> Any:
        """Compress gradients before each step of this optimizer. Returns a handle, whose remove() ends that."""
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            known = self._know(p)
            if not known.of_optimizer:
                known.index = sum(k.of_optimizer for k in self._known.values())
                known.of_optimizer = True
        return optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "these gradients are still multiplied by the scale of a GradScaler, which changes: call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer), so that what one step leaves out fits the next"
            )
        params = [p for group in optimizer.param_groups for p in group["params"]]
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if closure is None:
            self(params)
            return None

        def wrapped(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            self(params)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    @torch.no_grad()
    def __call__(self, params: Sequence[torch.Tensor]) -> None:
        """Compress the gradients of these parameters, in place."""
        self._turn += 1
        for p in params:
            grad = p.grad
            if grad is None or grad.is_sparse or sharding.is_partial(grad):
                continue
            local = sharding.local(grad).detach()
            if not self.takes(local.dtype) or not local.numel():
                continue
            known = self._know(p)
            flat = local.reshape(-1)
            whole = self._with_residual(known, flat)
            if not _is_finite(whole):
                self._leave_alone(1)
                continue
            payload = self.compress(whole, self._seed(known, 0))
            self.write(payload, flat)
            self._keep_rest(known, whole, flat)
            if not local.is_contiguous():
                local.copy_(flat.view(local.shape))
            if payloads.readers:
                payloads.leave(p, payload)

    # -- as a communication hook ----------------------------------------------------------------------------------------

    @property
    def state(self) -> "Compressor[P]":
        """For model.register_comm_hook(compressor.state, compressor.hook)."""
        return self

    @torch.no_grad()
    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
        """A DDP communication hook: the mean of the gradients in `bucket` over all ranks, compressed."""
        group = self.process_group or dist.group.WORLD
        if not self._agreed:
            agree(self.describe(), group, bucket.buffer().device)
            self._agreed = True
        if bucket.index() == 0:
            self._turn += 1
        world, buffer = dist.get_world_size(group), bucket.buffer()
        if buffer.is_sparse or not self.takes(buffer.dtype):
            return _all_reduced(buffer, world, group)
        params, shaped = bucket.parameters(), bucket.gradients()
        grads = [_in_memory(g) for g in shaped]
        known = [self._know(p) for p in params]
        # One that backward did not come to has zeros here. If no rank came to it, nobody will use what is sent of it: its
        # residual waits.
        waits = [p.grad is None or k.residual is None for p, k in zip(params, known, strict=True)]
        wholes = [g if w else self._with_residual(k, g) for k, g, w in zip(known, grads, waits, strict=True)]
        odd = [not _is_finite(w) for w in wholes]
        rank = dist.get_rank(group)
        # What is odd takes its place in the message all the same, as zeros: messages of all ranks are of one length.
        mine = [
            self.compress(torch.zeros_like(w) if is_odd else w, self._seed(k, rank))
            for k, w, is_odd in zip(known, wholes, odd, strict=True)
        ]
        seeds = [self._seed(k, -1) for k in known]
        left_alone: list[int] = []

        def finish(future: "Future[tuple[list[P], list[bool]]]") -> Any:
            mean, odd = future.value()
            for i, (payload, is_odd) in enumerate(zip(mean, odd, strict=True)):
                if is_odd:
                    left_alone.append(i)
                    continue
                if not waits[i]:
                    self.write(mine[i], grads[i])
                    self._keep_rest(known[i], wholes[i], grads[i])
                self.write(payload, grads[i])
                if payloads.readers and shaped[i].is_contiguous():
                    payloads.leave(params[i], payload)
            return buffer

        done = _then(_done((mine, odd)) if world == 1 else self.exchange(mine, odd, seeds, group), finish)

        def settle() -> None:
            """When backward has computed everything, just before DDP itself waits for what is under way; in the first
            backward of a static graph, just after that."""
            done.wait()
            for i in left_alone if world > 1 else ():
                dist.all_reduce(grads[i].div_(world), group=group)
                _put(shaped[i], params[i])
            self._leave_alone(len(left_alone))

        try:
            _queue_callback(settle)
        except RuntimeError as e:
            raise UsageError(
                "a compressor's hook was called outside of a backward pass, as DDP's join() does for ranks without data: "
                "give all ranks equally many batches (everstep.data.Sampler does)"
            ) from e
        return done

    # -- by parameter ---------------------------------------------------------------------------------------------------

    def _know(self, p: torch.Tensor) -> _Known:
        known = self._known.get(id(p))
        if known is None:
            local = sharding.local(p)
            has = self.error_feedback and p.requires_grad and self.takes(p.dtype)
            residual = torch.zeros(local.numel(), dtype=p.dtype, device=local.device) if has else None
            known = self._known[id(p)] = _Known(p, len(self._known), residual)
        return known

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Keep residuals as buffers with these names, so that they can be stored. By everstep.attach."""
        self.residuals = nn.Module()
        for index, (name, p) in enumerate(params.items()):
            known = self._know(p)
            if not known.of_optimizer:
                known.index = index
            if known.residual is not None:
                # That of a DTensor is one, too: it belongs to those elements of the whole, and to no others.
                shape = sharding.local(p).shape if sharding.is_sharded(p) else known.residual.shape
                buffer = sharding.like(known.residual.view(shape), p)
                known.shown = sharding.local(buffer)
                self.residuals.register_buffer(name.replace(".", "/"), buffer)

    def _with_residual(self, known: _Known, flat: torch.Tensor) -> torch.Tensor:
        return flat if known.residual is None else flat + known.residual

    def _keep_rest(self, known: _Known, whole: torch.Tensor, out: torch.Tensor) -> None:
        if known.residual is not None:
            known.leave_out(whole.sub_(out))

    def _seed(self, known: _Known, rank: int) -> int:
        """For this gradient of this step: whatever is drawn depends on nothing else. Rank -1: on all ranks the same."""
        return xxhash.xxh3_64_intdigest(struct.pack("<qqq", self._turn, known.index, rank)) >> 1

    def _leave_alone(self, count: int) -> None:
        if count and not self.nonfinite_gradients:
            warnings.warn(
                f"{count} gradient(s) with NaN or infinite elements were not compressed, and go on as they are "
                "(told once; counted in compressor.nonfinite_gradients)",
                NonFiniteWarning,
                stacklevel=3,
            )
        self.nonfinite_gradients += count

    # -- state ----------------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """What must be known at every step to go on as if nothing had happened, apart from residuals."""
        return {"turn": self._turn, "nonfinite": self.nonfinite_gradients}

    def set_position(self, position: Mapping[str, Any]) -> None:
        self._turn = position["turn"]
        self.nonfinite_gradients = position["nonfinite"]

    def state_dict(self) -> dict[str, Any]:
        """All of its state, for those who store it by themselves: residuals in the order in which parameters were seen."""
        residuals = [k.residual for k in sorted(self._known.values(), key=lambda k: k.index)]
        return {**self.position(), "residuals": [None if r is None else r.clone() for r in residuals]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, for a compressor that knows the same parameters (by attach or bind)."""
        known = sorted(self._known.values(), key=lambda k: k.index)
        if [None if k.residual is None else k.residual.shape for k in known] != [
            None if r is None else r.shape for r in state["residuals"]
        ]:
            raise UsageError("residuals of other parameters: attach the compressor to the same optimizer first")
        self.set_position(state)
        for k, r in zip(known, state["residuals"], strict=True):
            if k.residual is not None:
                k.leave_out(r.clone())


def _in_memory(grad: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order in which they lie in memory, as a view."""
    return grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,), grad.storage_offset())


def _put(grad: torch.Tensor, param: torch.Tensor) -> None:
    """A gradient has changed in its bucket: the parameter may have a copy of it already."""
    if param.grad is not None and param.grad.data_ptr() != grad.data_ptr():
        param.grad.detach().copy_(grad)


def _is_finite(flat: torch.Tensor) -> bool:
    """Whether all elements are. A sum is enough of a look: what is not finite makes it so."""
    total = flat.sum(dtype=torch.float64)
    return bool(torch.isfinite(total))


def _then(future: "Future[Any]", call: "Callable[[Future[Any]], Any]") -> "Future[torch.Tensor]":
    return future.then(call)


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _all_reduced(buffer: torch.Tensor, world: int, group: Any) -> Future[torch.Tensor]:
    """As without a hook."""
    work: Any = dist.all_reduce(buffer.div_(world), group=group, async_op=True)

    def reduced(done: "Future[Any]") -> torch.Tensor:
        done.value()  # raises if another rank has died
        return buffer

    return _then(work.get_future(), reduced)


def gathered(
    message: torch.Tensor, odd: list[bool], group: Any, merge: "Callable[[list[torch.Tensor]], list[P]]"
) -> "Future[tuple[list[P], list[bool]]]":
    """merge() of the messages of all ranks, in their order, and what is `odd` on any of them."""
    flags = torch.tensor(odd, dtype=torch.uint8, device=message.device)
    sent = torch.cat([message, flags])
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    work: Any = dist.all_gather(found, sent, group=group, async_op=True)

    def merged(done: "Future[Any]") -> tuple[list[P], list[bool]]:
        done.value()  # raises if another rank has died: then `found` is not what anybody sent
        of_any = torch.stack([m[len(message) :] for m in found]).amax(dim=0)
        return merge([m[: len(message)] for m in found]), of_any.bool().tolist()

    future: Future[tuple[list[P], list[bool]]] = work.get_future().then(merged)
    return future
