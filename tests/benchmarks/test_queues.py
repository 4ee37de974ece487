"""Depths of queues by layer: how they are measured in a worker, put together, and drawn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from disaggregated import depths, heatmap, queues

from moesaic.core.request import Request, SamplingParams
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import make_policy
from moesaic.policy.scheduling.schedulers.actions import Action, RequestsArrived, RunSegment
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler


def scheduler() -> AsyncScheduler:
    """Of three layers with experts."""
    return AsyncScheduler(BatchLimits(4, 64, 64), KVBlocks(16, 16, False), make_policy("mtfs"), 3, top_k=2)


def test_rows_count_for_as_long_as_they_waited() -> None:
    one = scheduler()
    watched = depths.Watched(one, 0.0)
    watched.before_change(1.0)
    one._ready._rows[1] = 4
    watched.before_change(3.0)
    one._ready._rows[1] = 0
    assert watched.ask(4.0) == (2.0, [0.0, 2.0, 0.0, 0.0])
    assert watched.ask(5.0) == (4.5, [0.0, 0.0, 0.0, 0.0])
    watched.before_change(5.5)
    one._ready._rows[3] = 8
    assert watched.ask(6.0) == (5.5, [0.0, 0.0, 0.0, 4.0])  # no change since, but time has passed


def test_schedulers_are_watched_from_their_making_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("__init__", "handle"):  # as they are, so that they are put back
        monkeypatch.setattr(AsyncScheduler, name, getattr(AsyncScheduler, name))
    now = 0.0
    begun: list[tuple[Path, depths.Watched]] = []
    monkeypatch.setenv(depths.FOLDER, str(tmp_path))
    monkeypatch.setattr(depths, "start", lambda file, watched: begun.append((file, watched)))
    monkeypatch.setattr("disaggregated.depths.time.monotonic", lambda: now)
    depths.watch_worker()
    one = scheduler()
    [(file, watched)] = begun
    assert file.parent == tmp_path

    def arrive(number: int) -> list[Action]:
        return one.handle(RequestsArrived([Request(number, [5, 6, 7], SamplingParams(max_tokens=4))]), now)

    assert isinstance(arrive(0)[-1], RunSegment)
    one._ready._rows[2] = 6
    now = 2.0
    arrive(1)
    one._ready._rows[2] = 0
    now = 3.0
    assert watched.ask(now) == (1.5, [0.0, 0.0, 4.0, 0.0])


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    file = depths.file_of(tmp_path, 7)
    with file.open("w") as lines:
        depths.write(lines, (0.5, [1.0, 2.0]))
        lines.write(json.dumps((1.0, [3.0, 4.0])))
    assert depths.read(tmp_path, 7) == [(0.5, [1.0, 2.0])]


def test_samples_become_means_by_time() -> None:
    samples = [(0.0, [2.0]), (0.1, [4.0]), (0.3, [8.0]), (0.7, [99.0])]
    assert depths.binned([samples], 0.0, 0.6, 0.2) == [[3.0], [8.0], [8.0]]  # the last one stands
    assert depths.binned([samples, [(0.5, [1.0])]], 0.0, 0.6, 0.2) == [[3.0], [8.0], [9.0]]
    assert depths.binned([samples], 0.2, 0.4, 0.2) == [[8.0], [8.0]]  # what was before does not count


def test_depths_by_place_are_those_of_the_second_half() -> None:
    seen = [[9.0, 9.0], [9.0, 9.0], [1.0, 2.0], [3.0, 6.0]]
    watched = queues.Watched(
        [0.0, 1.0, 2.0], [0, 1, 2], [0, 1, 2], [0] * 3, [0] * 3, [0] * 3, seen, [0, 4, 9], [0, 1, 3]
    )
    found = queues.evaluate(watched, [0.1], 1.0)
    assert (found["waiting_rows_by_place"], found["waiting_rows"]) == ([2.0, 4.0], 6.0)
    assert (found["runs"], found["partial_runs"]) == (5, 2)


@pytest.mark.parametrize(
    ("top", "found"), [(30, [0.2, 0.5, 1, 2, 5, 10, 20]), (5, [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]), (0, [])]
)
def test_colours_begin_at_round_numbers(top: float, found: list[float]) -> None:
    assert heatmap.thresholds(top) == pytest.approx(found)


def drawn(panels: list[heatmap.Panel], places: list[str]) -> ET.Element:
    return ET.fromstring(heatmap.draw(panels, places, 3.0, "title", "seconds", "rows"))


def paths(root: ET.Element, kind: str) -> list[ET.Element]:
    found = root.iter("{http://www.w3.org/2000/svg}path")
    return [one for one in found if kind in one.get("class", "").split()]


def texts(root: ET.Element) -> list[str]:
    return [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]


def test_neighbours_of_one_colour_are_one_rectangle() -> None:
    panel = heatmap.Panel("a < b", [[0.0, 3.0], [0.0, 3.0], [4.0, 0.0]])
    root = drawn([panel, heatmap.Panel("c", [[0.0, 0.0]] * 3)], ["0", "sampler"])
    [level] = paths(root, "depth")  # 3 and 4 are of one colour, and nothing waits in the second panel
    assert level.get("d", "").count("M") == 2
    assert len(paths(root, "frame")) == len(paths(root, "bar")) == 2
    assert {"a < b", "sampler", "mean: 3.3 in all", "mean: 0.0 in all", "1.3", "2.0"} <= set(texts(root))


def test_of_many_layers_some_are_named() -> None:
    names = [*(f"L{layer}" for layer in range(48)), "sampler"]
    shown = [text for text in texts(drawn([heatmap.Panel("a", [[1.0] * 49])], names)) if text in names]
    assert shown == ["L0", "L5", "L10", "L15", "L20", "L25", "L30", "L35", "L40", "sampler"]


def test_the_picture_shows_the_last_round() -> None:
    rates = {"input_per_s": 2.0, "output_per_s": 1.0, "places": ["0", "sampler"]}
    rows = [
        {"policy": policy, "round": turn, **rates, "over_time": {"depths": [[turn + 1.0, 0.0]] * 4}}
        for turn in range(2)
        for policy in queues.POLICIES
    ]
    shown = texts(ET.fromstring(queues.picture(rows, argparse.Namespace(seconds=1.0))))
    assert sum(text.endswith("2.0 requests/s in, 1.0 out") for text in shown) == len(queues.POLICIES)
    assert shown.count("mean: 2.0 in all") == len(queues.POLICIES)
