"""Pending items to records and operations. Runs on the writer thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from everstep import tree
from everstep.atoms import PACK_BELOW_BYTES, Layout, piece_elements
from everstep.capture.pending import (
    Item,
    PendingCarry,
    PendingEarly,
    PendingGrad,
    PendingGroups,
    PendingLayout,
    PendingState,
    PendingTensor,
    PendingTensors,
    PendingUpdate,
)
from everstep.capture.reuse import Reuse
from everstep.capture.scaling import Coefficients
from everstep.capture.sent import Ledger, Piece, SentEarly
from everstep.codec import MIN_BYTES, Chooser
from everstep.frame import (
    Carry,
    Gradient,
    Op,
    ScaledGradient,
    ScaledUpdate,
    SetGrad,
    SetGroups,
    SetLayout,
    SetState,
    SetTensor,
    SparseRef,
    TensorRef,
    Update,
    coefficient_of,
)
from everstep.memory import CODE_BY_DTYPE, Bytes, is_plain, plain, strides_of, view_bytes
from everstep.store.log import LogWriter
from everstep.tune.averages import Spent

RETRY_EVERY, RETRY_FRAMES = 128, 2
"""While frames are stored as they are: of so many, codecs are tried in so many."""


class Encoder:
    """Writes tensors into the open frame and says where they are."""

    def __init__(
        self, log: LogWriter, write_layout: Callable[[Layout], None], meanwhile: Callable[[], None], ledger: Ledger
    ) -> None:
        """`meanwhile` is called between two tensors."""
        self._log = log
        self._meanwhile = meanwhile
        self._chooser = Chooser()
        self.lossless = True
        """Whether codecs are tried, from the next frame on. Else they are in a few frames of many, to know what they would
        save."""
        self.spent: Spent | None = None
        """What is counted for the tuner, if there is one."""
        self._frames = 0
        """Without codecs."""
        self._coefficients = Coefficients()
        self.sent = SentEarly(log, self._write, ledger, self._coefficients)
        self._reuse = Reuse(self._record, ledger, self._coefficients, fine=log.fine)
        self._write_layout = write_layout

    def begin_frame(self) -> None:
        """Whether its pieces get codecs is the same for all of a frame."""
        tries = self.lossless or self._frames % RETRY_EVERY < RETRY_FRAMES
        self._frames = 0 if self.lossless else self._frames + 1
        self._chooser.try_codecs(tries)
        if self.spent is not None and tries:
            self.spent.tried_frames += 1

    def ops(self, item: Item) -> list[Op]:
        """Write what an item holds; returns the operations that mean it."""
        if isinstance(item, PendingUpdate):
            return [self._update(item)]
        if isinstance(item, PendingEarly):
            self._early(item)
            return []
        if isinstance(item, PendingTensor):
            return [SetTensor(item.uid, self.tensor(item.uid, item.tensor))]
        if isinstance(item, PendingTensors):
            return list(self._tensors(item))
        if isinstance(item, PendingState):
            state = None if item.state is None else tree.pack(item.state, self._leaf, path=item.optimizer)
            return [SetState(item.optimizer, item.uid, state)]
        if isinstance(item, PendingGroups):
            hyper = tuple(tree.pack(h, path=item.optimizer) for h in item.hyper)
            return [SetGroups(item.optimizer, hyper, tuple(item.params))]
        if isinstance(item, PendingLayout):
            self._write_layout(item.layout)
            return [SetLayout(item.layout.id)]
        if isinstance(item, PendingCarry):
            return [Carry(item.kind, tuple(item.uids))]
        assert isinstance(item, PendingGrad)
        return [SetGrad(item.uid, self.tensor(item.uid, item.tensor))]

    def _leaf(self, tensor: torch.Tensor) -> Any:
        if tensor.numel() * tensor.element_size() < 256:
            return None
        ref = self.tensor(1, tensor)
        return [ref.dtype, ref.shape, ref.first, ref.num_pieces, ref.offset, ref.strides]

    def _early(self, item: PendingEarly) -> None:
        found = item.final.take(item.num_steps)
        while found is not None:
            try:
                self.sent.take(*found)
            finally:
                found = None
                item.final.put_down()
            found = item.final.take(item.num_steps)
        item.final.put_down()

    def _update(self, item: PendingUpdate) -> Update:
        if item.gather is not None:
            item.gather()
        self._coefficients.begin_update()
        grads: list[Gradient | None] = [None] * len(item.uids)
        small: dict[torch.dtype, list[int]] = {}
        for i, uid in enumerate(item.uids):
            self._meanwhile()
            item.at = i
            g = item.grads[i]
            if g is None:
                grads[i] = Gradient(uid)
            elif item.skipped:
                grads[i] = Gradient(uid, TensorRef(CODE_BY_DTYPE[g.dtype], tuple(g.shape), 0, 0))
            elif g.is_sparse:
                grads[i] = Gradient(uid, None, self._sparse(uid, g))
            elif uid in self.sent and (found := self.sent.consumed(uid, g, _bytes_of(g))) is not None:
                grads[i] = found
            elif g.numel() * g.element_size() < PACK_BELOW_BYTES:
                small.setdefault(g.dtype, []).append(i)
            elif (payload := item.payload(i)) and (found := self._reuse.gradient(uid, g, _bytes_of(g), payload)):
                grads[i] = found
            else:
                grads[i] = Gradient(uid, self.tensor(uid, g))
            g = None
        item.at = -1
        for dtype, indices in small.items():
            for i, ref in zip(indices, self._pack(dtype, item.grads, indices), strict=True):
                grads[i] = Gradient(item.uids[i], ref)
        scale = None if item.grad_scale is None else tree.pack(item.grad_scale)
        told = tuple(g for g in grads if g is not None)
        if all(coefficient_of(g) is None for g in told):
            return Update(item.optimizer, told, scale, item.skipped)
        scaled = tuple(ScaledGradient(g.uid, g.dense, g.sparse, coefficient_of(g)) for g in told)
        return ScaledUpdate(item.optimizer, scaled, scale, item.skipped)

    def _pack(self, dtype: torch.dtype, tensors: list[Any], indices: list[int]) -> list[TensorRef]:
        raw = np.concatenate([_bytes_of(tensors[i]) for i in indices])
        ordinal = self._piece(0, raw, dtype, 0)
        refs = []
        offset = 0
        code = CODE_BY_DTYPE[dtype]
        for i in indices:
            refs.append(TensorRef(code, tuple(tensors[i].shape), ordinal, 1, offset, strides_of(tensors[i])))
            offset += tensors[i].numel() * dtype.itemsize
        return refs

    def _tensors(self, item: PendingTensors) -> list[SetTensor]:
        code = CODE_BY_DTYPE[item.flat.dtype]
        flat = plain(item.flat)
        ordinal = self._piece(0, view_bytes(flat), flat.dtype, 0)
        ops = []
        offset = 0
        for uid, shape in zip(item.uids, item.shapes, strict=True):
            ref = TensorRef(code, shape, ordinal, 1, offset)
            ops.append(SetTensor(uid, ref))
            offset += ref.numel * flat.element_size()
        return ops

    def _sparse(self, uid: int, g: torch.Tensor) -> SparseRef:
        return SparseRef(
            self.tensor(uid, g._indices()), self.tensor(uid, g._values()), tuple(g.shape), g.is_coalesced()
        )

    def tensor(self, uid: int, tensor: torch.Tensor) -> TensorRef:
        """Write a dense tensor in pieces."""
        raw = _bytes_of(tensor)
        size = piece_elements(tensor.numel(), fine=self._log.fine) * tensor.element_size()
        first = -1
        count = 0
        for start in range(0, max(len(raw), 1), size):
            ordinal = self._piece(uid, raw[start : start + size], tensor.dtype, start // tensor.element_size())
            first = ordinal if first < 0 else first
            count += 1
        return TensorRef(CODE_BY_DTYPE[tensor.dtype], tuple(tensor.shape), first, count, 0, strides_of(tensor))

    def _piece(self, uid: int, raw: Bytes, dtype: torch.dtype, start: int) -> int:
        return self._write(uid, raw, dtype, start).ordinal

    def _write(self, uid: int, raw: Bytes, dtype: torch.dtype, start: int) -> Piece:
        spent = self.spent if len(raw) >= MIN_BYTES else None
        begun = (0.0, 0.0) if spent is None else (time.perf_counter(), time.thread_time())
        codec_id, version, payload = self._chooser.encode(uid + start, raw, dtype.itemsize, dtype is torch.float32)
        if spent is None:
            ordinal = self._record(uid, dtype, start, len(raw), codec_id, version, [payload])
            return Piece(ordinal, codec_id, version, payload)
        chosen = time.perf_counter(), time.thread_time()
        ordinal = self._record(uid, dtype, start, len(raw), codec_id, version, [payload])
        spent.put_s += time.perf_counter() - chosen[0]
        spent.put_cpu_s += time.thread_time() - chosen[1]
        spent.choose_s += chosen[0] - begun[0]
        spent.choose_cpu_s += chosen[1] - begun[1]
        spent.put_bytes += len(payload)
        spent.saved_bytes += len(raw) - len(payload)
        return Piece(ordinal, codec_id, version, payload)

    def _record(
        self, uid: int, dtype: torch.dtype, start: int, raw_bytes: int, codec_id: int, version: int, parts: list[Bytes]
    ) -> int:
        return self._log.data(
            parts, uid=uid, dtype=CODE_BY_DTYPE[dtype], start=start, count=raw_bytes // dtype.itemsize,
            raw_bytes=raw_bytes, codec_id=codec_id, codec_version=version,
        )  # fmt: skip


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The logical elements as bytes: in place where memory allows it, without another reference to tensor or memory.

    (A tap tells by their number whether somebody else can write to it.) The caller keeps the tensor alive.
    """
    if is_plain(tensor):
        return view_bytes(tensor, keep_alive=False)
    return view_bytes(plain(tensor))
