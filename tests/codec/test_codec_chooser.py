"""Which codec the Chooser takes, and what it leaves undone for tensors that stay raw."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.codec import RAW, SIXTEEN, SPARSE, Bytes, Chooser, chooser, decode

NUM_VALUES = 1 << 18


def normal_values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(NUM_VALUES).astype("<f4")


def piece(values: np.ndarray) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def with_density(values: np.ndarray, density: float) -> np.ndarray:
    is_kept = np.random.default_rng(1).random(values.size) < density
    return np.where(is_kept, values, values.dtype.type(0))


def bf16_values() -> np.ndarray:
    return torch.from_numpy(normal_values()).bfloat16().float().numpy()


def unscaled_fp16_values() -> np.ndarray:
    return (torch.from_numpy(normal_values()).half().float() / 65536).numpy()


PIECES = {
    "normal": (normal_values(), RAW),
    "bf16": (bf16_values(), SIXTEEN),
    "fp16": (torch.from_numpy(normal_values()).half().float().numpy(), SIXTEEN),
    "fp16 unscaled": (unscaled_fp16_values(), SIXTEEN),
    "zeros": (np.zeros(NUM_VALUES, "<f4"), SPARSE),
    "a twentieth": (with_density(normal_values(), 0.05), SPARSE),
    "half": (with_density(normal_values(), 0.5), RAW),
    "a twentieth of bf16": (with_density(bf16_values(), 0.05), SPARSE),
    "half of bf16": (with_density(bf16_values(), 0.5), SIXTEEN),
    "sparse fp64": (with_density(normal_values().astype("<f8"), 0.1), SPARSE),
    "sparse int16": (with_density(np.ones(NUM_VALUES, "<i2"), 0.01), SPARSE),
    "sparse uint8": (with_density(np.ones(NUM_VALUES, "<u1"), 0.001), SPARSE),
    "complex128": (np.zeros(NUM_VALUES, "<c16"), RAW),
    "small": (np.zeros(100, "<f4"), RAW),
    "empty": (np.zeros(0, "<f4"), RAW),
}


@pytest.mark.parametrize("name", PIECES)
def test_each_kind_of_tensor_gets_its_codec_and_comes_back(name: str) -> None:
    values, expected = PIECES[name]
    raw = piece(values)
    codec, version, payload = Chooser().encode(0, raw, values.itemsize, values.dtype == "<f4")
    assert (codec, version) == (expected, 1)
    if codec == RAW:
        assert payload is raw
    else:
        assert payload.size < 0.6 * raw.size
    out = np.empty_like(raw)
    decode(codec, version, payload, values.itemsize, out)
    assert out.tobytes() == raw.tobytes()


def test_a_sample_that_misleads_costs_a_try_but_no_bits() -> None:
    values = bf16_values()
    values[1] = np.float32(1e-3)
    raw = piece(values)
    codec, _, payload = Chooser().encode(0, raw, 4, True)
    assert codec == RAW and payload is raw


def count_samples(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    samples: list[int] = []
    look = chooser._promising

    def counted(raw: Bytes, itemsize: int, is_float32: bool) -> list[object]:
        samples.append(raw.size)
        return look(raw, itemsize, is_float32)

    monkeypatch.setattr(chooser, "_promising", counted)
    return samples


def test_a_tensor_that_stays_raw_is_seldom_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = count_samples(monkeypatch)
    chosen, raw = Chooser(), piece(normal_values())
    for _ in range(1000):
        assert chosen.encode(7, raw, 4, True)[0] == RAW
    assert len(samples) < 80


def test_a_tensor_that_misleads_is_tried_less_still(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = count_samples(monkeypatch)
    values = bf16_values()
    values[1] = np.float32(1e-3)
    chosen, raw = Chooser(), piece(values)
    for _ in range(1000):
        assert chosen.encode(7, raw, 4, True)[0] == RAW
    assert len(samples) < 20


def test_a_tensor_that_becomes_sparse_is_noticed_and_then_chosen_every_time() -> None:
    chosen = Chooser()
    for _ in range(100):
        chosen.encode(7, piece(normal_values()), 4, True)
    zeros = piece(np.zeros(NUM_VALUES, "<f4"))
    codecs = [chosen.encode(7, zeros, 4, True)[0] for _ in range(40)]
    first = codecs.index(SPARSE)
    assert first <= 16 and set(codecs[first:]) == {SPARSE}


def test_tensors_are_remembered_apart() -> None:
    chosen = Chooser()
    for _ in range(100):
        assert chosen.encode(1, piece(normal_values()), 4, True)[0] == RAW
    assert chosen.encode(2, piece(bf16_values()), 4, True)[0] == SIXTEEN


@given(
    content=st.binary(min_size=1, max_size=64),
    repeats=st.integers(1024, 3000),
    itemsize=st.sampled_from([1, 2, 3, 4, 8, 16]),
)
@settings(deadline=None)
def test_whatever_is_chosen_comes_back(content: bytes, repeats: int, itemsize: int) -> None:
    raw = np.frombuffer(content * repeats, np.uint8)
    codec, version, payload = Chooser().encode(0, raw, itemsize, itemsize == 4)
    out = np.empty_like(raw)
    decode(codec, version, payload, itemsize, out)
    assert out.tobytes() == raw.tobytes()


def test_saying_no_to_four_mebibytes_takes_microseconds() -> None:
    raw = np.random.default_rng(0).standard_normal(1 << 20).astype("<f4").view(np.uint8)
    chosen = Chooser()
    best_s = 1.0
    for key in range(200):
        start_s = time.perf_counter()
        chosen.encode(key, raw, 4, True)
        best_s = min(best_s, time.perf_counter() - start_s)
    assert best_s < 100e-6  # some 5 µs on an idle core; the limit leaves room for a busy one


def test_where_codecs_are_not_tried_all_stays_raw_and_what_was_known_of_tensors_is_learned_again() -> None:
    found = Chooser()
    dense, sparse = piece(normal_values()), piece(np.zeros(NUM_VALUES, "<f4"))
    for _ in range(8):
        assert found.encode(1, dense, 4, True)[0] == RAW  # it keeps saying no: it will not be looked at for a while
    assert found.encode(1, sparse, 4, True)[0] == RAW
    found.try_codecs(False)
    assert found.encode(2, sparse, 4, True) == (RAW, 1, sparse)
    found.try_codecs(True)
    assert found.encode(1, sparse, 4, True)[0] == SPARSE
    found.try_codecs(True)
    assert found.encode(1, sparse, 4, True)[0] == SPARSE
