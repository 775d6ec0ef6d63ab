"""The interval benchmark: the search on costs that are known, and a smoke run."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from everstep.bench import families, intervals, savers
from everstep.bench.families import FAMILIES
from everstep.bench.intervals import LIMIT, Point
from everstep.bench.savers import WAYS
from everstep.bench.statistics import Interval
from everstep.cli.main import app


def point(interval, overhead):
    value = Interval(overhead, overhead, overhead)
    return Point(interval=interval, overhead=value, step_s=0.2, num_rounds=1, block_steps=interval)


def searched(first, overhead, most=1000):
    return intervals.search(first, most, lambda ks: [point(k, overhead(k)) for k in ks])


@given(cost=st.floats(0.001, 20.0))
def test_a_save_that_costs_the_same_everywhere_is_found_at_once_and_confirmed(cost):
    points = searched(point(4, cost / 4).derived(), lambda k: cost / k)
    least, confirmed = intervals.found(points)
    assert confirmed and cost / least < LIMIT and (least == 1 or cost / (least - 1) >= LIMIT)
    assert len(points) <= 3


@given(cost=st.floats(0.05, 2.0), waited=st.floats(0.0, 8.0))
def test_a_save_that_is_waited_for_at_short_intervals_is_found_where_it_no_longer_is(cost, waited):
    """As an asynchronous save: what training has not done by the next one is waited for."""

    def overhead(k):
        return (cost + max(0.0, waited - k)) / k

    points = searched(point(4, overhead(4)).derived(), overhead)
    least, confirmed = intervals.found(points)
    assert confirmed and overhead(least) < LIMIT and (least == 1 or overhead(least - 1) >= LIMIT)


@given(cost=st.floats(0.05, 2.0), noise=st.lists(st.floats(0.3, 3.0), min_size=40, max_size=40))
def test_costs_that_are_never_the_same_twice_still_lead_to_an_interval_and_one_below(cost, noise):
    left = iter(noise)
    points = searched(point(4, cost / 4).derived(), lambda k: cost / k * next(left, 1.0), most=64)
    least, confirmed = intervals.found(points)
    if confirmed:
        assert points[least].is_under and (least == 1 or not points[least - 1].is_under)
    assert len(points) <= 2 * intervals.MOST_SEARCHES


def test_what_stays_over_the_limit_is_not_reached():
    points = searched(3, lambda k: 1.0, most=50)
    assert intervals.found(points) == (None, False)
    assert max(points) <= 50


def test_an_interval_whose_neighbour_below_was_not_measured_is_not_confirmed():
    assert intervals.found({7: point(7, 0.04), 5: point(5, 0.06)}) == (7, False)
    assert intervals.found({7: point(7, 0.04), 6: point(6, 0.06)}) == (7, True)
    assert intervals.found({1: point(1, 0.04)}) == (1, True)


def test_a_peer_saves_at_the_first_step_and_every_interval_from_there(tmp_path):
    saved = []

    class Peer:
        def save(self, model, optimizer):
            saved.append(True)

    saver = savers.Other(None, None, Peer(), 3)
    newest = []
    for _ in range(7):
        saver.after_step()
        newest.append(saver.newest())
    assert newest == [1, 1, 1, 4, 4, 4, 7] and len(saved) == 3


@pytest.mark.long
def test_the_follower_has_made_a_base_before_anything_is_measured(tmp_path):
    model, optimizer = FAMILIES["ResNet-18"].build(FAMILIES["ResNet-18"].quick)
    batch = FAMILIES["ResNet-18"].batch(FAMILIES["ResNet-18"].quick)
    place = savers.Place(disk=str(tmp_path), memory=str(tmp_path), base_interval=4)
    saver = WAYS["delta"].begin(model, optimizer, place, 1)
    for _ in range(6):
        families.train_step(model, optimizer, batch)
        saver.after_step()
    saver.rest()
    assert saver.run.stats()["follower_bases"] > 0
    saver.close()


IN_SHORT = ("delta", "snapshot-memory", "torch.save")


@pytest.mark.parametrize("way", [w if w in IN_SHORT else pytest.param(w, marks=pytest.mark.long) for w in WAYS])
def test_every_way_to_save_is_measured_and_leaves_nothing_behind(way, tmp_path):
    (tmp_path / "memory").mkdir()
    settings = intervals.Settings(
        families=["ResNet-18"], ways=[way], num_rounds=2, block_s=0.02, most_interval=2, base_interval=1000,
        folder=str(tmp_path), memory=str(tmp_path / "memory"), quick=True,
    )  # fmt: skip
    found = intervals.measure(settings)["families"]["ResNet-18"]
    saver = found["savers"][way]
    assert found["step_s"] > 0 and saver["points"]
    assert all(p["num_rounds"] == 2 and p["block_steps"] % p["interval"] == 0 for p in saver["points"])
    assert saver["every_step"] is (way in ("delta", "shadow"))
    assert os.listdir(tmp_path) == ["memory"] and os.listdir(tmp_path / "memory") == []


def test_the_command_prints_tables_for_a_document(tmp_path):
    options = ["--quick", "--family", "alexnet", "--mode", "torch.save", "--dir", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", "intervals", "--markdown", *options])
    assert done.exit_code == 0, done.output
    assert "| family | parameters | state | step | torch.save |\n| --- |" in done.stdout
    assert "| AlexNet | torch.save | 3 |" in done.stdout
    assert "AlexNet, torch.save, every 4: 0 of 1" in done.stderr


def test_a_family_or_mode_that_there_is_none_of_is_told(tmp_path):
    for options in (["--family", "LeNet"], ["--mode", "telepathy"]):
        done = CliRunner().invoke(app, ["bench", "intervals", *options])
        assert done.exit_code == 2 and options[1] in done.stderr


@pytest.mark.long
def test_the_command_measures_all_families_and_ways(tmp_path):
    done = CliRunner().invoke(app, ["bench", "intervals", "--quick", "--json", "--dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["families"]
    assert list(found) == list(FAMILIES)
    assert all(list(family["savers"]) == list(WAYS) for family in found.values())
