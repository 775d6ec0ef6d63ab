"""An emulated link carries no more than its bandwidth, and no less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import UsageError
from everstep.tune.throttle import Throttle

chunks = st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 0.05)), min_size=1, max_size=40)
"""Bytes, and how much later than it could a chunk begins."""


def carried(throttle: Throttle, given) -> list[tuple[float, float, int]]:
    """Begin, end and bytes of each chunk, by a thread that waits as it is told."""
    now, found = 100.0, []
    for num_bytes, late_s in given:
        now += late_s
        delay_s = throttle.delay(now, num_bytes)
        found.append((now, now + delay_s, num_bytes))
        now += delay_s
    return found


@given(chunks, st.floats(1e3, 1e9), st.floats(0, 0.02))
def test_between_any_two_times_no_more_gets_through_than_the_bandwidth_and_the_burst(given, bandwidth, burst_s):
    done = carried(Throttle(bandwidth, burst_s=burst_s), given)
    for i, (begin, _, _) in enumerate(done):
        total = 0
        for _, end, num_bytes in done[i:]:
            total += num_bytes
            assert total <= bandwidth * (end - begin + burst_s) * (1 + 1e-9) + 1


@given(chunks, st.floats(1e3, 1e6))
def test_a_thread_that_is_late_by_less_than_the_burst_reaches_the_bandwidth(given, bandwidth):
    given = [(n, min(late_s, 0.01, n / bandwidth) if i else 0.0) for i, (n, late_s) in enumerate(given)]
    done = carried(Throttle(bandwidth, burst_s=0.01), [(10_000, 0.0), *given])
    assert done[-1][1] - done[0][1] == pytest.approx(sum(n for n, _ in given) / bandwidth, abs=1e-6)


def test_a_chunk_takes_its_time_and_an_idle_link_saves_none_of_it():
    throttle = Throttle(100.0, burst_s=0.0)
    assert throttle.delay(0.0, 50) == 0.5
    assert throttle.delay(0.5, 50) == 0.5
    assert throttle.delay(10.0, 50) == 0.5
    assert throttle.delay(10.0, 50) == 1.0


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("nan")])
def test_a_link_without_bandwidth_is_refused(bandwidth):
    with pytest.raises(UsageError):
        Throttle(bandwidth)
