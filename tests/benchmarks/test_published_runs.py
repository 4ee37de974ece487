"""Runs of other people: each has its address, and the page has the figures of today."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import published_runs as runs
import pytest
from published_runs import Pair, Rules

DATA = runs.load()
PAIRS = runs.pairs()


def test_every_run_has_an_address_a_machine_and_a_figure() -> None:
    machines = {one["id"] for one in DATA["machine"]}
    assert len(DATA["run"]) >= 24
    for run in DATA["run"]:
        assert run["source"].startswith("https://"), run
        assert run["machine"] in machines and run["engine"] and run["model"] and run["type"]
        assert {"prefill", "decode"} & set(run), run
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", run.get("date", "2025-01")), run
    assert {run["machine"] for run in DATA["run"]} == machines


def test_every_run_that_was_not_taken_has_an_address_and_a_reason() -> None:
    assert all(
        one["source"].startswith("https://") and one["what"] and one["why"] for one in DATA["discarded"]
    )


def test_every_figure_is_compared_once() -> None:
    figures = [run[what] for what in ("decode", "prefill") for run in DATA["run"] if what in run]
    assert [pair.measured for pair in PAIRS] == figures
    assert all(min(pair.first, pair.predicted, pair.measured) > 0 for pair in PAIRS)


def test_the_page_has_the_figures_of_today() -> None:
    page = runs.PAGE.read_text(encoding="utf-8")
    assert runs.replaced(page) == page, "run: python benchmarks/published_runs.py --write"


def test_the_sentences_have_the_figures_of_today() -> None:
    decode = [pair for pair in PAIRS if pair.what == "decode" and pair.disk is None]
    report = runs.summary(decode)
    within = f"{report['within_30']:.0%}".replace("%", " %")
    machines = len({(pair.cpu, pair.memory) for pair in decode})
    said = f"on {machines} machines, decode from memory has a median error of {report['median_error']:.0%}"
    page = runs.PAGE.read_text(encoding="utf-8")
    assert f"{said.replace('%', ' %')}, and {within} of the predictions are within 30 %" in page
    taken = f"{len(DATA['run'])} runs, with {sum('decode' in run for run in DATA['run'])} figures of decode"
    assert f"{taken} and {sum('prefill' in run for run in DATA['run'])} of prefill" in page
    assert f"on {len(DATA['machine'])} machines." in page
    assert f"lists {len(DATA['discarded'])} further sources" in page
    models = (runs.PAGE.parent / "models.md").read_text(encoding="utf-8")
    assert f"{len(decode)} runs on {machines} machines" in models
    assert f"median error of {report['median_error']:.0%}".replace("%", " %") in models


def test_an_error_counts_alike_in_both_directions() -> None:
    one = PAIRS[0]
    both = [replace(one, predicted=factor, measured=1.0, first=1.0) for factor in (2.0, 0.5)]
    assert runs.summary(both) == {"pairs": 2, "median_error": 1.0, "within_30": 0.0}
    assert runs.summary(both, first=True)["within_30"] == 1.0


def test_rules_of_held_out_machines_are_chosen_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs of which each suits another share: each is priced by the share of the other."""
    monkeypatch.setattr(runs, "GRID", [Rules(read_share=share) for share in (0.5, 1.0)])

    def priced(rules: Rules) -> list[Pair]:
        return [
            replace(PAIRS[0], cpu=cpu, predicted=rules.read_share, measured=share)
            for cpu, share in (("a", 0.5), ("b", 1.0))
        ]

    monkeypatch.setattr(runs, "pairs", priced)
    assert [pair.predicted for pair in runs.held_out()] == [1.0, 0.5]


def test_it_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["published_runs.py", "--json"])
    runs.main()
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["pairs"]) == len(PAIRS) and printed["pairs"][0]["ratio"] == PAIRS[0].ratio
    assert printed["prefill"] == runs.summary([pair for pair in PAIRS if pair.what == "prefill"])


@pytest.mark.full
def test_the_page_has_the_errors_of_held_out_machines() -> None:
    found = runs.summary(runs.held_out())
    said = f"the median error is {found['median_error']:.0%}, and {found['within_30']:.0%} are within 30 %"
    assert said.replace("%,", " %,").replace("% are", " % are") in runs.PAGE.read_text(encoding="utf-8")
