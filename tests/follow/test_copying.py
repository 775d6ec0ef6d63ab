"""A state in another process's memory on its way into this one's: in its place, and verified there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from everstep.atoms import PIECE_ELEMENTS, Layout
from everstep.errors import CorruptionError
from everstep.follow.arena import Copying, Home
from everstep.format.documents import Manifest
from everstep.memory import same_bits
from everstep.store.bases import Slot

SIZES = [("param", (3, PIECE_ELEMENTS // 2)), ("param", (5,)), ("buffer", (0,)), ("param", (7, 11)), ("buffer", ())]
SIZES += [("state", (3, PIECE_ELEMENTS // 2)), ("state", (5,)), ("state", ()), ("state", (7, 11)), ("state", (300_000,))]


@pytest.fixture
def handed_out(tmp_path: Path) -> tuple[Manifest, str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for _, shape in SIZES]
    tensors[3] = tensors[3].t().contiguous().t()  # with strides of its own
    slots = [
        Slot(i + 1, role, f"t{i}", torch.float32, shape, (1, 7) if i == 3 else None) for i, (role, shape) in enumerate(SIZES)
    ]
    home = Home(str(tmp_path))
    file, _, stored = home.hand_out(slots, tensors)
    manifest = Manifest(
        run="00" * 16, timeline=1, generation=1, step=7, layout=Layout((), (), ()), tensors=stored, files={}, optimizers=(),
        carried=(), cursor="", audit="", fingerprint={},
    )  # fmt: skip
    return manifest, file, tensors


def test_live_tensors_get_their_values_in_place_and_the_others_new_memory(
    handed_out: tuple[Manifest, str, list[torch.Tensor]],
) -> None:
    manifest, file, tensors = handed_out
    live = {i + 1: torch.nn.Parameter(torch.zeros(shape)) for i, (_, shape) in enumerate(SIZES)}
    live[2] = torch.nn.Parameter(torch.zeros(5, 2)[:, 0])  # does not fit: it has strides
    versions = {uid: p._version for uid, p in live.items()}
    loading = Copying(manifest, file, live)
    assert not live[1].any()
    loading.need_all()
    assert all(same_bits(found, right) for found, right in zip(loading.tensors, tensors, strict=True))
    for uid, role in ((1, "param"), (5, "buffer")):
        assert SIZES[uid - 1][0] == role
        assert same_bits(live[uid].detach(), tensors[uid - 1])
        assert live[uid]._version > versions[uid]
    assert not live[2].any() and not live[4].any()
    assert not any(live[uid].any() for uid in range(6, 11))  # these uids are of optimizer state, not of parameters
    assert loading.tensors[3].stride() == (1, 7)


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_a_byte_that_changed_after_it_was_described_is_found(
    handed_out: tuple[Manifest, str, list[torch.Tensor]], index: int
) -> None:
    manifest, file, _ = handed_out
    stored = manifest.tensors[index]
    if not stored.num_bytes:
        return
    with open(file, "r+b") as f:
        f.seek(stored.offset + stored.num_bytes - 1)
        byte = f.read(1)
        f.seek(stored.offset + stored.num_bytes - 1)
        f.write(bytes([byte[0] ^ 1]))
    loading = Copying(manifest, file, {})
    for _ in range(2):
        with pytest.raises(CorruptionError, match=f"t{index}"):
            loading.need_all()


def test_a_file_that_is_gone_or_cut_is_told_of(handed_out: tuple[Manifest, str, list[torch.Tensor]]) -> None:
    manifest, file, _ = handed_out
    with open(file, "r+b") as f:
        f.truncate(manifest.tensors[-1].offset + 5)
    with pytest.raises(CorruptionError, match="t9"):
        Copying(manifest, file, {}).need_all()
    Path(file).unlink()
    with pytest.raises(CorruptionError, match="cannot be opened"):
        Copying(manifest, file, {}).need_all()


def test_too_few_checksums_are_refused(handed_out: tuple[Manifest, str, list[torch.Tensor]]) -> None:
    manifest, file, _ = handed_out
    short = msgspec.structs.replace(manifest.tensors[0], sums=manifest.tensors[0].sums[:-1])
    with pytest.raises(CorruptionError, match="t0"):
        Copying(msgspec.structs.replace(manifest, tensors=(short, *manifest.tensors[1:])), file, {})


def test_a_state_that_was_given_up_has_no_values(handed_out: tuple[Manifest, str, list[torch.Tensor]]) -> None:
    manifest, file, _ = handed_out
    loading = Copying(manifest, file, {})
    loading.close()
    with pytest.raises(RuntimeError, match="given up"):
        loading.need_all()
