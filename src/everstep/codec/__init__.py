"""Codecs: pieces of tensors <-> payloads, without losing a bit. Pure: no I/O.

    raw      the bytes as they are
    sixteen  fp32 whose every value is exactly a bf16, or an fp16 times a power of two
    sparse   (index, value) of the elements that are not zero
    blocks   small codes, and a scale for each block of them

Each module's docstring specifies its payload. Lengths and checksums are the business of the format around it.
"""

from __future__ import annotations

from everstep.codec.blocks import Blocks
from everstep.codec.chooser import MIN_BYTES, Chooser
from everstep.codec.contract import BLOCKS, RAW, SIXTEEN, SPARSE, Bytes, Codec
from everstep.codec.raw import Raw
from everstep.codec.sixteen import Sixteen
from everstep.codec.sparse import Sparse
from everstep.errors import CodecError

__all__ = ["BLOCKS", "CODECS", "MIN_BYTES", "RAW", "SIXTEEN", "SPARSE", "Bytes", "Chooser", "Codec", "decode"]

CODECS: dict[tuple[int, int], Codec] = {
    (codec.id, codec.version): codec for codec in (Raw(), Sixteen(), Sparse(), Blocks())
}
"""Every codec that this version can decode, by (id, version)."""


def decode(codec: int, version: int, stored: Bytes, itemsize: int, out: Bytes) -> None:
    """Fill `out` with the bytes that `stored` stands for; raise CodecError when it stands for none."""
    found = CODECS.get((codec, version))
    if found is None:
        raise CodecError(
            f"payload of codec {codec} version {version}, which this version of Everstep does not know: "
            "upgrade everstep to read it"
        )
    found.decode(stored, itemsize, out)
