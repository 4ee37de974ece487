"""Files of a checkpoint that come, go and change: when processes may load them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.cluster import checkpoint_watch
from moesaic.cluster.checkpoint_watch import CheckpointGate, CheckpointWatch, States, Verdict
from moesaic.models import fingerprint
from moesaic.models.file_state import FileState, read_state
from moesaic.models.files import resolve

FILE, OTHER = Path("a.safetensors"), Path("config.json")
START = FileState(1, 2, 100, 1000, 1000)
FILES: States = {FILE: START, OTHER: FileState(1, 3, 10, 1000, 1000)}


class Contents:
    """Contents that differ from those of the start by `difference`."""

    def __init__(self) -> None:
        self.difference: str | None = None
        self.comparisons = 0

    def compare(self) -> str | None:
        self.comparisons += 1
        return self.difference


def with_file(state: FileState | None) -> States:
    return {**FILES, FILE: state}


@pytest.fixture
def contents() -> Contents:
    return Contents()


@pytest.fixture
def gate(contents: Contents) -> CheckpointGate:
    return CheckpointGate(FILES, contents.compare)


def test_files_as_at_the_start_are_loaded(gate: CheckpointGate, contents: Contents) -> None:
    assert gate.explain(FILES, 1.0) is None and not contents.comparisons


def test_a_missing_file_is_waited_for(gate: CheckpointGate, contents: Contents) -> None:
    why = gate.explain(with_file(None), 1.0)
    assert why == "a.safetensors: this file is missing; processes are started again once it is there"
    assert gate.explain(FILES, 2.0) is None and not contents.comparisons


def test_another_file_with_the_same_bytes_is_loaded_once_it_is_quiet(
    gate: CheckpointGate, contents: Contents
) -> None:
    growing, whole = replace(START, inode=9, size=50), replace(START, inode=9, modified_ns=3000)
    for now, state in ((1.0, growing), (4.0, whole), (8.9, whole)):
        why = gate.explain(with_file(state), now)
        assert why == "a.safetensors: this file changed; it is compared once it is quiet for 5 s"
    assert not contents.comparisons
    assert gate.explain(with_file(whole), 9.0) is None
    assert gate.explain(with_file(whole), 10.0) is None and contents.comparisons == 1


def test_other_bytes_are_refused_until_the_old_ones_are_back(
    gate: CheckpointGate, contents: Contents
) -> None:
    contents.difference = "it has other bytes of tensors"
    other = replace(START, inode=9)
    gate.explain(with_file(other), 1.0)
    for now in (6.0, 7.0):
        why = gate.explain(with_file(other), now)
        assert why == "a.safetensors: this file changed while it was served: it has other bytes of tensors"
    assert contents.comparisons == 1
    assert gate.explain(FILES, 8.0) is None


def test_a_new_mode_or_link_is_compared_and_accepted(gate: CheckpointGate, contents: Contents) -> None:
    assert gate.explain(with_file(replace(START, changed_ns=2000)), 1.0) is None
    assert contents.comparisons == 1


def test_bytes_that_changed_behind_an_old_time_are_found(gate: CheckpointGate, contents: Contents) -> None:
    contents.difference = "it has other bytes of tensors"
    assert gate.explain(with_file(replace(START, changed_ns=2000)), 1.0) is not None


# ---- real files


class Watched:
    """A copy of the demo's checkpoint that is watched, and the verdicts so far."""

    def __init__(self, path: Path) -> None:
        self.weights = path / "model.safetensors"
        self.stamp = fingerprint.stamp(path)
        self.verdicts: list[Verdict] = []
        self._news = threading.Condition()
        self.watch = CheckpointWatch(path, self.stamp, self._take)
        self.watch.start()

    def _take(self, verdict: Verdict) -> None:
        with self._news:
            self.verdicts.append(verdict)
            self._news.notify()

    def wait_for(self, words: str | None) -> Verdict:
        """The next verdict whose obstacle has these words, or that has none."""

        def matches() -> bool:
            obstacle = self.verdicts[-1].obstacle if self.verdicts else ""
            return obstacle is None if words is None else words in (obstacle or "")

        with self._news:
            assert self._news.wait_for(matches, 60), self.verdicts
            return self.verdicts[-1]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(checkpoint_watch, "TURN", 0.02)
    monkeypatch.setattr(checkpoint_watch, "QUIET_SECONDS", 0.2)
    copy = shutil.copytree(resolve("demo"), tmp_path / "model")
    made = Watched(copy)
    while made.watch._fingerprint is None:
        made.watch._stop.wait(0.01)
    yield made
    made.watch.stop()


def test_a_file_that_is_moved_away_and_back(watched: Watched) -> None:
    away = watched.weights.rename(watched.weights.with_suffix(".away"))
    watched.wait_for("model.safetensors: this file is missing")
    away.rename(watched.weights)
    assert watched.wait_for(None).stamp == watched.stamp


def test_a_file_that_is_written_again_with_the_same_bytes(watched: Watched) -> None:
    whole = watched.weights.read_bytes()
    watched.weights.unlink()
    watched.wait_for("missing")
    watched.weights.write_bytes(whole)
    watched.wait_for("quiet")
    assert watched.wait_for(None).stamp == fingerprint.stamp(watched.weights.parent) != watched.stamp


def test_a_file_that_is_written_over_in_place(watched: Watched) -> None:
    whole = watched.weights.read_bytes()
    with watched.weights.open("r+b") as file:
        file.seek(len(whole) // 2)
        file.write(bytes(64))
    words = "changed while it was served: it has other bytes of tensors than at the start"
    assert words in (watched.wait_for("other bytes").obstacle or "")
    watched.weights.write_bytes(whole)
    watched.wait_for(None)


def test_a_file_that_is_cut(watched: Watched) -> None:
    os.truncate(watched.weights, watched.weights.stat().st_size // 3)
    watched.wait_for("truncated")


def test_a_state_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none") is None
