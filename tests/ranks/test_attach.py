"""What ranks notice at attach."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_resizes import job
from threaded import Threads

from everstep.errors import UsageError


def test_folders_that_only_their_own_node_has_are_noticed_and_explained(threads: Threads, tmp_path: Path) -> None:
    folders = [tmp_path / f"node-{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(UsageError, match=r"all ranks must see the same folder.*Node-local disks cannot hold a run"):
        threads.run(2, lambda rank: job(folders[rank] / "run", 2, 1)(rank))
    assert list(folders[1].iterdir()) == []
