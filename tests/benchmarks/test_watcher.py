"""The cost of a reader of the stream: what is read, and how the table is made."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import watcher
from rich.console import Console


def test_the_tables_have_medians_and_ratios(tmp_path: Path) -> None:
    rounds = [watcher.Round(100.0, 99.0), watcher.Round(200.0, 150.0), watcher.Round(50.0, 51.0)]
    read = watcher.Read(bytes=9000, events=20, seconds=10.0)
    with (tmp_path / "shown").open("w+") as file:
        watcher.show(watcher.Found(rounds, [1.0, 2.0, 9.0], [4.5], read), Console(file=file, width=140))
        file.seek(0)
        text = file.read()
    for part in ("100.0", "99.0", "0.990", "0.750", "1.020", "2.0", "900", "4.5", "2.5"):
        assert part in text


def test_cpu_time_of_a_process() -> None:
    before, spent = watcher.cpu_seconds(os.getpid()), time.thread_time()
    while time.thread_time() < spent + 0.05:
        pass
    assert watcher.cpu_seconds(os.getpid()) - before > 0.03  # it is brought up to date at each tick


@pytest.mark.full
def test_a_server_with_and_without_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "demo --rounds 1 --requests 4 --concurrency 4 --new 8 --idle 0.1 --port 8747 --json"
    watcher.main(flags.split())
    found = json.loads(capsys.readouterr().out)
    assert len(found["rounds"]) == 1 and all(min(one.values()) > 0 for one in found["rounds"])
    assert found["read"]["events"] > watcher.IDLE_TURNS and found["read"]["bytes"] > 1000
    assert len(found["idle_alone"]) == len(found["idle_watched"]) == watcher.IDLE_TURNS
