"""A schedule as a picture: what training, link, copies and memory do in a cycle, planned and measured. Pure: SVG as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from everstep.tune.choice import seconds
from everstep.tune.link import Span
from everstep.tune.schedule import Schedule, explain, size

Row = Literal["training", "link", "copies"]

_WIDTH, _LEFT, _TOP = 1080, 120, 64
_LANE, _GAP, _MEMORY = 18, 26, 90
_COLOURS = {"step": "#d5dbe3", "stall": "#d1495b", "in place": "#3a7ca5", "snapshot": "#e08e2b", "seen": "#5b5b5b"}


@dataclass(frozen=True)
class Seen:
    """Something that was measured: times since the begin of the cycle."""

    row: Row
    name: str
    begin_s: float
    end_s: float


def draw(schedule: Schedule, measured: Sequence[Seen] = (), memory: Sequence[tuple[float, int]] = ()) -> str:
    """One cycle. In each row the plan is above, what was measured below, in grey. `memory`: (time, bytes held from then on).

    What reaches into the next cycle is drawn at the left, where the cycle before left it. If what was measured took longer
    than planned, the picture is wider.
    """
    end_s = max([schedule.period_s, *(seen.end_s for seen in measured), *(at_s for at_s, _ in memory)])
    picture = _Picture(end_s, schedule.period_s)
    names: tuple[Row, ...] = ("training", "link", "copies")
    rows = {name: picture.row(name, 2 * _LANE) for name in names}
    _draw_training(picture, schedule, rows["training"])
    for index, action in enumerate(schedule.actions):
        about = f"{schedule.pieces[action.piece].name}, {size(action.num_bytes)}, {action.kind}"
        parts: list[tuple[Row, Span]] = [("link", action.offload_s)]
        if action.copy_s:
            parts.append(("copies", action.copy_s))
        picture.open(f'class="action" data-action="{index}" data-piece="{action.piece}" data-kind="{action.kind}"')
        for row, (begin_s, until_s) in parts:
            picture.bar(rows[row], begin_s, until_s, action.kind, f"{about}: {seconds(begin_s)} to {seconds(until_s)}")
        picture.close()
    for seen in measured:
        about = f"measured: {seen.name}, {seconds(seen.begin_s)} to {seconds(seen.end_s)}"
        picture.bar(rows[seen.row] + _LANE, seen.begin_s, seen.end_s, "seen", about, wrap=False)
    _draw_memory(picture, schedule, memory)
    return picture.text(explain(schedule))


def _draw_training(picture: _Picture, schedule: Schedule, top: float) -> None:
    step_s, late_s = schedule.ground.step_s, 0.0
    stalls = sorted(schedule.stalls)
    begin_s, num_bars = 0.0, schedule.interval if schedule.interval <= 50 else 1
    for bar in range(num_bars):
        until_s = (bar + 1) * step_s * schedule.interval / num_bars + late_s
        while stalls and stalls[0][0] <= until_s:
            late_s += stalls[0][1] - stalls[0][0]
            until_s += stalls[0][1] - stalls[0][0]
            stalls.pop(0)
        picture.bar(top, begin_s, until_s, "step", f"step {bar + 1} of {num_bars}" if num_bars > 1 else "training")
        begin_s = until_s
    for begin_s, until_s in schedule.stalls:
        picture.bar(top, begin_s, until_s, "stall", f"training waits {seconds(until_s - begin_s)}")


def _draw_memory(picture: _Picture, schedule: Schedule, memory: Sequence[tuple[float, int]]) -> None:
    planned, period_s = _held(schedule), schedule.period_s
    top = max([1, schedule.peak_bytes, *(num_bytes for _, num_bytes in memory)])
    y = picture.row("memory", _MEMORY)
    picture.curve(y, [*planned, (period_s, planned[-1][1])], top, _COLOURS["snapshot"], "memory-planned")
    if memory:
        picture.curve(y, [*memory, (max(period_s, memory[-1][0]), memory[-1][1])], top, _COLOURS["seen"], "memory-measured")
    picture.label(_LEFT - 8, y + 12, size(top), "end")


def _held(schedule: Schedule) -> list[tuple[float, int]]:
    """Time and bytes of snapshots from then on, over one of the cycles that follow each other."""
    changes: list[tuple[float, int]] = []
    held = 0
    for action in schedule.actions:
        if action.copy_s is not None:
            begin_s, end_s = action.copy_s[0], action.offload_s[1]
            begin, end = begin_s % schedule.period_s, end_s % schedule.period_s
            held += action.num_bytes * (math.floor((end_s - begin_s) / schedule.period_s) + (end < begin))
            changes += [(begin, action.num_bytes), (end, -action.num_bytes)]
    found = [(0.0, held)]
    for at_s, change in sorted(changes):
        held += change
        found.append((at_s, held))
    return found


class _Picture:
    """Rows from top to bottom; times from left to right."""

    def __init__(self, end_s: float, period_s: float) -> None:
        self._end_s, self._period_s = end_s, period_s
        self._y = float(_TOP)
        self._parts: list[str] = []

    def row(self, name: str, height: float) -> float:
        """The top of a new row."""
        top = self._y
        self._y += height + _GAP
        self.label(_LEFT - 8, top + 13 + (14 if name == "memory" else 0), name, "end")
        self._parts.append(
            f'<rect x="{_LEFT}" y="{top:.1f}" width="{_WIDTH - _LEFT - 20}" height="{height:.1f}" fill="#f6f7f9"/>'
        )
        return top

    def open(self, attributes: str) -> None:
        self._parts.append(f"<g {attributes}>")

    def close(self) -> None:
        self._parts.append("</g>")

    def label(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def bar(self, top: float, begin_s: float, end_s: float, kind: str, about: str, *, wrap: bool = True) -> None:
        """What goes over the end of the period goes on at its begin."""
        for first_s, last_s in _wrapped(begin_s, end_s, self._period_s) if wrap else [(begin_s, end_s)]:
            width = max(0.5, self._x(last_s) - self._x(first_s))
            self._parts.append(
                f'<rect x="{self._x(first_s):.2f}" y="{top + 1:.1f}" width="{width:.2f}" height="{_LANE - 2}" '
                f'fill="{_COLOURS[kind]}" stroke="#fff" stroke-width="0.4"><title>{escape(about)}</title></rect>'
            )

    def curve(self, top: float, points: Iterable[tuple[float, int]], most: int, colour: str, name: str) -> None:
        """Steps: a value holds until the next."""
        corners: list[str] = []
        last = None
        for at_s, value in points:
            y = top + _MEMORY * (1 - value / most)
            if last is not None:
                corners.append(f"{self._x(at_s):.2f},{last:.2f}")
            corners.append(f"{self._x(at_s):.2f},{y:.2f}")
            last = y
        self._parts.append(
            f'<polyline class="{name}" points="{" ".join(corners)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )

    def text(self, title: str) -> str:
        axis = []
        for tick in range(6):
            at_s = self._end_s * tick / 5
            place = f'x="{self._x(at_s):.1f}" y="{self._y + 4:.1f}"'
            axis.append(f'<text {place} text-anchor="middle">{escape(seconds(at_s))}</text>')
        legend = [("in place", "in place"), ("snapshot", "snapshot"), ("stall", "training waits"), ("seen", "measured")]
        for number, (kind, text) in enumerate(legend):
            x = _LEFT + 140 * number
            axis.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{_COLOURS[kind]}"/>')
            axis.append(f'<text x="{x + 18}" y="46">{text}</text>')
        height = self._y + 20
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
            f'height="{height:.0f}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="20" y="22" font-size="13">{escape(title)}</text>',
            *self._parts, *axis, "</svg>", "",
        ])  # fmt: skip

    def _x(self, at_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 20) * at_s / self._end_s


def _wrapped(begin_s: float, end_s: float, period_s: float) -> list[tuple[float, float]]:
    first = math.floor(begin_s / period_s + 1e-9)
    begin_s, end_s = max(0.0, begin_s - first * period_s), end_s - first * period_s
    found = []
    while end_s > period_s * (1 + 1e-9):
        found.append((begin_s, period_s))
        begin_s, end_s = 0.0, end_s - period_s
    return [*found, (begin_s, end_s)]
