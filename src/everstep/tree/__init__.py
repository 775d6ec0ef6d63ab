"""Nested state of schedulers, samplers and optimizers <-> plain values that MessagePack can hold. No pickle.

`pack` makes plain values, `unpack` brings the originals back with their types and bits, `freeze` copies a
state so that another thread may pack it later. What they know is listed here; all else is refused, by path.

Plain are None, bool, float, str, bytes, int of 64 bits, list and dict with str keys: each stands for itself.
Everything else is a dict with the key "$", which says what it is; a user's own dict with such a key is
written as pairs. Shapes and strides are lists of int, in elements; numbers are little-endian.

    {"$": "int", "v": bytes}                        int beyond 64 bits, two's complement
    {"$": "str", "v": bytes}                        str with lone surrogates, as UTF-8 would write them
    {"$": "complex", "v": [real, imag]}
    {"$": "tuple" | "size", "v": [item, ...]}
    {"$": "dict" | "counter" | "ordered", "v": [key, value, key, value, ...]}
    {"$": "default", "v": [key, value, ...], "f": name of the default factory, or None}
    {"$": "dtype" | "device", "v": name}            of torch
    {"$": "tensor", "t": dtype, "s": shape, "b": bytes in the order of memory}
                                                    and "st": strides, unless they are those of C
    {"$": "ref", "v": anything}                     a tensor that is stored elsewhere, by what `put` returned
    {"$": "coo", "s": shape, "c": is_coalesced, "i": tensor, "v": tensor}
    {"$": "array", "t": numpy dtype, "s": shape, "b": bytes, "o": "C" | "F"}
    {"$": "scalar", "t": numpy type, "b": bytes}    str_ and bytes_ have "v": str or bytes instead of "b"

Tensors come back on the CPU, as plain tensors that need no gradient. A view with gaps or overlaps comes back
dense, as clone() would make it. Objects that were shared come back apart.
"""

from __future__ import annotations

from everstep.tree.freezing import freeze
from everstep.tree.packing import pack
from everstep.tree.text import from_text, plain_from_text, plain_to_text, to_text
from everstep.tree.unpacking import unpack

__all__ = ["freeze", "from_text", "pack", "plain_from_text", "plain_to_text", "to_text", "unpack"]
