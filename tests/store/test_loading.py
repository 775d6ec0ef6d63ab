"""A base on its way into memory, part by part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from everstep.atoms import PIECE_ELEMENTS, Layout
from everstep.errors import CorruptionError, StorageError
from everstep.format.documents import Manifest
from everstep.memory import new_pages, same_bits
from everstep.store import aio, bases, files
from everstep.store.bases import BaseReader, BaseWriter, Loading, Slot

SIZES = (2 * PIECE_ELEMENTS + 1000, 3, PIECE_ELEMENTS, 0, 70_001)


@pytest.fixture
def base(tmp_path: Path) -> tuple[str, Manifest, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) for n in SIZES]
    slots = [Slot(i + 1, "param" if i < 3 else "state", f"t{i}", t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
    writer = BaseWriter(str(tmp_path), 7, slots, direct=False)
    for index in writer.order:
        writer.add(tensors[index])
    manifest = writer.finish(
        run="00" * 16, timeline=1, generation=1, step=7, layout=Layout((), (), ()), optimizers=(), carried=(),
        cursor=b"", audit="", fingerprint={},
    )  # fmt: skip
    return writer.folder, manifest, tensors


@pytest.fixture(params=[(), (0,), (0, 2, 4)], ids=["", "places of one", "places"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseReader], Loading]:
    """With memory of its own for each tensor, or with places that the caller has for some of them."""
    if not request.param:
        return lambda reader: reader.load()
    monkeypatch.setattr(bases, "_CHUNK_BYTES", 128 << 10)  # pieces are in several, and several tensors in one
    memory = torch.full((sum(SIZES) + 64 * len(SIZES),), 7.0)
    starts = [sum(SIZES[:i]) // 16 * 16 + 32 * i for i in range(len(SIZES))]
    places = {i: memory[starts[i] : starts[i] + SIZES[i]] for i in request.param}

    def found(reader: BaseReader) -> Loading:
        loading = reader.load({i: (0, n) for i, n in enumerate(SIZES)}, places)
        assert all(loading.tensors[i].data_ptr() == place.data_ptr() for i, place in places.items())
        return loading

    return found


def damage(folder: str, manifest: Manifest, index: int, element: int) -> None:
    path = Path(folder) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[manifest.tensors[index].offset + 4 * element] ^= 1
    path.write_bytes(data)


def test_parts_come_in_any_order_by_any_thread(
    base: tuple[str, Manifest, list[torch.Tensor]], load: Callable[[BaseReader], Loading]
) -> None:
    folder, manifest, tensors = base
    reader = BaseReader(folder, manifest)
    loading = load(reader)
    parts = [(0, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS), (2, 0, PIECE_ELEMENTS), (0, 0, PIECE_ELEMENTS), (4, 0, 70_001)]
    for part in parts:
        loading.begin(*part)  # by one thread, waited for by others

    def work(mine: list[tuple[int, int, int]]) -> None:
        for index, start, stop in mine:
            loading.need(index, start, stop)
            assert same_bits(loading.tensors[index][start:stop], tensors[index][start:stop])
            loading.tensors[index][start:stop] = 0.0  # its owner goes on: nothing may be read into it again

    workers = [threading.Thread(target=work, args=(parts[i::2],)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    loading.need_all(2, {index: [(0, None)] for index in range(len(SIZES))})
    reader.close()
    for index, start, stop in parts:
        assert not loading.tensors[index][start:stop].any()
    assert same_bits(loading.tensors[0][2 * PIECE_ELEMENTS :], tensors[0][2 * PIECE_ELEMENTS :])
    assert same_bits(loading.tensors[1], tensors[1])


def test_a_damaged_piece_is_found_by_whoever_needs_it_and_by_nobody_else(
    base: tuple[str, Manifest, list[torch.Tensor]], load: Callable[[BaseReader], Loading]
) -> None:
    folder, manifest, _ = base
    damage(folder, manifest, 0, PIECE_ELEMENTS + 5)
    reader = BaseReader(folder, manifest)
    loading = load(reader)
    loading.need(0, 0, PIECE_ELEMENTS)
    loading.need(2)
    with pytest.raises(CorruptionError, match="t0"):
        loading.need(0, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS)
    with pytest.raises(CorruptionError, match="t0"):
        loading.need_all(2, {index: [(0, None)] for index in range(len(SIZES))})
    reader.close()


def test_a_read_that_fails_is_begun_anew_by_the_next_who_needs_it(
    base: tuple[str, Manifest, list[torch.Tensor]], load: Callable[[BaseReader], Loading], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest, tensors = base
    reader = BaseReader(folder, manifest)
    loading = load(reader)

    def fails(*_: object) -> None:
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(aio.Queue, "wait", lambda self, ticket: -5)
        patched.setattr(files.Reader, "read_direct", fails)
        for _ in range(2):
            loading.begin(2)
            with pytest.raises(StorageError):
                loading.need(2)
    loading.need(2)
    reader.close()
    assert same_bits(loading.tensors[2], tensors[2])


def test_memory_that_blocks_pass_through_is_used_again(
    base: tuple[str, Manifest, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest, tensors = base
    monkeypatch.setattr(bases, "_CHUNK_BYTES", 64 << 10)
    taken: list[int] = []
    monkeypatch.setattr(bases, "new_pages", lambda num_bytes: taken.append(num_bytes) or new_pages(num_bytes))
    reader = BaseReader(folder, manifest)
    places = {i: torch.zeros(n) for i, n in enumerate(SIZES)}
    loading = reader.load({i: (0, n) for i, n in enumerate(SIZES)}, places)
    for index, tensor in enumerate(tensors):
        for start in range(0, len(tensor), PIECE_ELEMENTS):
            loading.need(index, start, min(start + PIECE_ELEMENTS, len(tensor)))
        assert same_bits(places[index], tensor)
    reader.close()
    assert taken == [64 << 10], "what one has left the next takes"


def test_a_manifest_with_too_few_checksums_is_refused(base: tuple[str, Manifest, list[torch.Tensor]]) -> None:
    folder, manifest, _ = base
    short = msgspec.structs.replace(manifest.tensors[0], sums=manifest.tensors[0].sums[:-1])
    reader = BaseReader(folder, msgspec.structs.replace(manifest, tensors=(short, *manifest.tensors[1:])))
    with pytest.raises(CorruptionError, match="t0"):
        reader.load()
    reader.close()
