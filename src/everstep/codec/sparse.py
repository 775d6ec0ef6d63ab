"""Sparse: pieces in which most elements are zero, such as the gradient of an embedding.

Payload, version 1, little-endian:

    offset    size   field
    0         8      m, the number of elements whose bits are not all zero
    8         4·m    their indices in the piece (in elements), strictly rising
    8 + 4·m   s·m    their bytes, s = itemsize (1, 2, 4 or 8), in the same order

Every other element is all zero bits. -0.0 is not: it is kept as an element.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from everstep.codec.contract import SPARSE, Bytes
from everstep.errors import CodecError

_HEADER_BYTES = 8
_INDEX_BYTES = 4
_MAX_FRACTION = 0.9
_WORD_BY_ITEMSIZE: dict[int, npt.DTypeLike] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class Sparse:
    """Keeps the elements that are not zero, with their indices."""

    id = SPARSE
    version = 1
    name = "sparse"

    def encode(self, raw: Bytes, itemsize: int, is_float32: bool) -> Bytes | None:
        """Return the elements that are not zero, or None when that is not smaller than `raw` by a tenth."""
        word = _WORD_BY_ITEMSIZE.get(itemsize)
        if word is None or raw.size % itemsize or raw.size // itemsize > 2**32:
            return None
        words = raw.view(word)
        is_kept = words != 0
        num_kept = int(np.count_nonzero(is_kept))
        size_bytes = _HEADER_BYTES + num_kept * (_INDEX_BYTES + itemsize)
        if size_bytes > _MAX_FRACTION * raw.size:
            return None
        indices = np.flatnonzero(is_kept)
        payload = np.empty(size_bytes, np.uint8)
        payload[:_HEADER_BYTES].view("<u8")[0] = num_kept
        values_at = _HEADER_BYTES + num_kept * _INDEX_BYTES
        np.copyto(payload[_HEADER_BYTES:values_at].view("<u4"), indices, casting="unsafe")
        np.copyto(payload[values_at:].view(word), words[indices])
        return payload

    def decode(self, stored: Bytes, itemsize: int, out: Bytes) -> None:
        """Clear `out` and put the kept elements in their places."""
        indices, values = kept(stored, itemsize, out.size)
        word = _WORD_BY_ITEMSIZE[itemsize]
        out.fill(0)
        out.view(word)[indices] = values.view(word)


def kept(stored: Bytes, itemsize: int, size_bytes: int) -> tuple[npt.NDArray[np.uint32], Bytes]:
    """(indices, values as bytes) in the payload of a piece of this size; CodecError if it is none."""
    if itemsize not in _WORD_BY_ITEMSIZE or size_bytes % itemsize:
        raise CodecError(f"sparse payload: cannot stand for {size_bytes} bytes of itemsize {itemsize}")
    if stored.size < _HEADER_BYTES:
        raise CodecError(f"sparse payload: {stored.size} bytes are too few for its header")
    num_kept = int(stored[:_HEADER_BYTES].view("<u8")[0])
    expected = _HEADER_BYTES + num_kept * (_INDEX_BYTES + itemsize)
    if stored.size != expected:
        raise CodecError(f"sparse payload: {stored.size} bytes, {expected} needed for {num_kept} items")
    values_at = _HEADER_BYTES + num_kept * _INDEX_BYTES
    indices = stored[_HEADER_BYTES:values_at].view("<u4")
    if num_kept and (int(indices[-1]) >= size_bytes // itemsize or not np.all(indices[1:] > indices[:-1])):
        raise CodecError(f"sparse payload: indices do not rise within a piece of {size_bytes // itemsize} elements")
    return indices, stored[values_at:]
