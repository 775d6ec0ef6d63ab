"""docs/format.md is enough to write a reader: here is one, and it reads the golden runs and today's.

`SpecReader` uses struct, json, MessagePack, xxhash and numpy, and nothing of Everstep. Where it and the specification
differ, one of them is wrong. Golden files of every format version are kept for ever.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everstep
from everstep import atoms
from everstep.atoms import Layout
from support import crash

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "v1"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())

PIECE = 1 << 19
BLOCK = 4096
MASK = (1 << 64) - 1
DTYPES = {1: "<f4", 2: "<f8", 3: "<f2", 4: "<u2", 5: "<i1", 6: "<u1", 7: "<i2", 8: "<i4", 9: "<i8", 10: "<u1", 11: "<c8"}
DTYPE_NAMES = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "uint8": "<u1"}
SEGMENT, DATA, CURSOR, FOOTER, END = 1, 2, 3, 4, 5
FIELDS = (
    "type", "flags", "codec", "codec_version", "generation", "ordinal", "step", "uid", "box", "dtype", "zero", "start",
    "count", "raw_bytes", "stored_bytes", "sum",
)  # fmt: skip


class DamagedError(Exception):
    """Bytes that are not what a writer wrote."""


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def xxh3(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed & MASK)


def packed(text: str) -> Any:
    return msgspec.msgpack.decode(base64.b64decode(text))


def read_document(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    body = data[len('{"xxh3":"0123456789abcdef","body":') : -2]
    if data != b'{"xxh3":"%016x","body":%s}\n' % (xxh3(body), body):
        raise DamagedError(path)
    return json.loads(body)


class Segment:
    """Frames of one log file: everything before the first byte that is not valid."""

    def __init__(self, path: Path, run: str, rank: int = 0) -> None:
        generation, first_step = map(int, re.fullmatch(r"g(\d{6,})-(\d{12,})\.frames", path.name).groups())
        self.generation = generation
        self.data = path.read_bytes()
        self.seed = xxh3(b"everstep" + bytes.fromhex(run) + struct.pack("<QQQ", generation, rank, first_step))
        self.frames: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        header = self.header(0)
        if header is None or header["type"] != SEGMENT:
            raise DamagedError(path)
        self.head = msgspec.msgpack.decode(self.payload(header))
        assert (self.head["run"], self.head["generation"], self.head["first_step"]) == (run, generation, first_step)
        self._walk(up(header["next"], BLOCK))

    def header(self, at: int) -> dict[str, Any] | None:
        raw = self.data[at : at + 128]
        if len(raw) < 128 or raw[:4] != b"EVR1" or xxh3(raw[:120], self.seed + at) != struct.unpack_from("<Q", raw, 120)[0]:
            return None
        found = dict(zip(FIELDS, struct.unpack_from("<BBBBIIQQIHHQQQQQ", raw, 4), strict=True))
        return {**found, "at": at, "next": at + up(128 + found["stored_bytes"], 64), "bytes": raw}

    def payload(self, header: dict[str, Any]) -> bytes:
        at = header["at"]
        stored = self.data[at + 128 : at + 128 + header["stored_bytes"]]
        if len(stored) != header["stored_bytes"] or xxh3(stored, self.seed + at) != header["sum"]:
            raise DamagedError(f"payload at {at}")
        return stored

    def _walk(self, at: int) -> None:
        records: list[dict[str, Any]] = []
        while (header := self.header(at)) is not None:
            if header["type"] == END:
                self.end = msgspec.msgpack.decode(self.payload(header))
                return
            assert header["ordinal"] == len(records)
            at = header["next"]
            if header["type"] != FOOTER:
                records.append(header)
                continue
            footer = msgspec.msgpack.decode(self.payload(header))
            assert footer["num_records"] == len(records)
            assert footer["directory"] == b"".join(r["bytes"] for r in records)
            if self.frames:
                assert footer["previous"] == self.frames[-1]["sum"]
            frame = {"step": header["step"], "records": records, "footer": footer, "sum": header["sum"], "segment": self}
            self.frames.append(frame)
            records, at = [], up(at, BLOCK)

    def piece(self, header: dict[str, Any]) -> bytes:
        """The raw bytes of a DATA record."""
        stored, size = self.payload(header), np.dtype(DTYPES[header["dtype"]]).itemsize
        codec = header["codec"], header["codec_version"]
        if codec == (0, 1):
            raw = stored
        elif codec == (1, 1):
            flavour, exponent = stored[0], int.from_bytes(stored[1:2], "little", signed=True)
            words = np.frombuffer(stored, "<u2", offset=4)
            if flavour == 1:
                raw = (words.astype("<u4") << 16).tobytes()
            else:
                raw = (words.view("<f2").astype("<f4") * np.float32(2.0**exponent)).tobytes()
        elif codec == (2, 1):
            kept = struct.unpack_from("<Q", stored)[0]
            indices = np.frombuffer(stored, "<u4", kept, 8)
            out = np.zeros((header["raw_bytes"] // size, size), np.uint8)
            out[indices] = np.frombuffer(stored, np.uint8, offset=8 + 4 * kept).reshape(kept, size)
            raw = out.tobytes()
        elif codec == (3, 1):
            block, bits, num = struct.unpack_from("<I", stored)[0], stored[4], header["count"]
            scales_end = 8 + 2 * -(-num // block)
            scales = (np.frombuffer(stored[8:scales_end], "<u2").astype("<u4") << 16).view("<f4")
            codes = np.frombuffer(stored[scales_end:], np.int8)
            if bits == 4:
                codes = np.stack([codes << 4 >> 4, codes >> 4], axis=1).reshape(-1)
            raw = (codes[:num] * scales[np.arange(num) // block]).astype("<f4").tobytes()
        else:
            raise DamagedError(f"unknown codec {codec}")
        assert len(raw) == header["raw_bytes"] == header["count"] * size
        return raw


def tensor(frame: dict[str, Any], ref: list[Any]) -> np.ndarray:
    """The elements a TensorRef stands for, in logical order."""
    dtype, shape, first, num_pieces, offset = ref[:5]
    kind = np.dtype(DTYPES[dtype])
    raw = b"".join(frame["segment"].piece(frame["records"][i]) for i in range(first, first + num_pieces))
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(raw[offset : offset + size], kind).reshape(shape)


def piece_elements(n: int, fine: bool) -> int:
    if not fine:
        return PIECE
    k = 0 if n <= 1 << 16 else 1 if n < 1 << 18 else math.floor(math.log2(n // (1 << 17)))
    return max(64, 64 * -(-n // (64 << k)))


def unpack(plain: Any, get: Any = None) -> Any:
    """Tagged values. Those that a reader of states needs; containers that differ in type only become list or dict."""
    if isinstance(plain, list):
        return [unpack(v, get) for v in plain]
    if not isinstance(plain, dict):
        return plain
    if "$" not in plain:
        return {k: unpack(v, get) for k, v in plain.items()}
    tag, v = plain["$"], plain.get("v")
    if tag in ("tuple", "size", "complex"):
        return tuple(unpack(v, get))
    if tag in ("dict", "counter", "ordered", "default"):
        items = unpack(v, get)
        return dict(zip(items[::2], items[1::2], strict=True))
    if tag == "int":
        return int.from_bytes(v, "little", signed=True)
    if tag == "tensor":
        assert "st" not in plain
        return np.frombuffer(plain["b"], DTYPE_NAMES[plain["t"]]).reshape(plain["s"])
    if tag == "array":
        return np.frombuffer(plain["b"], plain["t"]).reshape(plain["s"], order=plain["o"])
    if tag == "ref":
        return get(v)
    raise DamagedError(f"unknown tag {tag}")


class SpecReader:
    """A run, read from nothing but its files."""

    def __init__(self, run: Path, timeline: int | None = None) -> None:
        self.run = read_document(run / "run.json")
        assert self.run["format"][0] == 1
        assert set(self.run["incompatible"]) <= {"fine-pieces"}
        self.layouts: dict[str, Any] = {}
        generations, bases, segments = {}, [], []
        for folder in sorted((run / "timelines").iterdir()):
            for file in (folder / "generations").glob("*.json"):
                document = read_document(file)
                generations[document["generation"]] = document
            for file in (folder / "layouts").glob("*.json"):
                self.layouts[file.stem] = read_document(file)
            bases += [(f.parent, read_document(f)) for f in (folder / "bases").glob("*/manifest.json")]
            segments += [Segment(f, self.run["run"]) for f in sorted((folder / "log/rank-00000").glob("*.frames"))]
        mine = [g for g, d in generations.items() if timeline in (None, d["timeline"])]
        document, high = generations[max(mine)], 1 << 62
        self.bases: dict[int, tuple[Path, dict[str, Any]]] = {}
        self.frames: dict[int, dict[str, Any]] = {}
        while document is not None:
            number, low = document["generation"], document["resume_step"]
            for folder, manifest in bases:
                if manifest["generation"] == number and low <= manifest["step"] <= high:
                    self.bases.setdefault(manifest["step"], (folder, manifest))
            for segment in segments:
                for frame in segment.frames if segment.generation == number else ():
                    if low < frame["step"] <= high:
                        self.frames[frame["step"]] = frame
            high = min(high, low)
            document = generations.get(document["parent"])

    def steps(self) -> list[int]:
        found = set(self.bases)
        for step in self.bases:
            while step + 1 in self.frames:
                step += 1
                found.add(step)
        return sorted(found)

    def state(self, step: int) -> dict[str, Any]:
        base = max(b for b in self.bases if b <= step)
        state = self.load_base(base)
        for n in range(base + 1, step + 1):
            self.fold(state, self.frames[n])
            self.audit(state, self.frames[n]["footer"])
        return state

    def load_base(self, step: int) -> dict[str, Any]:
        folder, manifest = self.bases[step]
        tensors = []
        for stored in manifest["tensors"]:
            data = (folder / f"rank-{stored.get('rank', 0):05d}.safetensors").read_bytes()
            raw = data[stored["offset"] : stored["offset"] + stored["num_bytes"]]
            kind = np.dtype(DTYPE_NAMES[stored["dtype"]])
            count = piece_elements(len(raw) // kind.itemsize, stored.get("fine", False))
            size = count * kind.itemsize
            pieces = [raw[i : i + size] for i in range(0, max(len(raw), 1), size)]
            if [xxh3(p, stored["uid"] + i * count) for i, p in enumerate(pieces)] != stored["sums"]:
                raise DamagedError(stored["key"])
            tensors.append(np.frombuffer(raw, kind).reshape(stored["shape"]).copy())
        optimizers = {
            o["name"]: {
                "groups": [unpack(h) for h in packed(o["hyper"])],
                "params": o["params"],
                "state": {uid: unpack(s, lambda i: tensors[i]) for uid, s in packed(o["state"])},
            }
            for o in manifest["optimizers"]
        }
        atoms = {t["uid"]: v for t, v in zip(manifest["tensors"], tensors, strict=True) if t["role"] != "state"}
        return {
            "atoms": {u: v for u, v in atoms.items() if u in {a["uid"] for a in manifest["layout"]["atoms"]}},
            "optimizers": optimizers,
            "layout": manifest["layout"],
            "carried": {u: np.zeros_like(atoms[u]) if i < 0 else tensors[i] for u, i in manifest["carried"] if i > -2},
            "cursor": unpack(packed(manifest["cursor"])),
        }

    def fold(self, state: dict[str, Any], frame: dict[str, Any]) -> None:
        consumed: dict[int, Any] = {}
        for kind, *op in frame["footer"]["ops"]:
            if kind in ("update", "scaled"):
                assert not op[3]
                sgd(state, frame, *op[:2], consumed)
            elif kind == "tensor":
                state["atoms"][op[0]] = tensor(frame, op[1]).copy()
            elif kind == "state":
                values = None if op[2] is None else unpack(op[2], lambda ref: tensor(frame, ref).copy())
                state["optimizers"][op[0]]["state"].pop(op[1], None)
                if values is not None:
                    state["optimizers"][op[0]]["state"][op[1]] = values
            elif kind == "groups":
                state["optimizers"][op[0]].update(groups=[unpack(h) for h in op[1]], params=op[2])
            elif kind == "layout":
                self.set_layout(state, op[0])
            elif kind == "carry":
                for uid in op[1]:
                    state["carried"].pop(uid, None)
                    if op[0] not in ("none", "lost"):
                        state["carried"][uid] = {"zero": np.zeros_like(state["atoms"][uid])}.get(op[0], consumed.get(uid))
            elif kind == "grad":
                state["carried"][op[0]] = tensor(frame, op[1])
            else:
                raise DamagedError(f"unknown operation {kind}")
        cursor = frame["records"][-1]
        assert cursor["type"] == CURSOR
        state["cursor"] = unpack(msgspec.msgpack.decode(frame["segment"].payload(cursor)))

    def set_layout(self, state: dict[str, Any], layout: str) -> None:
        state["layout"] = self.layouts[layout]
        uids = {a["uid"] for a in state["layout"]["atoms"]}
        for group in (state["atoms"], state["carried"], *(o["state"] for o in state["optimizers"].values())):
            for uid in [u for u in group if u not in uids]:
                del group[uid]

    def audit(self, state: dict[str, Any], footer: dict[str, Any]) -> None:
        known = dict(state["atoms"])
        for name, optimizer in state["optimizers"].items():
            for uid, values in optimizer["state"].items():
                for key, value in values.items():
                    if isinstance(value, np.ndarray):
                        known[xxh3(f"state\0{name}\0{uid:016x}\0{key}".encode()) or 1] = value
        for uid, piece, _, expected in struct.iter_unpack("<QIIQ", footer.get("audit", b"")):
            raw = known[uid].tobytes()
            count = piece_elements(known[uid].size, footer.get("fine", False))
            size = count * known[uid].itemsize
            if xxh3(raw[piece * size : (piece + 1) * size], uid + piece * count) != expected:
                raise DamagedError(f"audit of {uid:016x}, piece {piece}")

    def named(self, state: dict[str, Any]) -> dict[str, np.ndarray]:
        """Values by name, tied weights under each of theirs."""
        return {n: state["atoms"][a["uid"]] for a in state["layout"]["atoms"] for n in (a["name"], *a.get("aliases", ()))}


def sgd(state: dict[str, Any], frame: dict[str, Any], name: str, grads: list[Any], consumed: dict[int, Any]) -> None:
    """torch.optim.SGD by hand, for hyperparameters that are powers of two: no operation rounds but the additions."""
    optimizer = state["optimizers"][name]
    by_uid = {g[0]: g for g in grads}
    for group, uids in zip(optimizer["groups"], optimizer["params"], strict=True):
        assert not any(group[k] for k in ("weight_decay", "dampening", "nesterov", "maximize"))
        lr, momentum = np.float32(group["lr"]), np.float32(group["momentum"])
        for uid in uids:
            _, dense, sparse, *coefficient = by_uid[uid]
            assert sparse is None
            if dense is None:
                continue
            grad = tensor(frame, dense)
            if coefficient and coefficient[0] is not None:
                grad = grad * np.float32(coefficient[0])
            consumed[uid] = grad
            values = optimizer["state"].setdefault(uid, {})
            if momentum:
                old = values.get("momentum_buffer")
                values["momentum_buffer"] = grad = grad.copy() if old is None else old * momentum + grad
            else:
                values["momentum_buffer"] = None
            state["atoms"][uid] = state["atoms"][uid] - lr * grad


def value(array: np.ndarray) -> list[Any]:
    return [array.dtype.name, list(array.shape), xxhash.xxh3_64_hexdigest(array.tobytes())]


def check(reader: SpecReader, step: int, expected: dict[str, Any]) -> None:
    state = reader.state(step)
    names = {a["uid"]: a["name"] for a in state["layout"]["atoms"]}
    assert {n: value(v) for n, v in reader.named(state).items()} == expected["model"]
    found = {
        names[u]: value(s["momentum_buffer"])
        for u, s in state["optimizers"]["optimizer"]["state"].items()
        if s["momentum_buffer"] is not None
    }
    assert found == expected["momentum"]
    assert [g["lr"] for g in state["optimizers"]["optimizer"]["groups"]] == expected["lr"]
    notes = state["cursor"]["extras"]["notes"]
    assert notes["step"] == expected["extra_step"]
    assert (notes["milestones"], notes["big"], notes["none"]) == ({30: 1, 60: 2}, 2**70, None)
    assert notes["array"].tolist() == [0, 1, 2]
    assert notes["half"].tolist() == [1.5, -2.0]
    assert xxhash.xxh3_64_hexdigest(state["cursor"]["rng"]["torch"].tobytes()) == expected["torch_rng"]


@pytest.mark.parametrize("run", ["plain", "forked", "quantized", "fine"])
def test_a_reader_written_from_the_specification_finds_every_bit_of_the_golden_runs(run: str) -> None:
    reader = SpecReader(GOLDEN / run)
    assert reader.steps() == EXPECTED[run]["steps"]
    assert reader.steps()[-1] == EXPECTED[run]["latest"]
    for step, expected in EXPECTED[run]["states"].items():
        check(reader, int(step), expected)


@pytest.mark.parametrize("run", ["plain", "forked", "quantized", "fine"])
def test_this_version_finds_every_bit_of_the_golden_runs(run: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / run, tmp_path / run)
    history = everstep.open(tmp_path / run)
    assert history.steps == EXPECTED[run]["steps"]
    for step, expected in EXPECTED[run]["states"].items():
        state = history.state(int(step))
        assert {n: value(t.numpy()) for n, t in state["model"].items()} == expected["model"]
        moments = {
            n: value(s["momentum_buffer"].numpy())
            for n, s in state["optimizer"]["state"].items()
            if s.get("momentum_buffer") is not None
        }
        assert moments == expected["momentum"]
        assert [g["lr"] for g in state["optimizer"]["param_groups"]] == expected["lr"]
        assert state["extras"]["notes"]["step"] == expected["extra_step"]
        assert state["extras"]["notes"]["big"] == 2**70
    assert history.verify(deep=True).ok


def test_the_step_that_a_fork_replaced_is_still_there() -> None:
    abandoned = EXPECTED["forked"]["abandoned"]
    check(SpecReader(GOLDEN / "forked", timeline=abandoned["timeline"]), abandoned["step"], abandoned["state"])
    state = everstep.open(GOLDEN / "forked").state(abandoned["step"], timeline=abandoned["timeline"])
    assert {n: value(t.numpy()) for n, t in state["model"].items()} == abandoned["state"]["model"]


def test_the_golden_run_has_every_codec_and_a_torn_tail() -> None:
    run = GOLDEN / "plain"
    identity = read_document(run / "run.json")["run"]
    segment = Segment(run / "timelines/0001/log/rank-00000/g000001-000000000001.frames", identity)
    assert {r["codec"] for f in segment.frames for r in f["records"] if r["type"] == DATA} == {0, 1, 2}
    assert [f["step"] for f in segment.frames] == [1, 2]
    assert segment.header(segment.frames[-1]["records"][0]["at"]) is not None
    assert len(segment.data) % BLOCK
    run = GOLDEN / "quantized"
    identity = read_document(run / "run.json")["run"]
    segment = Segment(run / "timelines/0001/log/rank-00000/g000001-000000000001.frames", identity)
    assert {r["codec"] for f in segment.frames for r in f["records"] if r["type"] == DATA} == {0, 3}
    assert segment.end is None


def test_the_hexdump_in_the_specification_is_of_the_golden_run() -> None:
    data = (GOLDEN / "plain/timelines/0001/log/rank-00000/g000001-000000000001.frames").read_bytes()
    rows = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} +){16})\|", (ROOT / "docs/format.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for at, row in rows:
        assert data[int(at, 16) :][:16] == bytes.fromhex(row), at


def test_the_specification_names_every_dtype_tag_operation_record_and_field() -> None:
    import typing

    from everstep import atoms, codec, frame, memory
    from everstep.format import documents, records, segment
    from everstep.tree import unpacking

    text = (ROOT / "docs/format.md").read_text()
    dtypes = text.split("dtypes by number")[1].split("\n## ")[0]
    assert {int(n): name for n, name in re.findall(r"\| (\d+) (\w+)(?= \|)", dtypes)} == memory._DTYPES
    packed_values = text.split("## Packed values")[1].split("\n## ")[0]
    tags = {t for row in re.findall(r"^\| (`[^|]+) \|", packed_values, re.MULTILINE) for t in re.findall(r"`(\w+)`", row)}
    assert tags == set(unpacking._FIELDS)
    operations = set(re.findall(r'^\| `"(\w+)"` \|', text, re.MULTILINE))
    assert operations == {op.__struct_config__.tag for op in typing.get_args(frame.Op)}
    assert set(re.findall(r"\*\*(\d) \w+, version (\d)\.\*\*", text)) == {(str(i), str(v)) for i, v in codec.CODECS}
    for name in ("SEGMENT", "DATA", "CURSOR", "FOOTER", "END"):
        assert f"{getattr(records, name)} {name}" in text
    known = set(re.findall(r"`(\w+)`", text))
    for kind in (
        documents.RunDocument, documents.TimelineDocument, documents.GenerationDocument, documents.KeptDocument,
        documents.Manifest, documents.StoredTensor, documents.StoredOptimizer, documents.PoolDocument,
        documents.SlotDocument, segment.SegmentHeader, segment.SegmentEnd,
        frame.Footer, atoms.Atom, atoms.Layout, atoms.OptimizerSpec,
    ):  # fmt: skip
        missing = set(kind.__struct_fields__) - known
        assert not missing, f"{kind.__name__}: {missing}"
    assert f"version {documents.FORMAT_MAJOR}.{documents.FORMAT_MINOR}" in text.splitlines()[0]


def test_golden_files_stay_small() -> None:
    assert sum(f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file()) < 740_000


class Growing(nn.Module):
    """A tensor of several pieces, one of 16 bits exactly, and one that is added in mid-run."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(PIECE + 65))
        self.table = nn.Parameter(torch.randn(40_000))

    def grow(self) -> nn.Parameter:
        self.late = nn.Parameter(torch.randn(5))
        return self.late


@pytest.mark.parametrize("clips", [True, False])
def test_the_reader_finds_gradients_that_left_early(tmp_path: Path, clips: bool) -> None:
    torch.manual_seed(1)
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    truth = {}
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, early=True)
    run.resume()
    for step in range(1, 8):
        model.large.mul(torch.randn(PIECE + 65)).sum().add(model.table.square().sum()).backward()
        run._capture.flush()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif step > 5:  # what left is of no use
            model.table.grad.add_(1.0)
        optimizer.step()
        if step % 3:  # else the gradients are carried over
            optimizer.zero_grad()
        run.commit()
        truth[step] = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    crash(run)
    reader = SpecReader(tmp_path / "run")
    kinds = {op[0] for frame in reader.frames.values() for op in frame["footer"]["ops"]}
    assert ("scaled" in kinds) == clips
    for step, expected in truth.items():
        found = reader.named(reader.state(step))
        assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in expected.items()}, step


@given(st.integers(0, 1 << 34), st.booleans())
def test_pieces_are_those_of_the_specification(numel: int, fine: bool) -> None:
    assert atoms.piece_elements(numel, fine=fine) == piece_elements(numel, fine)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fine", [True, False])
def test_the_reader_finds_what_was_trained_today(
    tmp_path: Path, set_to_none: bool, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "fine", fine)
    torch.manual_seed(1)
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    truth = {}
    with everstep.attach(
        model, optimizer, tmp_path / "run", quiet=True, follower=False, segment_bytes=5_000_000
    ) as run:
        run.resume()
        for step in range(1, 8):
            if step == 4:
                optimizer.add_param_group({"params": [model.grow()], "momentum": 0.25})
            if step == 6:  # a hand that edits optimizer state and parameters
                optimizer.state[model.table]["momentum_buffer"].zero_()
                with torch.no_grad():
                    model.large[:10].zero_()
            for p in model.parameters():
                p.grad = torch.randn(p.shape) if p.grad is None else p.grad.copy_(torch.randn(p.shape))
            model.table.grad[::2] = 0 if step % 2 else 1.5
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            run.commit()
            truth[step] = {n: value(p.detach().numpy()) for n, p in model.named_parameters()}
        run.flush()
        reader = SpecReader(tmp_path / "run")
        state = reader.state(7)
        assert {n: value(v) for n, v in reader.named(state).items()} == truth[7]
        assert set(state["carried"]) == (set() if set_to_none else set(state["atoms"]))
        assert not any(v.any() for v in state["carried"].values())
        moments = state["optimizers"]["optimizer"]["state"]
        for p, atom in zip(model.parameters(), state["layout"]["atoms"], strict=True):
            live = optimizer.state[p]["momentum_buffer"].numpy()
            assert moments[atom["uid"]]["momentum_buffer"].tobytes() == live.tobytes()
    reader = SpecReader(tmp_path / "run")
    for step in (s for s in reader.steps() if s):
        assert {n: value(v) for n, v in reader.named(reader.state(step)).items()} == truth[step], step
    files = sorted((tmp_path / "run/timelines/0001/log/rank-00000").glob("*.frames"))
    segments = [Segment(f, reader.run["run"]) for f in files]
    assert len(segments) > 1
    assert [s.end["next_step"] for s in segments] == [*(s.head["first_step"] for s in segments[1:]), None]
    for segment in segments:
        assert segment.end["steps"] == [f["step"] for f in segment.frames]
        assert segment.end["footers"] == [f["records"][-1]["next"] for f in segment.frames]
        assert segment.end["offsets"] == [f["records"][0]["at"] for f in segment.frames]


def rewrite(path: Path, change: Any) -> None:
    """Change a document as a later version might, with a checksum that fits."""
    body = read_document(path)
    change(body)
    data = json.dumps(body).encode()
    path.write_bytes(b'{"xxh3":"%016x","body":%s}\n' % (xxh3(data), data))


def documents(run: Path) -> list[Path]:
    return sorted(run.rglob("*.json"))


def test_unknown_fields_of_later_versions_are_ignored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "forked", run)
    for path in documents(run):
        rewrite(path, lambda body: body.update(colour="blue"))
        if path.parent.name == "layouts":  # named by a hash of what they hold
            body = path.read_bytes()[len('{"xxh3":"0123456789abcdef","body":') : -2]
            path.rename(path.with_name(f"{xxhash.xxh3_128_hexdigest(body)[:16]}.json"))
    rewrite(run / "run.json", lambda body: body.update(format=[1, 7], compatible=["colours"], read_only=["painting"]))
    state = everstep.open(run).state()
    assert {n: value(t.numpy()) for n, t in state["model"].items()} == EXPECTED["forked"]["states"]["2"]["model"]


def test_a_layout_with_fields_of_a_later_version_is_read(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    model.late = nn.Parameter(torch.ones(3))
    run.commit(wait=True)
    crash(run)
    from everstep.store.runs import RunPath

    for path in (tmp_path / "run/timelines/0001/layouts").glob("*.json"):
        rewrite(path, lambda body: body.update(colour="blue"))
        body = path.read_bytes()[len('{"xxh3":"0123456789abcdef","body":') : -2]
        name = xxhash.xxh3_128_hexdigest(body)[:16]
        path.rename(path.with_name(f"{name}.json"))
        assert RunPath(tmp_path / "run").read_layout(name, [1]).models == ("model",)


@pytest.mark.parametrize("change", [{"format": [2, 0]}, {"incompatible": ["time-machine"]}])
def test_a_run_that_this_version_must_not_read_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "plain", run)
    rewrite(run / "run.json", lambda body: body.update(change))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(everstep.errors.FormatError, match="Upgrade"):
        everstep.open(run).state()
    model = nn.Linear(3, 2)
    with pytest.raises(everstep.errors.FormatError, match="Upgrade"):
        everstep.attach(model, torch.optim.SGD(model.parameters()), run, quiet=True)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_feature_that_only_writers_must_know_lets_this_version_read_but_not_write(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "plain", run)
    rewrite(run / "run.json", lambda body: body.update(read_only=["painting"]))
    assert everstep.open(run).steps == EXPECTED["plain"]["steps"]
    model = nn.Linear(3, 2)
    with pytest.raises(everstep.errors.FormatError, match="painting"):
        everstep.attach(model, torch.optim.SGD(model.parameters()), run, quiet=True)


def patched(run: Path, kind: int, flags: int) -> None:
    """Give the second record of step 1 another type, and a checksum that fits."""
    identity = read_document(run / "run.json")["run"]
    path = run / "timelines/0001/log/rank-00000/g000001-000000000001.frames"
    segment = Segment(path, identity)
    data = bytearray(segment.data)
    record = segment.frames[0]["records"][1]
    raw = bytearray(record["bytes"])
    raw[4], raw[5] = kind, flags
    raw[120:] = struct.pack("<Q", xxh3(bytes(raw[:120]), segment.seed + record["at"]))
    data[record["at"] : record["at"] + 128] = raw
    path.write_bytes(bytes(data))


def test_a_record_of_unknown_type_that_must_not_be_skipped_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "plain", run)
    patched(run, kind=77, flags=1)
    with pytest.raises(everstep.errors.FormatError, match=r"type 77.*newer"):
        everstep.open(run).state(1)
