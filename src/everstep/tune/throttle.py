"""An emulated link: how long to wait so that no more than a given bandwidth gets through. Pure: the clock is given."""

from __future__ import annotations

from everstep.errors import UsageError


class Throttle:
    """A token bucket in the form of the time at which the link is free again. One thread, a clock that does not go back.

    A chunk takes `num_bytes / bandwidth` seconds of the link, one chunk after another. Time that the link was idle is lost,
    but for `burst_s`: a thread that comes a little late, because sleeping is not exact, makes up for so much. Therefore the
    chunks that begin and end within t seconds have at most `bandwidth · (t + burst_s)` bytes, and as long as none begins
    later than `burst_s` after the link was free, the bandwidth is reached exactly.
    """

    def __init__(self, bandwidth: float, *, burst_s: float = 0.01) -> None:
        if not bandwidth > 0 or not burst_s >= 0:
            raise UsageError(f"a throttle needs a bandwidth above 0 and a burst of 0 s or more, not {bandwidth}, {burst_s}")
        self.bandwidth = bandwidth
        self.burst_s = burst_s
        self._free_s = float("-inf")

    def delay(self, now: float, num_bytes: int) -> float:
        """Take the link for a chunk that begins now; seconds from now until it is through.

        Carry the chunk, then wait for what is left of them: it counts as out only then.
        """
        self._free_s = max(self._free_s, now - self.burst_s) + num_bytes / self.bandwidth
        return max(0.0, self._free_s - now)
