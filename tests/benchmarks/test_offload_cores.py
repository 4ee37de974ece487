"""Two cores as two levels: what the benchmark measures, compares and draws."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import make_checkpoint
import pytest
from offloading import cores, gantt, latency, percore, sessions
from rich.console import Console

from moesaic.cost import ops
from moesaic.kernels import table
from moesaic.policy.offloading.pipeline import SCHEDULES, decode
from moesaic.policy.offloading.tasks import Kind, Lane, Shape
from moesaic.policy.offloading.timeline import run

SVG = "{http://www.w3.org/2000/svg}"
needs_native = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint.write("qwen3-moe-0.01b", path)
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(percore, "BEYOND_CACHES", 1 << 20)
    monkeypatch.setattr(percore, "ROWS", (1, 4))
    monkeypatch.setattr(percore, "HANDOVERS", 4)


def arguments(part: Any, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    part.add(parser)
    return parser.parse_args(given)


@pytest.mark.slow
@needs_native
def test_every_schedule_is_measured_and_priced_with_the_same_bits(checkpoint: Path, small: None) -> None:
    given = arguments(
        cores,
        *(str(checkpoint), "--micro-batch", "2", "--micro-batches", "2", "--contexts", "20"),
        *("--links", "4", "8", "--rounds", "2", "--steps", "2", "--seconds", "1e-4"),
    )
    found = cores.measure(given)
    [one] = found["contexts"]
    assert one["same_bits"] == dict.fromkeys(SCHEDULES, True)
    assert [(row["schedule"], row["link"]) for row in one["decode"]] == [
        (schedule, speed) for speed in (4e9, 8e9) for schedule in SCHEDULES
    ]
    assert {len(row["seconds"]) for row in one["decode"]} == {4}, "the first steps of a turn do not count"
    for row in (*one["decode"], *one["prefill"]):
        assert row["measured"] > 0 and row["priced"] > 0
    tasks = {row["schedule"]: set(row["tasks"]) for row in one["decode"]}
    assert "attention, slow compute" in tasks["cgopipe"] and "attention, fast compute" in tasks["s4"]
    assert {row["micro_batches"] for row in one["prefill"]} == {1}
    said = io.StringIO()
    cores.show(found, Console(file=said, width=160))
    assert "cgopipe over others (priced): s2" in said.getvalue() and "NO" not in said.getvalue()
    given.links = [4.0]
    root = ET.fromstring(cores.picture(found, given))
    names = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "name"]
    assert names == list(SCHEDULES)


@needs_native
def test_the_other_bits_would_be_seen(checkpoint: Path) -> None:
    """Another job's answers are not the same."""
    one, other = (sessions.Job(2, 2, context, 3, 64) for context in (20, 21))
    session = sessions.Session.begin(str(checkpoint), one.policy("cgopipe"), one, 1e10, 4 * 2048)
    answers = session.finish()
    assert [len(mine) for mine in answers] == [3] * 4
    assert answers == sessions.in_memory(str(checkpoint), one, 4 * 2048)
    assert answers != sessions.in_memory(str(checkpoint), other, 4 * 2048)


@needs_native
def test_latency_has_a_row_for_each_micro_batch_and_context(checkpoint: Path, small: None) -> None:
    given = arguments(
        latency,
        *(str(checkpoint), "--micro-batches", "1", "2", "--contexts", "16", "40", "--seconds", "1e-4"),
    )
    found = latency.measure(given)
    assert [(row["micro_batch"], row["context"]) for row in found["rows"]] == [
        *((1, 16), (1, 40), (2, 16), (2, 40)),
    ]
    sizes = cores.sizes_of(checkpoint)
    for row in found["rows"]:  # nothing is faster than the link
        attended = ops.attention(sizes, row["micro_batch"], row["context"] - 1, 4.0).cache
        assert row["transfer"] >= attended / 2e9
    latency.show(found, Console(file=io.StringIO(), width=120))
    drawn = ET.fromstring(latency.picture(found, given))
    assert len([one for one in drawn.iter(f"{SVG}path") if "line" in one.get("class", "")]) == 6


def row(schedule: str, measured: float, priced: float) -> dict[str, Any]:
    return {"schedule": schedule, "measured": measured, "priced": priced}


def test_a_verdict_compares_ratios_and_says_who_is_ahead() -> None:
    """serial 10 (8 priced), cgopipe 30 (20); s2 32 (16): 3.2 over 2; on-demand is not the paper's."""
    rows = [row("cgopipe", 30, 20), row("s2", 32, 16), row("serial", 10, 8), row("on-demand", 90, 60)]
    said = cores.verdict(rows)
    assert said == (
        "ratios to serial: worst s2, +60%; cgopipe over others (priced): s2 0.94 (1.25), serial 3.00 (2.50); "
        "behind: s2"
    )
    assert cores.verdict([row("s3", 1, 1)]) == ""


def test_those_compared_take_turns_at_being_first() -> None:
    order = [name for _, name in cores.turns(["a", "b", "c"], [1.0], 3)]
    assert "".join(order) == "abcbcacab"


def test_a_pictures_boxes_lie_in_their_lanes() -> None:
    """Two layers of which the second is shown; a second is as wide everywhere."""
    shape = Shape(layers=2, micro_batches=2, pages=2)
    charts = {}
    for name in ("cgopipe", "serial"):
        tasks = decode(name, shape)
        charts[name] = gantt.told(sessions.Pass(tasks, run(tasks, [1.0] * len(tasks))))
    begin, end = gantt.window(charts["serial"], 3)
    posts = [box for box in charts["serial"] if box[0] == Kind.POST_WITH_EXPERTS.value and box[2] == 1]
    assert (begin, end) == (posts[0][4], posts[-1][5])
    longer = decode("serial", Shape(layers=4, micro_batches=2, pages=2))
    boxes = gantt.told(sessions.Pass(longer, run(longer, [1.0] * len(longer))))
    begin, end = gantt.window(boxes, 2)
    assert end - begin == 2 * (2 * 5 + 1), "two layers: five tasks a micro-batch, and a load"
    root = ET.fromstring(gantt.draw(charts, "a < b"))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    lanes = {(box.get("y"), (box.findtext(f"{SVG}title") or "").split(",")[0]) for box in boxes}
    kinds = dict.fromkeys([kind for _, kind in lanes])
    assert set(kinds) >= {"post-attention", "load page", "attention"}
    assert all(kind.value in gantt.COLOURS for kind in Kind if kind is not Kind.SYNC)
    rows = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "lane"]
    assert rows == [lane.value for lane in (Lane.FAST, Lane.SLOW, Lane.LINK_DOWN, Lane.LINK_UP)] * 2
