"""A frame: what turns S(t-1) into S(t). Ordered operations, a cursor, an audit. Pure.

Tensor bytes are not in these structures; a TensorRef says which records of the frame hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from everstep.memory import Scratch


class TensorRef(msgspec.Struct, array_like=True, frozen=True):
    """Where the elements of one dense tensor are: `num_pieces` records from ordinal `first` on.

    Several small tensors may share one record; then num_pieces is 1 and `offset` is this one's first byte in it.
    """

    dtype: int
    shape: tuple[int, ...]
    first: int
    num_pieces: int
    offset: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n


class SparseRef(msgspec.Struct, array_like=True, frozen=True):
    """A sparse COO tensor exactly as it was: not coalesced if it was not."""

    indices: TensorRef
    values: TensorRef
    shape: tuple[int, ...]
    is_coalesced: bool


class Gradient(msgspec.Struct, array_like=True, frozen=True):
    """A parameter's gradient as consumed; both refs None: the optimizer saw no gradient for it."""

    uid: int
    dense: TensorRef | None = None
    sparse: SparseRef | None = None


class ScaledGradient(Gradient, array_like=True, frozen=True):
    """One that may have left before it was scaled: what was consumed is `coefficient` times its elements (None: once)."""

    coefficient: float | None = None


def coefficient_of(gradient: Gradient) -> float | None:
    """What the elements in the log are multiplied by to be what the optimizer consumed; None: they are that."""
    return gradient.coefficient if isinstance(gradient, ScaledGradient) else None


class Update(msgspec.Struct, tag="update", array_like=True, frozen=True):
    """One optimizer.step()."""

    optimizer: str
    grads: tuple[Gradient, ...]
    grad_scale: Any = None
    """As the fused kernel saw it (a packed tensor), when the gradients above are still scaled."""
    skipped: bool = False
    """found_inf was set: the kernel changed nothing but may have created state; `grads` then hold no bytes."""


class ScaledUpdate(Update, tag="scaled", array_like=True, frozen=True):
    """An update with gradients that are to be multiplied. (Another tag: who does not know it must not take it for one
    without.)"""

    grads: tuple[ScaledGradient, ...]


class SetTensor(msgspec.Struct, tag="tensor", array_like=True, frozen=True):
    """A parameter or buffer has these values now."""

    uid: int
    ref: TensorRef


class SetState(msgspec.Struct, tag="state", array_like=True, frozen=True):
    """One parameter's optimizer state is exactly this now; None: it has none."""

    optimizer: str
    uid: int
    state: Any
    """tree.pack of the dict; dense tensors as TensorRefs."""


class SetGroups(msgspec.Struct, tag="groups", array_like=True, frozen=True):
    """Parameter groups from here on."""

    optimizer: str
    hyper: tuple[Any, ...]
    """tree.pack of each group without `params`."""
    params: tuple[tuple[int, ...], ...]


class SetLayout(msgspec.Struct, tag="layout", array_like=True, frozen=True):
    """Atoms from here on; atoms that are not in it are gone, new ones are set by operations that follow."""

    layout: str


class Carry(msgspec.Struct, tag="carry", array_like=True, frozen=True):
    """Gradients that were still on these parameters at the commit and that the next backward will add to.

    kind `consumed`: the bits of the last Update; `zero`: all zero; `none`: nothing any more; `lost`: there were some, but
    they had been added to before they could be stored, or are sparse.
    """

    kind: str
    uids: tuple[int, ...]


class SetGrad(msgspec.Struct, tag="grad", array_like=True, frozen=True):
    """A gradient that was on this parameter at the commit, differing from what was consumed."""

    uid: int
    ref: TensorRef


Op = Update | ScaledUpdate | SetTensor | SetState | SetGroups | SetLayout | Carry | SetGrad

AUDIT_DTYPE = np.dtype([("uid", "<u8"), ("piece", "<u4"), ("pad", "<u4"), ("hash", "<u8")])


class Footer(msgspec.Struct, omit_defaults=True):
    """The frame's last record: with it the frame is valid, without it absent."""

    num_records: int
    """Records of the frame before this one."""
    ops: tuple[Op, ...]
    directory: bytes
    """The headers of those records, in order."""
    previous: int
    """Payload checksum of the footer before (0 for the first frame of a generation)."""
    durable_step: int
    """Every step up to this one was on stable storage when this was written; -1: none."""
    num_ranks: int = 1
    audit: bytes = b""
    """AUDIT_DTYPE entries: hashes of pieces of S(step)."""
    audit_complete: bool = False
    """Whether the audit covers every piece of parameters, buffers and optimizer state."""
    wall_time_ns: int = 0
    replicas: bytes = b""
    """AUDIT_DTYPE entries: hashes of pieces of parameters that this rank holds and another one stores."""
    fine: bool = False
    """Whether hashes are of fine pieces."""


def audit_entries(footer: Footer) -> npt.NDArray[Any]:
    """The audit as a structured array."""
    return audit_of(footer.audit)


def audit_of(data: bytes) -> npt.NDArray[Any]:
    return np.frombuffer(data, AUDIT_DTYPE)


Wanted = tuple[TensorRef, int, int]


class FrameData(Protocol):
    """A frame that can be folded: from disk, from memory, from the wire."""

    @property
    def step(self) -> int: ...

    @property
    def ops(self) -> tuple[Op, ...]: ...

    def read(
        self, wanted: Sequence[Wanted], scratch: Scratch | None = None, *, sparse: bool = False
    ) -> list[torch.Tensor]:
        """For each (ref, start, stop) its logical elements [start, stop) as a 1-D tensor.

        The caller owns them; with `scratch`, until it is reset. `sparse`: where most are zero, perhaps a sparse tensor with
        all that are not, which has been coalesced.
        """
        ...

    def begin(
        self, wanted: Sequence[Wanted], scratch: Scratch, *, sparse: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        """read() that goes on in the background where it can; the same thread calls the result."""
        ...

    def piece_elements(self, ref: TensorRef) -> int:
        """How many elements of a dense tensor can be read at a time without reading others along with them."""
        ...
