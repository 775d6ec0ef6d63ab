"""The pool's format: a reader written from docs/format.md alone, a golden file, and headers that must not count."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import CorruptionError
from everstep.format.documents import SlotDocument, StoredOptimizer
from everstep.format.pool import BLOCK, Geometry, Header, pack_header, pack_superblock, unpack_header, unpack_superblock
from everstep.store.pool import read_pool
from pools import LARGE, commit, create, read_back

GOLDEN = Path(__file__).resolve().parent / "data" / "v1" / "pool"


# -- a second reader --------------------------------------------------------------------------------------------------


def xxh3(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed % 2**64)


def document(data: bytes) -> dict[str, Any]:
    body = data[34:-2]
    assert data == b'{"xxh3":"%016x","body":%s}\n' % (xxh3(body), body)
    return json.loads(body)


def spec_read(path: Path) -> list[dict[str, Any]]:
    """The committed slots, newest first, by the specification alone: no code of Everstep."""
    data = path.read_bytes()
    magic, major, _, run, pool, rank, num_slots, *places, told = struct.unpack_from("<8sII16s16sII6Q16xQ", data)
    assert magic == b"EVSPOOL1" and major == 1 and told == xxh3(data[:120])
    document_at, document_bytes, headers_at, header_bytes, data_at, slot_bytes = places
    assert len(data) >= data_at + num_slots * slot_bytes
    tensors = document(data[document_at : document_at + document_bytes])["tensors"]
    found = []
    for slot in range(num_slots):
        head = data[headers_at + slot * header_bytes :][:header_bytes]
        magic, step, timeline, generation, number, num_sums, num_bytes, body_sum, commit_word = struct.unpack_from(
            "<8sQQQIIQ64xQQ", head
        )
        seed = xxh3(b"everstep pool" + run + pool + struct.pack("<QQQ", rank, slot, generation))
        body = head[128 : 128 + 8 * num_sums + num_bytes]
        if (magic, number) != (b"EVSSLOT1", slot) or (xxh3(head[:120], seed), xxh3(body, seed)) != (commit_word, body_sum):
            continue
        sums = list(struct.unpack_from(f"<{num_sums}Q", body))
        values = {}
        for tensor in tensors:
            size = tensor["num_bytes"] // max(1, int(np.prod(tensor["shape"])))
            raw = data[data_at + slot * slot_bytes + tensor["offset"] :][: tensor["num_bytes"]]
            for first in range(0, max(1, len(raw)), (size or 1) << 19):
                part = raw[first : first + (size << 19)]
                assert sums.pop(0) == xxh3(part, tensor["uid"] + (first // size if size else 0))
            values[tensor["key"]] = [tensor["dtype"], tensor["shape"], f"{xxh3(raw):016x}"]
        assert not sums
        slot_document = document(body[8 * num_sums :])
        found.append({
            "run": run.hex(), "step": step, "timeline": timeline, "generation": generation,
            "cursor": base64.b64decode(slot_document["cursor"]).decode(), "tensors": values,
        })  # fmt: skip
    return sorted(found, key=lambda each: (each["generation"], each["step"]), reverse=True)


def test_a_reader_written_from_the_specification_finds_every_bit_of_the_golden_pool() -> None:
    assert spec_read(GOLDEN / "golden") == [json.loads((GOLDEN / "expected.json").read_text())]


def test_this_version_finds_every_bit_of_the_golden_pool() -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    (manifest,) = read_pool(str(GOLDEN / "golden"), expected["run"])
    assert (manifest.step, manifest.timeline, manifest.generation) == (3, 1, 2)
    assert base64.b64decode(manifest.cursor).decode() == expected["cursor"]
    assert manifest.layout.atoms[0].name == "w" and manifest.carried == ((1, -1),)
    found = read_back(str(GOLDEN), manifest)
    values = {
        t.key: [t.dtype, list(t.shape), f"{xxh3(raw.tobytes()):016x}"]
        for t, raw in zip(manifest.tensors, found, strict=True)
    }
    assert values == expected["tensors"]


def test_the_reader_finds_what_was_written_today(tmp_path: Path) -> None:
    pool = create(str(tmp_path), slots=LARGE)
    for step in range(1, 5):
        commit(pool, step, LARGE)
    pool.close()
    assert [each["step"] for each in spec_read(tmp_path / "pool")] == [4, 3, 2]


# -- round trips ------------------------------------------------------------------------------------------------------

numbers = st.integers(0, 2**64 - 1)
uuids = st.binary(min_size=16, max_size=16).map(bytes.hex)
geometries = st.builds(
    Geometry, uuids, uuids, st.integers(0, 2**32 - 1), st.integers(1, 9), document_bytes=st.integers(0, 10**7),
    header_bytes=st.integers(4, 20).map(lambda n: n * BLOCK), slot_bytes=st.integers(1, 2**30).map(lambda n: n * BLOCK),
)  # fmt: skip
optimizers = st.builds(StoredOptimizer, st.text(max_size=9), st.just(((1, 2**64 - 1), ())), st.just("h"), st.just("s"))
headers = st.builds(
    Header, step=numbers, timeline=numbers, generation=numbers, sums=st.lists(numbers, max_size=20).map(tuple),
    document=st.builds(
        SlotDocument, st.lists(optimizers, max_size=2).map(tuple), st.text(max_size=99), st.just(((1, -1),)), st.just(""),
        st.dictionaries(st.sampled_from("ab"), st.booleans()),
    ),
)  # fmt: skip


@given(geometries)
def test_a_superblock_says_what_it_was_told(geometry: Geometry) -> None:
    assert unpack_superblock(pack_superblock(geometry) + bytes(100), "here") == geometry


@given(geometries, st.data())
def test_a_changed_superblock_is_refused(geometry: Geometry, data: st.DataObject) -> None:
    raw = bytearray(pack_superblock(geometry))
    raw[data.draw(st.integers(0, 127))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptionError, match="here"):
        unpack_superblock(bytes(raw), "here")


@settings(max_examples=60)
@given(geometries, headers, st.data())
def test_a_header_says_what_it_was_told_and_nothing_in_another_place(
    geometry: Geometry, header: Header, data: st.DataObject
) -> None:
    slot = data.draw(st.integers(0, geometry.num_slots - 1))
    raw = pack_header(geometry, slot, header) + bytes(50)
    assert unpack_header(geometry, slot, raw, "here") == header
    other = data.draw(uuids)
    for elsewhere, at in (
        (geometry, slot + 1), (replace(geometry, run=other), slot), (replace(geometry, pool=other), slot),
        (replace(geometry, rank=geometry.rank + 1), slot),
    ):  # fmt: skip
        assert (elsewhere == geometry and at == slot) or unpack_header(elsewhere, at, raw, "here") is None


@settings(max_examples=100)
@given(geometries, headers, headers, st.data())
def test_a_header_that_is_torn_does_not_count(
    geometry: Geometry, header: Header, before: Header, data: st.DataObject
) -> None:
    """Any words of the new one over the old one, over the one that was made invalid, or over nothing."""
    new, old = pack_header(geometry, 0, header), pack_header(geometry, 0, before)
    size = max(len(new), len(old))
    below = data.draw(st.sampled_from([old, bytes(128) + old[128:], bytes(size)])).ljust(size, b"\0")
    torn = bytearray(below)
    unit = data.draw(st.sampled_from([8, 64, 512]))
    for at in range(0, len(new), unit):
        if data.draw(st.booleans()):
            torn[at : min(at + unit, len(new))] = new[at : at + unit]
    found = unpack_header(geometry, 0, bytes(torn), "here")
    assert found is None or (found == header and torn[: len(new)] == new) or (found == before and torn[: len(old)] == old)
