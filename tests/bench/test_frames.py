"""How large frames are against the full state: what is promised of the 17M-parameter model, kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.bench import frames
from everstep.bench.workloads import Workload


@pytest.mark.long
def test_frames_are_as_much_smaller_than_the_full_state_as_is_promised(tmp_path: Path) -> None:
    found = frames.measure(Workload(tokens=256), num_steps=2, folder=str(tmp_path))
    assert found["num_parameters"] > 17_000_000
    smaller = {codec: told["times_smaller"] for codec, told in found["codecs"].items()}
    assert smaller["topk"] >= 100, smaller
    assert min(smaller["fp16"], smaller["bf16"]) >= 5.9, smaller
    assert smaller["none"] >= 2.95, smaller
    assert found["codecs"]["topk"]["reused_share"] > 0.99, "payloads were encoded a second time"
