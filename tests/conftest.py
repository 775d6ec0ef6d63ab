"""Shared settings: one torch thread, bf16 kernels that run on any machine, no status lines."""

import os
from collections import Counter

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `sampled` leaves out of `make test` is long."""
    counts: Counter[tuple[object, ...]] = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or item.get_closest_marker("long"):
            continue
        test = item.path, item.name.partition("[")[0]
        if counts[test] % marker.args[0]:
            item.add_marker("long")
        counts[test] += 1
