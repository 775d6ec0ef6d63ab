"""Write the golden runs that are not there, what they must lead to, and the hexdump in docs/format.md.

    python tests/data/make_golden.py

Golden files of a format that was released are kept for ever: remove one only while its version is being made. What is
expected comes from the live tensors of the training, not from Everstep.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import everstep  # noqa: E402
from everstep.atoms import Atom, Layout  # noqa: E402
from everstep.format.documents import FINE_PIECES, FORMAT_MAJOR  # noqa: E402
from everstep.store.bases import Slot  # noqa: E402
from everstep.store.medium import Mapped  # noqa: E402
from everstep.store.pool import Pool  # noqa: E402
from everstep.store.runs import RunPath  # noqa: E402
from support import crash  # noqa: E402

VERSION = HERE / f"v{FORMAT_MAJOR}"
SPECIFICATION = HERE.parent.parent / "docs" / "format.md"
BEGIN, END = "<!-- hexdump: begin (written by tests/data/make_golden.py) -->", "<!-- hexdump: end -->"


class Model(nn.Module):
    """One parameter that gets records of its own (if `wide`), small ones that share one, a tied weight, two buffers."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.layer.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        if wide:
            self.wide = nn.Parameter(torch.arange(16384) / 8192)


class Notes:
    """An extra with values of many types."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "milestones": Counter({30: 1, 60: 2}), "betas": (0.5, -0.0), "big": 2**70, "none": None,
            "half": torch.tensor([1.5, -2.0], dtype=torch.float16), "array": np.arange(3, dtype=np.int16),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Training:
    """SGD whose arithmetic is exact in every step but one rounding, so that any reader gets the same bits."""

    def __init__(
        self, run: Path, *, wide: bool, compressor: everstep.compress.Quantize | None = None, many: int = 0
    ) -> None:
        """`many`: elements of one more buffer."""
        torch.manual_seed(7)
        self.model = Model(wide)
        if many:
            self.model.register_buffer("many", torch.zeros(many, dtype=torch.uint8))
        small = [self.model.layer.weight, self.model.layer.bias]
        groups: list[dict[str, Any]] = [{"params": small, "momentum": 0.5}]
        if wide:
            groups.append({"params": [self.model.wide]})
        self.optimizer = torch.optim.SGD(groups, lr=0.5)
        self.notes = Notes()
        if compressor is not None:
            compressor.attach(self.optimizer)
        self.generator = torch.Generator().manual_seed(3)
        self.run = everstep.attach(
            self.model, self.optimizer, run, extras={"notes": self.notes}, follower=False, quiet=True, direct_io=False,
            compress=compressor,
        )  # fmt: skip

    def step(self, wide_grad: torch.Tensor | None = None) -> int:
        for p in (self.model.layer.weight, self.model.layer.bias):
            p.grad = torch.randn(p.shape, generator=self.generator)
        if hasattr(self.model, "wide"):
            self.model.wide.grad = wide_grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.seen += 1
        self.model.mean += torch.randn(3, generator=self.generator)
        self.notes.step = self.run.step + 1
        return self.run.commit(wait=True)

    def expected(self) -> dict[str, Any]:
        """Every tensor and number that a reader must find for the step just committed."""
        names = {p: n for n, p in self.model.named_parameters()}
        return {
            "model": {n: value(t) for n, t in self.model.state_dict().items()},
            "momentum": {
                names[p]: value(s["momentum_buffer"])
                for p, s in self.optimizer.state.items()
                if s.get("momentum_buffer") is not None
            },
            "lr": [g["lr"] for g in self.optimizer.param_groups],
            "extra_step": self.notes.step,
            "torch_rng": xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().tobytes()),
        }


def value(tensor: torch.Tensor) -> list[Any]:
    """[dtype, shape, xxh3 of the bytes]"""
    flat = tensor.detach().contiguous().numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), xxhash.xxh3_64_hexdigest(flat)]


def make_plain(folder: Path) -> dict[str, Any]:
    """Codecs sixteen and sparse, packed records, a torn tail, a second generation, a hyperparameter that changes."""
    training = Training(folder, wide=True)
    training.run.resume()
    states = {"0": training.expected()}
    training.step(torch.arange(16384) % 256 / 256)  # every value is a bf16
    states["1"] = training.expected()
    one = torch.zeros(16384)
    one[[5, 77, 16383]] = torch.tensor([1.0, -0.0, -3.25])
    training.step(one)
    states["2"] = training.expected()
    training.step(torch.zeros(16384))
    crash(training.run)
    # Step 3 was being written when the process died: its records are there in part, its footer is not.
    segment = folder / "timelines/0001/log/rank-00000/g000001-000000000001.frames"
    os.truncate(segment, frames_of(segment)[2] + 1000)
    training = Training(folder, wide=True)
    assert training.run.resume() == 2
    for group in training.optimizer.param_groups:
        group["lr"] = 0.25
    training.generator.manual_seed(4)
    training.step(None)
    states["3"] = training.expected()
    crash(training.run)
    return {"latest": 3, "steps": [0, 1, 2, 3], "states": states}


def make_forked(folder: Path) -> dict[str, Any]:
    """Step 2 of timeline 1 is replaced by another one in timeline 2."""
    training = Training(folder, wide=False)
    training.run.resume()
    training.step()
    states = {"1": training.expected()}
    training.step()
    abandoned = training.expected()
    crash(training.run)
    training = Training(folder, wide=False)
    assert training.run.resume(step=1) == 1
    training.generator.manual_seed(5)
    training.step()
    states["2"] = training.expected()
    assert states["2"] != abandoned
    crash(training.run)
    return {"latest": 2, "steps": [0, 1, 2], "states": states, "abandoned": {"timeline": 1, "step": 2, "state": abandoned}}


def make_quantized(folder: Path) -> dict[str, Any]:
    """Codec blocks, as gradient compression makes it."""
    training = Training(folder, wide=True, compressor=everstep.compress.Quantize())
    training.run.resume()
    states = {"0": training.expected()}
    values = torch.randn(16384, generator=torch.Generator().manual_seed(6))
    training.step(values)
    states["1"] = training.expected()
    training.step(values.flip(0))
    states["2"] = training.expected()
    crash(training.run)
    return {"latest": 2, "steps": [0, 1, 2], "states": states}


def make_fine(folder: Path) -> dict[str, Any]:
    """Fine pieces, as several ranks write them: two of a buffer, which lies in two records at each of its changes."""
    Layout.fine = True  # type: ignore[assignment,method-assign,misc]
    training = Training(folder, wide=False, many=65_700)
    training.run.resume()
    RunPath(str(folder)).require(FINE_PIECES)
    states = {"0": training.expected()}
    for step in (1, 2):
        training.model.many[[100 * step, 40_000 + step, 65_699]] = step
        training.step()
        states[str(step)] = training.expected()
    crash(training.run)
    return {"latest": 2, "steps": [0, 1, 2], "states": states}


def make_pool(folder: Path) -> None:
    """A pool of two slots that held steps 1 to 3, with step 4 being written when the process died: step 3 is there."""
    w, half = torch.arange(700, dtype=torch.float32), torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    seen, empty = torch.tensor(5), torch.empty(0, 2)
    tensors = {"model.w": w, "model.seen": seen, "optimizer.w.half": half, "optimizer.w.empty": empty}
    slots = [
        Slot(i + 1, "state" if name.startswith("optimizer") else "param", name, t.dtype, tuple(t.shape))
        for i, (name, t) in enumerate(tensors.items())
    ]
    run = "0123456789abcdef" * 2
    layout = Layout((Atom(1, "param", "model", "w", (700,), "float32"),), (), ("model",))
    folder.mkdir()
    pool = Pool.create(
        str(folder), "golden", run=run, rank=0, layout=layout, slots=slots, num_slots=2, medium=Mapped, spare_bytes=1000
    )
    for step in (1, 2, 3, 4):
        writer = pool.begin(step)
        for index in writer.order:
            writer.add(list(tensors.values())[index] * step)
        if step < 4:
            writer.finish(
                run=run, timeline=1, generation=2, step=step, layout=layout, optimizers=(), cursor=b"cursor %d" % step,
                carried=((1, -1),), audit="trainer", fingerprint={"torch": "golden"},
            )  # fmt: skip
    pool.close()
    expected = {
        "run": run, "step": 3, "timeline": 1, "generation": 2, "cursor": "cursor 3",
        "tensors": {name: bits(t * 3) for name, t in tensors.items()},
    }  # fmt: skip
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def bits(tensor: torch.Tensor) -> list[Any]:
    """[dtype, shape, xxh3 of the bytes], of any dtype"""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), xxhash.xxh3_64_hexdigest(raw)]


def frames_of(segment: Path) -> list[int]:
    """Offsets of the frames in a segment, by walking over the headers."""
    data = segment.read_bytes()
    offset, found, first = 4096, [], True
    while offset < len(data):
        if first:
            found.append(offset)
        kind, stored = data[offset + 4], struct.unpack_from("<Q", data, offset + 64)[0]
        offset += -(-(128 + stored) // 64) * 64
        first = kind == 4
        if first:
            offset = -(-offset // 4096) * 4096
    return found


def hexdump(segment: Path) -> str:
    """The records of the first frame, header by header, with the beginning of each payload."""
    data = segment.read_bytes()
    kinds = {1: "SEGMENT", 2: "DATA", 3: "CURSOR", 4: "FOOTER", 5: "END"}
    lines = []
    offset, end = 0, frames_of(segment)[1]
    while offset < end:
        kind, stored = data[offset + 4], struct.unpack_from("<Q", data, offset + 64)[0]
        name = f"{kinds[kind]} record" + (f", ordinal {data[offset + 12]}" if kind in (2, 3, 4) else "")
        lines.append(f"{name}: header, then {stored} bytes of payload")
        for at in range(offset, offset + 160, 16):
            row = data[at : at + 16]
            if not any(row):
                lines += ["*"] if lines[-1] != "*" else []
                continue
            text = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
            lines.append(f"{at:08x}  {row[:8].hex(' ')}  {row[8:].hex(' ')}  |{text}|")
        lines.append("")
        offset += -(-(128 + stored) // 64) * 64
        if kind in (1, 4):
            offset = -(-offset // 4096) * 4096
    return "\n".join(lines)


def main() -> None:
    socket.gethostname = lambda: "golden"  # type: ignore[assignment]  # nothing of this machine goes into the files
    torch.set_num_threads(1)
    VERSION.mkdir(exist_ok=True)
    makers = {"plain": make_plain, "forked": make_forked, "quantized": make_quantized, "fine": make_fine}
    told = VERSION / "expected.json"
    expected = json.loads(told.read_text()) if told.exists() else {}
    expected |= {name: make(VERSION / name) for name, make in makers.items() if not (VERSION / name).exists()}
    told.write_text(json.dumps(expected, indent=1) + "\n")
    if not (VERSION / "pool").exists():
        make_pool(VERSION / "pool")
    for lock in VERSION.glob("*/lock"):
        lock.unlink()
    dump = hexdump(VERSION / "plain/timelines/0001/log/rank-00000/g000001-000000000001.frames")
    text = SPECIFICATION.read_text()
    before, rest = text.split(BEGIN)
    SPECIFICATION.write_text(f"{before}{BEGIN}\n\n```\n{dump.rstrip()}\n```\n\n{END}{rest.split(END)[1]}")
    size = sum(f.stat().st_size for f in VERSION.rglob("*") if f.is_file())
    print(f"{VERSION}: {size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
