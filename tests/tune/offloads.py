"""For the tests of schedules: instances, an engine on a simulated clock, and exact optima by scipy's HiGHS.

Nothing of the planner is used here but its dataclasses.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import lil_matrix

from everstep.tune.schedule import Ground, Piece, Schedule

UNLIMITED = 1 << 60


def drawn(random: np.random.Generator, *, num_pieces: int = 12, step_s: float = 1.0) -> list[Piece]:
    """Updates in one block, layer by layer in backward, or at any time; sizes of one kind or of very different ones."""
    sizes = np.maximum(1, np.exp(random.uniform(np.log(100), np.log(random.choice([200, 5000])), num_pieces))).astype(int)
    shape = random.choice(["block", "layers", "any"])
    if shape == "block":
        end_s = random.uniform(0.5, 1.0) * step_s
        return [Piece(f"p{i}", int(size), 0.0, end_s) for i, size in enumerate(sizes)]
    if shape == "layers":
        ready_s = np.sort(random.uniform(0.3, 1.0, num_pieces))[::-1] * step_s
        windows_s = np.full(num_pieces, step_s - random.uniform(0.0, 0.1) * step_s)
    else:
        ready_s = random.uniform(0.0, 1.0, num_pieces).round(1) * step_s
        windows_s = random.uniform(0.1, 1.0, num_pieces).round(1) * step_s
    return [
        Piece(f"p{i}", int(size), float(r), float(r + w))
        for i, (size, r, w) in enumerate(zip(sizes, ready_s, windows_s, strict=True))
    ]


class Engine:
    """Carries a schedule out by the rules of its module's docstring, and measures what happens."""

    def __init__(self, schedule: Schedule, cycles: int) -> None:
        self.s, self.ground = schedule, schedule.ground
        period_s = schedule.interval * self.ground.step_s
        order = sorted(
            (n * schedule.period_s + a.offload_s[0], n, i) for n in range(cycles) for i, a in enumerate(schedule.actions)
        )
        self.link = [(n, i) for _, n, i in order]
        copies = sorted(
            (n * schedule.period_s + a.copy_s[0], n, i)
            for n in range(cycles) for i, a in enumerate(schedule.actions) if a.copy_s
        )  # fmt: skip
        self.copies = [(n, i) for _, n, i in copies]
        self.link_free_s = self.copy_free_s = 0.0
        carrying_s = sum(p.num_bytes for p in schedule.pieces) / self.ground.bandwidth
        if carrying_s > period_s:  # it falls behind with every cycle until guards wait: as after many of them
            self.link_free_s = carrying_s + max(p.deadline_s for p in schedule.pieces)
        self.begins: list[float] = []
        self.ready: dict[tuple[int, int], float] = {}
        self.gone: dict[tuple[int, int], float] = {}
        self.offloaded: dict[tuple[int, int], tuple[float, float]] = {}
        self.copied: dict[tuple[int, int], tuple[float, float]] = {}
        self.stalls: list[tuple[float, float]] = []
        ticks: dict[tuple[float, int], list[tuple[int, int]]] = {}
        for n in range(cycles):
            ticks[round(n * period_s, 9), 1] = []
            for p, piece in enumerate(schedule.pieces):
                ticks.setdefault((round(n * period_s + piece.deadline_s, 9), 0), []).append((n, p))
                ticks.setdefault((round(n * period_s + piece.ready_s, 9), 2), []).append((n, p))
        late_s = 0.0
        for (tick, kind), those in sorted(ticks.items()):
            now = tick + late_s
            if kind == 1:
                self.begins.append(now)
            for each in those:
                if kind == 2:
                    self.ready[each] = now
            if kind == 0:
                until = self.guard(those, now)
                self.stalls.append((now, until))
                late_s += until - now

    def guard(self, those: list[tuple[int, int]], now: float) -> float:
        mine = [(n, i) for n, p in those for i, a in enumerate(self.s.actions) if a.piece == p]
        until = max([now, *(self.offload(n, i) for n, i in mine if not self.s.actions[i].copy_s)])
        copies = [each for each in mine if self.s.actions[each[1]].copy_s]
        until = max([until, *(self.copy(n, i, now, until) for n, i in copies)])
        for each in those:
            self.gone[each] = until
        return until

    def offload(self, n: int, i: int) -> float:
        while (n, i) not in self.offloaded:
            m, j = self.link.pop(0)
            action = self.s.actions[j]
            assert (m, action.piece) in self.ready, "the link waits for what is not ready before what the guard waits for"
            begin = max(self.link_free_s, self.ready[m, action.piece])
            self.link_free_s = begin + action.num_bytes / self.ground.bandwidth
            self.offloaded[m, j] = begin, self.link_free_s
        return self.offloaded[n, i][1]

    def copy(self, n: int, i: int, now: float, out: float) -> float:
        """Until this one is there. Those of a guard that waits begin at the latest when all that leaves in place is out."""
        while (n, i) not in self.copied:
            m, j = self.copies.pop(0)
            action = self.s.actions[j]
            assert action.copy_s is not None
            begin = max(min(self.begins[m] + action.copy_s[0], out), self.copy_free_s, self.ready[m, action.piece])
            if self.ground.copies == "guard":
                begin = max(begin, now)
            begin = self.room_at(begin, action.num_bytes)
            self.copy_free_s = begin + action.num_bytes / self.ground.copy_bandwidth
            self.copied[m, j] = begin, self.copy_free_s
        return self.copied[n, i][1]

    def room_at(self, at_s: float, num_bytes: int) -> float:
        """When, from then on, there is memory for this: older snapshots must have left."""
        slack_s = 1e-9 * self.ground.step_s
        while True:
            held = [each for each in self.copied if self.offloaded.get(each, (0.0, np.inf))[1] > at_s + slack_s]
            if sum(self.s.actions[i].num_bytes for _, i in held) + num_bytes <= self.s.peak_bytes:
                return at_s
            at_s = max(at_s, min(self.offload(*each) for each in held))

    def finish(self) -> None:
        while self.link:
            self.offload(*self.link[-1])

    def check_states(self) -> None:
        """Every byte of every piece, once, and of its own cycle."""
        slack_s = 1e-6 * self.ground.step_s
        for (n, i), (begin, end) in self.offloaded.items():
            action = self.s.actions[i]
            if (n, action.piece) not in self.gone:
                continue
            gone = self.gone[n, action.piece]
            if (n, i) in self.copied:
                assert self.ready[n, action.piece] - slack_s <= self.copied[n, i][0]
                assert self.copied[n, i][1] <= gone + slack_s
            else:
                assert self.ready[n, action.piece] - slack_s <= begin and end <= gone + slack_s
        for p, piece in enumerate(self.s.pieces):
            ranges = sorted((a.first_byte, a.first_byte + a.num_bytes) for a in self.s.actions if a.piece == p)
            assert [r[0] for r in ranges] + [piece.num_bytes] == [0] + [r[1] for r in ranges] or piece.num_bytes == 0

    def stall_s(self, n: int) -> float:
        """Of the time from the begin of cycle n to that of the next."""
        return self.begins[n + 1] - self.begins[n] - self.s.interval * self.ground.step_s

    def peak_bytes(self, begin_s: float, end_s: float) -> int:
        """Of the memory between two times."""
        scale = 1e9 / self.ground.step_s
        changes = []
        for each, (begin, _) in self.copied.items():
            num_bytes = self.s.actions[each[1]].num_bytes
            changes += [(round(begin * scale), num_bytes), (round(self.offloaded[each][1] * scale), -num_bytes)]
        held = peak = 0
        for at, change in sorted(changes):
            held += change
            if begin_s <= at / scale <= end_s:
                peak = max(peak, held)
        return peak


def demand(pieces: list[Piece], bandwidth: float, period_s: float) -> float:
    """The most that a window of time holds of pieces that are ready and due in it, less what the link carries meanwhile."""
    jobs = [(p.ready_s + n * period_s, p.deadline_s + n * period_s, p.num_bytes) for p in pieces for n in range(4)]
    found = 0.0
    for begin in {r for r, _, _ in jobs if r < period_s * (1 + 1e-9)}:
        inside = sorted((d, b) for r, d, b in jobs if r >= begin - 1e-9)
        total = 0.0
        for due, num_bytes in inside:
            total += num_bytes
            found = max(found, total - bandwidth * (due - begin))
    return found


class _Slots:
    """A cycle cut where something becomes ready or due. Place p of a piece is the p-th slot after it is ready."""

    def __init__(self, pieces: list[Piece], period_s: float, cycles: int = 2) -> None:
        marks = {0.0, *(round(t % period_s, 9) % period_s for p in pieces for t in (p.ready_s, p.deadline_s))}
        self.marks = sorted(marks)
        self.lengths_s = np.diff([*self.marks, period_s])
        self.num = len(self.marks)
        self.places = cycles * self.num
        self.first = [self.marks.index(round(p.ready_s % period_s, 9) % period_s) for p in pieces]
        self.window = []
        for piece, first in zip(pieces, self.first, strict=True):
            length, count = 0.0, 0
            while length < piece.deadline_s - piece.ready_s - 1e-6:
                length += self.lengths_s[(first + count) % self.num]
                count += 1
            self.window.append(count)


def least_memory(pieces: list[Piece], bandwidth: float, step_s: float) -> float | None:
    """Of snapshots that are made in no time and given back byte by byte (a linear program); None if it cannot be."""
    return _fluid(pieces, bandwidth, step_s, None)


def least_stall(pieces: list[Piece], bandwidth: float, step_s: float, memory_bytes: float) -> float:
    found = _fluid(pieces, bandwidth, step_s, memory_bytes)
    assert found is not None
    return found


def _fluid(pieces: list[Piece], bandwidth: float, step_s: float, memory_bytes: float | None) -> float | None:
    """Variables: bytes of each piece at each of its places, the same in the stall at that slot's end, stalls, the peak."""
    slots = _Slots(pieces, step_s)
    num, places = slots.num, slots.places
    count = len(pieces) * places

    def x(i: int, p: int) -> int:
        return i * places + p

    def y(i: int, p: int) -> int:
        return count + i * places + p

    stall, peak = 2 * count, 2 * count + num
    upper = lil_matrix((3 * num, peak + 1))
    limits = np.zeros(3 * num)
    equal = lil_matrix((len(pieces), peak + 1))
    for s in range(num):
        limits[s] = bandwidth * slots.lengths_s[s]
        upper[num + s, stall + s] = -bandwidth
        upper[2 * num + s, peak] = -1
    bounds = [(0.0, None)] * (2 * count) + [(0.0, None)] * num + [(0.0, memory_bytes)]
    due = {(slots.first[i] + w - 1) % num for i, w in enumerate(slots.window) if w}
    for s in range(num):
        if memory_bytes is None or s not in due:
            bounds[stall + s] = (0.0, 0.0)
    for i in range(len(pieces)):
        for p in range(places):
            s = (slots.first[i] + p) % num
            upper[s, x(i, p)] = 1
            upper[num + s, y(i, p)] = 1
            equal[i, x(i, p)] = equal[i, y(i, p)] = 1
            if p >= slots.window[i]:  # in memory at the begin of this slot is what leaves from here on
                for q in range(p, places):
                    upper[2 * num + s, x(i, q)] += 1
                    upper[2 * num + s, y(i, q)] += 1
    cost = np.zeros(peak + 1)
    cost[peak] = 1.0 if memory_bytes is None else 0.0
    if memory_bytes is not None:
        cost[stall : stall + num] = 1.0
    found = linprog(cost, upper.tocsr(), limits, equal.tocsr(), [p.num_bytes for p in pieces], bounds, method="highs")
    assert found.status in (0, 2), found.message
    return float(found.fun) if found.status == 0 else None


def least_memory_in_wholes(pieces: list[Piece], bandwidth: float, step_s: float, slot_s: float) -> float | None:
    """The model of Checkflow, with slots of one length: a piece is in memory as a whole until the end of the slot in which
    its last byte leaves. Snapshots are made in no time, at the deadline."""
    num = round(step_s / slot_s)
    places, count = 2 * num, len(pieces) * 2 * num
    first = [round(p.ready_s / slot_s) % num for p in pieces]
    window = [round((p.deadline_s - p.ready_s) / slot_s) for p in pieces]
    rows, low, high = [], [], []

    def add(entries: dict[int, float], least: float, most: float) -> None:
        rows.append(entries)
        low.append(least)
        high.append(most)

    peak = 2 * count
    for i in range(len(pieces)):
        add({i * places + p: 1.0 for p in range(places)}, 1, 1)
        for p in range(window[i], places):
            add({i * places + p: 1.0, count + i * places + p: -1.0}, -np.inf, 0)
            if p > window[i]:
                add({count + i * places + p: 1.0, count + i * places + p - 1: -1.0}, -np.inf, 0)
    for s in range(num):
        those = [(i, p) for i in range(len(pieces)) for p in range(places) if (first[i] + p) % num == s]
        add({i * places + p: float(pieces[i].num_bytes) for i, p in those}, -np.inf, bandwidth * slot_s)
        held = {count + i * places + p: float(pieces[i].num_bytes) for i, p in those if p >= window[i]}
        add({**held, peak: -1.0}, -np.inf, 0)
    matrix = lil_matrix((len(rows), peak + 1))
    for r, entries in enumerate(rows):
        for column, value in entries.items():
            matrix[r, column] = value
    cost = np.zeros(peak + 1)
    cost[peak] = 1
    whole = np.concatenate([np.zeros(count), np.ones(count), [0]])
    bounds = Bounds(np.zeros(peak + 1), np.concatenate([np.ones(2 * count), [np.inf]]))
    found = milp(cost, integrality=whole, bounds=bounds, constraints=LinearConstraint(matrix.tocsr(), low, high))
    assert found.status in (0, 2), found.message
    return float(found.fun) if found.status == 0 else None


def on_grid(random: np.random.Generator, *, slots: int, num_pieces: int) -> tuple[list[Piece], Ground]:
    """Pieces of one byte on a link that carries one byte a slot."""
    found = []
    for i in range(num_pieces):
        ready, window = int(random.integers(slots)), int(random.integers(1, slots + 1))
        found.append(Piece(f"p{i}", 1, float(ready), float(ready + window)))
    return found, Ground(float(slots), 1.0, float("inf"), UNLIMITED)
