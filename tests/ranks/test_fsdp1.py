"""FSDP1 is refused, and its state goes into a run and comes out of one by state dicts, as docs/fsdp1.md says."""

from __future__ import annotations

from pathlib import Path

from workers import World


def test_a_model_under_fsdp1_is_refused_at_attach_with_a_way_on(world: World, tmp_path: Path) -> None:
    for said in world.run("fsdp1:attach", str(tmp_path), ranks=2):
        assert said.startswith("UsageError: model: the model is wrapped in FullyShardedDataParallel (FSDP1)")
        assert "fully_shard" in said
        assert "docs/fsdp1.md" in said
    assert not (tmp_path / "run").exists()


def test_a_job_goes_from_fsdp1_into_a_run_and_back_with_every_bit(world: World, tmp_path: Path) -> None:
    assert world.run("fsdp1:out_and_back", str(tmp_path), ranks=2) == [[], []]
