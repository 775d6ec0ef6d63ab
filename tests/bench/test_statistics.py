"""Medians, slopes and the order of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.bench import statistics

ratios = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40)


@given(ratios)
def test_the_interval_holds_the_median_and_lies_within_the_values(values):
    found = statistics.median_interval(values, resamples=200)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_the_interval_shrinks_with_more_pairs():
    few = statistics.median_interval([1.0, 1.1, 0.9, 1.05])
    many = statistics.median_interval([1.0, 1.1, 0.9, 1.05] * 20)
    assert many.high - many.low < few.high - few.low


def test_the_interval_is_the_same_every_time():
    assert statistics.median_interval([1.0, 2.0, 4.0]) == statistics.median_interval([1.0, 2.0, 4.0])


def test_a_median_of_nothing_is_refused():
    with pytest.raises(ValueError):
        statistics.median_interval([])


def test_the_slope_of_a_saw_tooth_without_growth_is_not_told_from_none():
    found = statistics.slope_interval([1000 + 50 * (i % 7) for i in range(400)])
    assert found.low <= 0 <= found.high and abs(found.median) < 0.1


def test_the_slope_of_a_leak_under_a_saw_tooth_is_found():
    found = statistics.slope_interval([3 * i + 50 * (i % 7) for i in range(400)])
    assert 2.9 < found.low <= found.median <= found.high < 3.1


def test_too_few_values_for_a_slope_are_refused():
    with pytest.raises(ValueError):
        statistics.slope_interval([1.0] * 50)


@given(st.integers(1, 60), st.integers(0, 1000))
def test_every_pair_has_two_blocks_of_each_kind_and_cancels_a_linear_drift(num_pairs, seed):
    orders = statistics.abba(num_pairs, seed=seed)
    assert len(orders) == num_pairs
    for order in orders:
        assert sum(order) == 2
        assert statistics.pair_ratio(order, [10.0, 11.0, 12.0, 13.0]) == 1.0
    first_on = sum(order[0] for order in orders)
    assert first_on - (num_pairs - first_on) in (0, 1)


def test_the_order_of_pairs_is_by_lot():
    assert len({tuple(statistics.abba(20, seed=seed)) for seed in range(5)}) > 1


def test_a_ratio_is_time_with_over_time_without():
    assert statistics.pair_ratio((True, False, False, True), [3.0, 2.0, 2.0, 3.0]) == 1.5
