"""Schedules against the closed forms, against exact optima, and carried out on a simulated clock."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from offloads import UNLIMITED, Engine, demand, drawn, least_memory, least_memory_in_wholes, least_stall, on_grid

from everstep.errors import UsageError
from everstep.tune.schedule import GRAIN_BYTES, MAX_GRAINS, SAME, Ground, Piece, drifted, explain, plan

LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
MB = 1 << 20

blocks = st.tuples(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=20), st.floats(0.05, 10), st.floats(0.3, 1), st.floats(0.1, 8)
)  # fmt: skip
"""Bytes of pieces, duration of a step, the part of it until the update, steps that the link takes for all pieces."""


def block(case):
    sizes, step_s, part, load = case
    pieces = [Piece(f"p{i}", size, 0.0, part * step_s) for i, size in enumerate(sizes)]
    bandwidth = sum(sizes) / (load * step_s)
    return pieces, Ground(step_s, bandwidth, math.inf, UNLIMITED), math.ceil(sum(sizes) / 200)


@settings(max_examples=80, deadline=None)
@given(blocks)
@example(([1, 16645799, 316270167], 1.0, 0.3, 6.0))
def test_with_updates_in_one_block_the_closed_forms_hold(case):
    pieces, ground, grain = block(case)
    total, b, t = sum(p.num_bytes for p in pieces), ground.bandwidth, ground.step_s
    read_s = pieces[0].deadline_s
    schedule, stalling = (plan(pieces, ground, may_stall=may, grain_bytes=grain) for may in (False, True))
    as_one = 1 + SAME * schedule.period_s * b  # bytes that leave within what counts as the same moment
    if total <= b * read_s * (1 - 1e-6):
        assert (schedule.regime, schedule.interval, schedule.stall_s, schedule.peak_bytes) == ("in place", 1, 0, 0)
        assert stalling == schedule
    elif b * read_s * (1 + 1e-6) < total <= b * t * (1 - 1e-6):
        assert (schedule.regime, schedule.interval, schedule.stall_s) == ("snapshots", 1, 0)
        assert total - b * read_s - as_one <= schedule.peak_bytes <= total - b * read_s + grain
        assert stalling == schedule
    elif total > b * t * (1 + 1e-6):
        assert (schedule.regime, schedule.stall_s) == ("does not fit", 0)
        assert schedule.interval in {math.ceil(total / (b * t) * (1 + e)) for e in (-1e-6, 0, 1e-6)}
        assert total - b * read_s - as_one <= schedule.peak_bytes <= total - b * read_s + grain
        assert stalling.interval == 1 and stalling.regime == "does not fit"
        assert stalling.stall_s == pytest.approx(total / b - t, rel=2e-3, abs=2e-4 * t + grain / b)
        assert stalling.peak_bytes <= b * (t - read_s) + 2 * grain  # what leaves during the update


@settings(max_examples=50, deadline=None)
@given(blocks, st.floats(0, 1))
def test_a_budget_that_is_too_small_is_waited_for_at_any_interval(case, part):
    pieces, ground, grain = block(case)
    total, b = sum(p.num_bytes for p in pieces), ground.bandwidth
    ground = replace(ground, memory_bytes=int(part * total))
    least_s = max(0.0, (total - ground.memory_bytes) / b - pieces[0].deadline_s)
    schedule = plan(pieces, ground, grain_bytes=grain)
    assert schedule.peak_bytes <= ground.memory_bytes
    assert least_s - 1e-6 * ground.step_s <= schedule.stall_s <= least_s + grain / b + 1e-6 * ground.step_s
    assert schedule.interval == pytest.approx(max(1, math.ceil(total / (b * ground.step_s) - 1e-9)), abs=1)
    allowed = plan(pieces, ground, grain_bytes=grain, max_overhead=0.05)
    assert allowed.stall_s <= 0.05 * allowed.interval * ground.step_s * (1 + 1e-6)
    if allowed.interval > 1:
        shorter = plan(pieces, ground, grain_bytes=grain, interval=allowed.interval - 1)
        assert shorter.stall_s > 0.05 * shorter.interval * ground.step_s * (1 - 1e-6)


@settings(max_examples=50, deadline=None)
@given(blocks, st.floats(1, 100))
def test_a_guard_that_copies_stalls_for_what_is_left_over_both_bandwidths(case, ratio):
    pieces, ground, grain = block(case)
    b, c = ground.bandwidth, ratio * ground.bandwidth
    left = sum(p.num_bytes for p in pieces) - b * pieces[0].deadline_s
    schedule = plan(pieces, replace(ground, copy_bandwidth=c, copies="guard"), grain_bytes=grain)
    if schedule.regime == "snapshots" or schedule.interval > 1:
        assert schedule.stall_s == pytest.approx(left / (b + c), abs=grain / b + 1e-6 * ground.step_s)


@pytest.mark.parametrize("num_cases", [120, pytest.param(3000, marks=LONG)])
def test_on_a_grid_the_memory_is_that_of_the_exact_optimum(num_cases):
    """Checkflow's integer program, pieces that take one slot of the link: the same to the byte, and feasible with any budget
    with which the optimum is."""
    random = np.random.default_rng(1)
    for _ in range(num_cases):
        slots = int(random.integers(3, 9))
        pieces, ground = on_grid(random, slots=slots, num_pieces=int(random.integers(1, slots + 1)))
        best = least_memory_in_wholes(pieces, 1.0, ground.step_s, 1.0)
        schedule = plan(pieces, replace(ground, memory_bytes=round(best)), interval=1, grain_bytes=1)
        assert (schedule.peak_bytes, schedule.stall_s) == (round(best), 0), (pieces, ground)


@pytest.mark.parametrize("num_cases", [30, pytest.param(3000, marks=LONG)])
def test_memory_and_stall_are_within_two_grains_of_the_optimum(num_cases):
    """Any times and sizes; the optimum knows no grains and copies in no time."""
    random = np.random.default_rng(2)
    for _ in range(num_cases):
        pieces = drawn(random, num_pieces=int(random.integers(1, 14)))
        total = sum(p.num_bytes for p in pieces)
        bandwidth = total / float(np.exp(random.uniform(np.log(0.3), np.log(3))))
        grain = max(1, total // int(random.integers(20, 200)))
        ground = Ground(1.0, bandwidth, math.inf, UNLIMITED)
        best = least_memory(pieces, bandwidth, 1.0)
        assert (best is None) == (total > bandwidth)
        if best is not None:
            assert best == pytest.approx(demand(pieces, bandwidth, 1.0), abs=1e-4 * total)
            schedule = plan(pieces, ground, interval=1, grain_bytes=grain)
            assert schedule.stall_s == 0, (pieces, ground, grain)
            assert best - 1e-4 * total <= schedule.peak_bytes < best + 2 * grain, (pieces, ground, grain)
        budget = int(total * random.uniform(0, 0.6))
        schedule = plan(pieces, replace(ground, memory_bytes=budget), interval=1, grain_bytes=grain)
        wait_s = least_stall(pieces, bandwidth, 1.0, budget)
        assert schedule.peak_bytes <= budget
        grain_s = grain / bandwidth + 2e-4  # less by one: where cycles wait by turns, for a grain or not at all
        assert wait_s - grain_s <= schedule.stall_s < wait_s * 1.001 + 2 * grain_s, (pieces, ground, budget, grain)


@pytest.mark.parametrize("num_cases", [100, pytest.param(4000, marks=LONG)])
def test_an_engine_that_follows_a_schedule_takes_the_memory_and_the_time_that_it_says(num_cases):
    random = np.random.default_rng(3)
    regimes = set()
    for _ in range(num_cases):
        pieces = drawn(random, num_pieces=int(random.integers(1, 14)))
        total = sum(p.num_bytes for p in pieces)
        bandwidth = total / float(np.exp(random.uniform(np.log(0.5), np.log(3))))
        copying = bandwidth * float(np.exp(random.uniform(np.log(1.5), np.log(100))))
        ground = Ground(
            1.0, bandwidth, copying, int(total * random.uniform(0, 0.6)) if random.random() < 0.6 else UNLIMITED,
            "guard" if random.random() < 0.3 else "beside",
        )  # fmt: skip
        schedule = plan(pieces, ground, may_stall=bool(random.random() < 0.6), grain_bytes=max(1, total // 100))
        engine = Engine(schedule, 14)
        engine.finish()
        engine.check_states()
        stall_s = np.mean([engine.stall_s(n) for n in range(8, 12)])
        assert stall_s == pytest.approx(schedule.stall_s, abs=0.02 * schedule.period_s), (pieces, ground)
        peak = engine.peak_bytes(engine.begins[9], engine.begins[11])
        assert peak == schedule.peak_bytes <= ground.memory_bytes, (pieces, ground)
        regimes.add((schedule.regime, ground.copies))
    assert len(regimes) == 6


def test_with_layerwise_updates_a_link_that_carries_a_state_in_a_step_needs_no_snapshots():
    step_s, num = 1.0, 40
    pieces = [
        Piece(f"layer {i}", 5 * MB, ready, ready + step_s - 1e-3)
        for i, ready in enumerate(np.linspace(1.0, 0.4, num, endpoint=False).tolist())
    ]
    total = sum(p.num_bytes for p in pieces)
    ground = Ground(step_s, total / 0.98, 50 * total, UNLIMITED)
    assert plan(pieces, ground, grain_bytes=MB).regime == "in place"
    at_once = [replace(p, ready_s=0.0, deadline_s=0.8) for p in pieces]
    assert plan(at_once, ground, grain_bytes=MB).peak_bytes > 0.15 * total


def test_a_copy_is_made_as_late_as_possible_and_what_leaves_first_is_copied_last():
    pieces = [Piece(f"p{i}", 10, 0.0, 0.8) for i in range(10)]
    schedule = plan(pieces, Ground(1.0, 100.0, 1000.0, UNLIMITED), grain_bytes=10)
    copies = [(a.piece, a.copy_s) for a in schedule.actions if a.copy_s]
    assert [piece for piece, _ in copies] == [8, 9]
    assert [pytest.approx(span) for _, span in copies] == [(0.79, 0.8), (0.78, 0.79)]


def test_pieces_are_cut_at_multiples_of_the_grain_and_there_are_not_many():
    pieces = [Piece("large", 3000 * GRAIN_BYTES + 5, 0.0, 0.5), Piece("small", 5, 0.0, 0.5)]
    schedule = plan(pieces, Ground(1.0, 4000.0 * GRAIN_BYTES, 1e12, UNLIMITED))
    assert schedule.regime == "snapshots" and len(schedule.actions) <= MAX_GRAINS + 2
    assert all(a.first_byte % GRAIN_BYTES == 0 for a in schedule.actions)


def test_nothing_to_save_takes_nothing():
    ground = Ground(1.0, 1.0, 1.0, 0)
    for pieces in ([], [Piece("empty", 0, 0.0, 0.5)]):
        schedule = plan(pieces, ground)
        assert (schedule.actions, schedule.regime, schedule.stall_s, schedule.peak_bytes) == ((), "in place", 0, 0)


@pytest.mark.parametrize(
    ("piece", "ground"),
    [
        (Piece("p", 1, 0.0, 1.5), Ground(1.0, 1.0, 1.0, 0)),
        (Piece("p", 1, 0.5, 0.4), Ground(1.0, 1.0, 1.0, 0)),
        (Piece("p", 1, 0.0, 0.5), Ground(1.0, 0.0, 1.0, 0)),
        (Piece("p", 1, 0.0, 0.5), Ground(0.0, 1.0, 1.0, 0)),
        (Piece("p", 1, 0.0, 0.5), Ground(1.0, 1.0, 1.0, -1)),
    ],
)
def test_what_cannot_be_is_refused(piece, ground):
    with pytest.raises(UsageError):
        plan([piece], ground)


def test_plans_drift_with_what_was_measured_and_not_to_and_fro():
    ground = Ground(1.0, 1e9, 5e9, MB)
    assert not drifted(ground, ground)
    for name in ("step_s", "bandwidth", "copy_bandwidth"):
        for factor, far in ((1.09, False), (1 / 1.09, False), (1.12, True), (1 / 1.12, True)):
            assert drifted(ground, replace(ground, **{name: getattr(ground, name) * factor})) == far
    assert drifted(ground, replace(ground, memory_bytes=2 * MB))
    random, planned, plans = np.random.default_rng(0), ground, 0
    for noise in random.uniform(0.96, 1.04, 1000):
        measured = replace(ground, bandwidth=1e9 * noise)
        if drifted(planned, measured):
            planned, plans = measured, plans + 1
    assert plans == 0


def test_a_schedule_is_explained_in_a_line():
    pieces = [Piece("p", 900 * 10**6, 0.0, 0.8)]
    told = [
        explain(plan(pieces, Ground(1.0, bandwidth, 1e12, UNLIMITED), may_stall=may))
        for bandwidth, may in ((2e9, False), (1e9, False), (5e8, False), (5e8, True))
    ]
    assert told[0] == (
        "900 MB at 2 GB/s take 450 ms, a step 1 s; all leaves from where it is; training waits for nothing"
    )
    assert "snapshotted" in told[1] and "waits for nothing" in told[1]
    assert "every 2 steps one is saved" in told[2] and "waits for nothing" in told[2]
    assert "training waits 800 ms for each, 80.0% of its time" in told[3]
    assert not any("\n" in text for text in told)
