"""Pictures of schedules are XML, and show every action."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from offloads import UNLIMITED, drawn

from everstep.tune.picture import Seen, draw
from everstep.tune.schedule import Ground, Piece, plan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("seed", range(12))
def test_a_picture_parses_and_has_an_element_for_each_action_and_measurement(seed):
    random = np.random.default_rng(seed)
    pieces = drawn(random)
    total = sum(p.num_bytes for p in pieces)
    ground = Ground(1.0, total / random.uniform(0.5, 3), 10.0 * total, UNLIMITED)
    schedule = plan(pieces, ground, may_stall=bool(seed % 2), grain_bytes=total // 50)
    seen = [Seen("link", "<a> & \"b\"", 0.1, 0.3), Seen("training", "backward", 0.0, 1.1)]
    root = ElementTree.fromstring(draw(schedule, seen, [(0.0, 0), (0.5, total // 7), (1.0, 0)]))
    actions = root.findall(f"{SVG}g[@class='action']")
    assert [int(a.get("data-piece")) for a in actions] == [a.piece for a in schedule.actions]
    for element, action in zip(actions, schedule.actions, strict=True):
        assert len(element.findall(f"{SVG}rect")) >= (2 if action.copy_s else 1)
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert sum(title.startswith("measured: ") for title in titles) == len(seen)
    assert len(root.findall(f"{SVG}polyline")) == 2
    assert sum("training waits" in title for title in titles[1:]) == len(schedule.stalls)
    for rect in root.iter(f"{SVG}rect"):
        if rect.find(f"{SVG}title") is not None:
            assert float(rect.get("x")) >= 119 and float(rect.get("x")) + float(rect.get("width")) <= 1061


def test_memory_in_the_picture_rises_to_the_peak():
    schedule = plan([Piece("p", 1000, 0.0, 0.8)], Ground(1.0, 1000.0, 1e5, UNLIMITED), grain_bytes=10)
    curve = ElementTree.fromstring(draw(schedule)).find(f"{SVG}polyline").get("points")
    heights = [float(point.split(",")[1]) for point in curve.split()]
    assert schedule.peak_bytes == 200
    assert max(heights) - min(heights) == 90
