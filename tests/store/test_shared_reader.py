"""What processes of one host read together is what each would read alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everstep.errors import StorageError
from everstep.store import files
from everstep.store.files import Reader, SharedReader


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(np.random.default_rng(0).bytes(3 * files.BLOCK + 77))
    return str(tmp_path / "file")


@pytest.mark.parametrize(("offset", "size"), [(0, 10), (64, 2 * files.BLOCK), (files.BLOCK, 2 * files.BLOCK + 77), (5, 0)])
def test_it_gives_the_bytes_that_a_reader_gives(file: str, offset: int, size: int) -> None:
    with SharedReader(file) as shared, Reader(file, direct=True) as reader:
        wanted = reader.read(offset, size)
        assert bytes(shared.read_direct(files.new_pages(6 * files.BLOCK), offset, size)) == wanted
        assert bytes(shared.begin_direct(files.new_pages(6 * files.BLOCK), offset, size)()) == wanted


def test_a_file_that_is_too_short_gives_what_it_has(file: str) -> None:
    with SharedReader(file) as shared:
        found = shared.read_direct(files.new_pages(6 * files.BLOCK), 3 * files.BLOCK, files.BLOCK)
        assert bytes(found) == shared.read(3 * files.BLOCK, 77)


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with SharedReader(str(tmp_path / "empty")) as shared:
        assert not len(shared.read_direct(files.new_pages(files.BLOCK), 0, 10))


def test_writing_into_what_it_gives_changes_neither_the_file_nor_what_others_get(file: str) -> None:
    before = Path(file).read_bytes()
    with SharedReader(file) as one, SharedReader(file) as other:
        one.read_direct(files.new_pages(4 * files.BLOCK), 0, 100)[:] = 0
        assert bytes(other.read_direct(files.new_pages(4 * files.BLOCK), 0, 100)) == before[:100]
    assert Path(file).read_bytes() == before


def test_a_file_cut_off_meanwhile_is_an_error_and_kills_nobody(file: str) -> None:
    with SharedReader(file) as shared:
        Path(file).write_bytes(b"")
        with pytest.raises(StorageError, match="map "):
            shared.read_direct(files.new_pages(4 * files.BLOCK), 2 * files.BLOCK, 100)
