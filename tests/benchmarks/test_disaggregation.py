"""What the disaggregation benchmark computes from what it measured."""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from disaggregated import breakdown, kill, prefill, queues, turns
from disaggregated.picture import Line, draw, step
from disaggregated.serving import Counters, Run, halves, layout_of, medians, percentile, spent
from rich.console import Console

from moesaic.core.metrics import ExpertServerStats, ExpertStats, WorkerStats
from moesaic.core.placement import Placement


def test_throughput_counts_the_steady_part() -> None:
    run = Run(prompt_tokens=12, times=[[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    assert run.prefill_tokens_per_s == 6.0
    assert run.decode_tokens_per_s == 2.0  # tokens at 3 and 3, in (2, 3]
    assert run.gaps == [1.0, 1.0, 1.0]


def test_without_a_steady_part_all_that_came_later_counts() -> None:
    run = Run(prompt_tokens=2, times=[[1.0, 1.5], [2.0, 4.0]])
    assert run.decode_tokens_per_s == 0.5


def test_percentiles_of_ascending_numbers() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 3
    assert percentile([1, 2, 3, 4], 0.99) == 4
    assert percentile([], 0.5) == 0.0


def test_what_was_spent_between_two_moments() -> None:
    def counters(pairs: int, busy: float, waiting: float, time: float) -> Counters:
        worker = WorkerStats(experts=ExpertStats(waiting_seconds=waiting, resent_pairs=pairs // 10))
        server = ExpertServerStats(pairs=pairs, expert_runs=pairs // 4, busy_seconds=busy)
        return Counters(worker, (server, server), time)

    took = spent(counters(40, 1.0, 2.0, 10.0), counters(80, 1.5, 3.0, 12.0))
    assert (took.seconds, took.pairs, took.rows_per_expert_run) == (2.0, 80, 4.0)
    assert (took.worker_waiting, took.server_busy, took.resent_pairs) == (1.0, (0.5, 0.5), 4)


def test_medians_of_each_number() -> None:
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 9.0, "b": 1.0}, {"a": 2.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}


def test_the_first_half_of_the_experts_is_on_server_0(tmp_path: Path) -> None:
    placement = Placement.from_json(halves("demo", tmp_path).read_text())
    layout = layout_of("demo")
    assert placement.layers == layout.layers
    for layer in layout.layers:
        assert placement.experts_of(0, layer) == tuple(range(12))
        assert placement.experts_of(1, layer) == tuple(range(12, 24))


def test_a_barrier_waits_at_each_layer_for_the_busiest() -> None:
    nothing: dict[str, dict[str, float]] = {"seconds": {}, "layers": {}}
    alternating = [{"layers": {0: 3.0, 1: 1.0}}, {"layers": {0: 1.0, 1: 3.0}}]
    assert breakdown.bound([nothing, nothing], alternating) == (6.0, 4.0)
    working = [
        {"seconds": {"execution": 1.0, "schedule": 1.0, "waiting": 9.0}},
        {"seconds": {"execution": 1.0}},
    ]
    assert breakdown.bound(working, alternating) == (8.0, 6.0)


def test_what_a_process_spent_between_two_readings() -> None:
    before = {"seconds": {"a": 1.0}, "layers": {}, "runs": 2}
    after = {"seconds": {"a": 3.0, "b": 1.0}, "layers": {"0": 2.0}, "runs": 5}
    assert breakdown.grown(before, after) == {
        "runs": 3,
        "seconds": {"a": 2.0, "b": 1.0},
        "layers": {"0": 2.0},
    }


def test_a_stopwatch_counts_each_moment_in_the_innermost_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Work:
        def outer(self) -> None:
            spend(1.0)
            self.inner()
            spend(2.0)

        def inner(self) -> None:
            spend(10.0)

        @classmethod
        def build(cls, name: str) -> str:
            spend(5.0)
            return name

    monkeypatch.setattr("disaggregated.breakdown.time.thread_time", lambda: now)
    watch = breakdown.Stopwatch()
    watch.by_layer(Work, "inner", lambda self: 7)
    for name in ("outer", "inner", "build"):
        watch.wrap(Work, name, name)
    Work().outer()
    assert Work.build("it") == "it"
    assert dict(watch.seconds) == {"outer": 3.0, "inner": 10.0, "build": 5.0}
    assert (watch.runs, dict(watch.layers)) == (1, {7: 10.0})


@pytest.mark.parametrize(("span", "count", "size"), [(13, 6, 2), (1.0, 5, 0.2), (4500, 5, 1000), (10, 8, 1)])
def test_marks_on_an_axis_are_round_numbers(span: float, count: int, size: float) -> None:
    assert step(span, count) == pytest.approx(size)


def test_a_picture_is_an_svg_with_a_path_for_each_line() -> None:
    lines = [Line("a < b", [(-1.0, 0.0), (0.0, 4.0), (1.0, 2.0)]), Line("c", [(-1.0, 1.0), (1.0, 1.0)])]
    root = ET.fromstring(draw(lines, "title", "seconds", "tokens/s", mark=0.0))
    paths = [one for one in root.iter("{http://www.w3.org/2000/svg}path") if "line" in one.get("class", "")]
    assert len(paths) == 4  # each line, and its sample beside its name
    assert paths[0].get("d", "").count("L") == 2
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts and "-1" in texts


KILL = argparse.Namespace(before=1.0, after=2.0, bin=0.5)


def test_tokens_are_counted_around_the_kill() -> None:
    times = {0: [9.2, 9.9, 10.1, 11.6], 1: [3.0, 10.2, 30.0]}
    found = kill.evaluate(times, 10.0, KILL)
    assert found["bins"] == [1, 1, 2, 0, 0, 1]
    assert (found["tokens_before"], found["tokens_after"]) == (2, 3)
    assert found["longest_gap"] == pytest.approx(19.8)


def test_what_is_kept_is_of_the_same_rounds_control() -> None:
    empty = {"tokens_before": 1, "longest_gap": 0.0, "resent_pairs": 0, "failovers": 0, "bins": [2, 4]}
    rows = [
        {"case": case, "round": turn, "tokens_after": tokens, **empty}
        for turn, counts in enumerate([(100, 90, 50), (200, 190, 20)])
        for case, tokens in zip(kill.CASES, counts, strict=True)
    ]
    assert [row["kept"] for row in kill.summary(rows)] == [1.0, pytest.approx(0.925), 0.3]
    picture = kill.picture(rows, argparse.Namespace(before=1.0, bin=1.0))
    assert "min-replicas 2" in picture


def test_rates_are_those_of_the_second_half() -> None:
    arrived, ended, running = [0, 9, 10, 20], [0, 1, 4, 10], [0, 1, 2, 6]
    watched = queues.Watched(
        [0.0, 1.0, 2.0, 3.0], arrived, ended, running, [0] * 4, [8] * 4, runs=[0] * 4, partial_runs=[0] * 4
    )
    found = queues.evaluate(watched, [0.1, 0.2], 7.0)
    assert (found["input_per_s"], found["output_per_s"], found["open_at_end"]) == (10.0, 6.0, 10)
    assert (found["running"], found["waiting_pairs"], found["itl_p50"]) == (4.0, 8.0, 0.2)


ARRIVALS = {"trace": None, "trace_speed": None, "length_scale": 1.0, "requests": None, "seconds": 20.0}
ARRIVALS |= {"prompt_len": 8, "gen_len": 4, "max_model_len": 64}


def test_a_run_takes_its_seconds_unless_a_number_of_requests_is_given(tmp_path: Path) -> None:
    def found(rate: float, count: int | None = None, **changes: object) -> list[float]:
        arguments = argparse.Namespace(**ARRIVALS | changes)
        return [row.arrival for row in prefill._requests(arguments, rate, 0, count)]

    assert len(found(3.0)) == 60 and len(found(0.1)) == prefill.FEWEST
    assert len(found(3.0, requests=5)) == 5 and len(found(3.0, count=7)) == 7
    trace = tmp_path / "trace.csv"
    lines = [f"{second},9,3" for second in range(100)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    assert len(found(3.0, trace=trace)) == 60
    assert found(3.0, trace=trace)[-1] == pytest.approx(20.0, rel=0.1)
    assert found(3.0, trace=trace, trace_speed=2.0)[-1] == 20.0
    assert len(found(3.0, trace=trace, trace_speed=2.0)) == 41


def test_engines_take_turns_and_stand_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int, int]] = []

    def run(engine: Any, _: argparse.Namespace, concurrency: int, new: int) -> dict[str, float]:
        order.append((engine.name, concurrency, new))
        speed = 50.0 if engine.name == "apart" else 100.0
        names = ("prefill_tokens_per_s", "decode_tokens_per_s", "worker_waiting", "server_idle")
        return dict(zip(names, (2 * speed, speed, 0.25, 0.5), strict=True))

    monkeypatch.setattr(turns, "one_run", run)
    engines: list[Any] = [SimpleNamespace(name="alone"), SimpleNamespace(name="apart")]
    asked = argparse.Namespace(concurrency=[1, 8], rounds=2, minutes=60.0, gen_len=9)
    rows = turns.take_turns(engines, asked)
    one_round = [(name, concurrency, 9) for concurrency in (1, 8) for name in ("alone", "apart")]
    assert order == [("alone", 1, 4), ("apart", 1, 4), *one_round, *one_round]
    assert [(row["concurrency"], row["engine"], row["rounds"]) for row in rows] == [
        (concurrency, name, 2) for name, concurrency, _ in one_round
    ]
    asked.minutes = 0.0
    assert {row["rounds"] for row in turns.take_turns(engines, asked)} == {1}, "the first one is whole"
    shown = Console(width=120, record=True, file=io.StringIO())
    turns.show_beside(rows, "alone", "two", shown)
    assert re.search(r"8 │ apart +│ +100.0 │ 0.50x │ +50.0 │ 0.50x │ +25% │ +50%", shown.export_text())
