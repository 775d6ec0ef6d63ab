"""Which codec a piece gets: a look at a few elements, then a full try only where that promises something.

Most gradients are dense fp32 and stay raw, so the cost that counts is that of saying no: one sample of some
microseconds, and for a tensor that keeps saying no, not even that on most calls. The limits below hold each
choice to less time than writing the bytes it saves would take at 1 GB/s.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from everstep.codec.contract import Bytes, Codec
from everstep.codec.raw import Raw
from everstep.codec.sixteen import BF16, FP16, Sixteen, flavour_of
from everstep.codec.sparse import Sparse

MIN_BYTES = 64 * 1024
"""Smaller pieces stay raw: a saving would be shorter than the calls that make it."""
_MIN_FP16_BYTES = 512 * 1024
"""Below that the calls take longer than they are worth. (Most fine pieces are larger.)"""
_SAMPLE_ELEMENTS = 256
_RAWS_BEFORE_SKIPPING = 4
_SKIPS_AFTER_RAWS = 15
_SKIPS_AFTER_FAILED_TRY = 63
# The share of non-zero elements up to which finding them takes less time than writing what is saved.
_MAX_DENSITY_BY_ITEMSIZE = {1: 0.015, 2: 0.04, 4: 0.24, 8: 0.35}
_SAMPLE_WORD_BY_ITEMSIZE: dict[int, npt.DTypeLike] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_SPARSE_FIRST_BELOW = 0.2  # of the elements; with more of them, sixteen bits each are as small and quicker

_RAW, _SIXTEEN, _SPARSE = Raw(), Sixteen(), Sparse()


class Chooser:
    """Chooses per tensor; remembers what each tensor was like so that choosing costs less than it saves.

    One Chooser belongs to one thread. What it remembers changes which codec is chosen, never what comes back.
    """

    def __init__(self) -> None:
        self._tries = True
        self._raws_in_a_row: dict[int, int] = {}
        self._skips_left: dict[int, int] = {}

    def try_codecs(self, tries: bool) -> None:
        """Choose from here on, or leave all raw. What was known of tensors before a time without choosing is forgotten."""
        if tries and not self._tries:
            self._raws_in_a_row, self._skips_left = {}, {}
        self._tries = tries

    def encode(self, key: int, raw: Bytes, itemsize: int, is_float32: bool) -> tuple[int, int, Bytes]:
        """Return (codec id, codec version, payload) for a piece of the tensor that `key` names.

        `raw` is only read. Of the raw codec the payload is `raw` itself, uncopied; of the others it is new.
        """
        if raw.size < MIN_BYTES or not self._tries:
            return _RAW.id, _RAW.version, raw
        skips_left = self._skips_left.get(key, 0)
        if skips_left:
            self._skips_left[key] = skips_left - 1
            return _RAW.id, _RAW.version, raw
        candidates = _promising(raw, itemsize, is_float32)
        for codec in candidates:
            payload = codec.encode(raw, itemsize, is_float32)
            if payload is not None:
                self._raws_in_a_row.pop(key, None)
                return codec.id, codec.version, payload
        raws = self._raws_in_a_row.get(key, 0) + 1
        self._raws_in_a_row[key] = raws
        if candidates:
            self._skips_left[key] = _SKIPS_AFTER_FAILED_TRY
        elif raws >= _RAWS_BEFORE_SKIPPING:
            self._skips_left[key] = _SKIPS_AFTER_RAWS
        return _RAW.id, _RAW.version, raw


def _promising(raw: Bytes, itemsize: int, is_float32: bool) -> list[Codec]:
    """Return the codecs worth a full try, the one that promises most first, from a sample of the elements."""
    word = _SAMPLE_WORD_BY_ITEMSIZE.get(itemsize)
    if word is None or raw.size % itemsize:
        return []
    words = raw.view(word)
    stride = (words.size // _SAMPLE_ELEMENTS) | 1  # odd, so as not to walk down one column of a matrix
    sample = words[::stride].copy()
    density = np.count_nonzero(sample) / sample.size
    candidates: list[Codec] = []
    if density <= _MAX_DENSITY_BY_ITEMSIZE[itemsize]:
        candidates.append(_SPARSE)
    flavour = flavour_of(sample) if is_float32 else None
    if flavour == BF16 or (flavour == FP16 and raw.size >= _MIN_FP16_BYTES):
        candidates.insert(0 if density > _SPARSE_FIRST_BELOW else len(candidates), _SIXTEEN)
    return candidates
