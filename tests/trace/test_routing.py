"""Rows on their way from workers to a profile, without their processes."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from moesaic import SamplingParams
from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile
from moesaic.core.request import Request
from moesaic.core.routing import RoutedModel, Rows, ending
from moesaic.trace import routing
from moesaic.trace.live_routing import LiveRouting
from moesaic.trace.options import RecordConfig
from moesaic.trace.parts import part_path, parts_folder
from moesaic.trace.routing import Collector, Ends, RowFile, prepare, recording

MODEL = RoutedModel("moe-x", 100, 9, 2, (1, 3))


def rows(request: int, *positions: int) -> Rows:
    made = np.zeros(len(positions), MODEL.row)
    made["request"], made["position"], made["token"] = request + 1, positions, positions
    made["experts"] = [[0, 1], [1, 2]]
    return made


def whole(request: int, length: int) -> Rows:
    """A request from beginning to end."""
    return np.concatenate([rows(request, *range(length)), ending(MODEL, request, length)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.npz"
    prepare(path, "1MiB")
    path.unlink()
    return path


def worker(file: Path, number: int = 0, incarnation: int = 1, role: str = "attention") -> RowFile:
    part = part_path(str(file), f"{role} worker {number}", incarnation)
    assert part is not None
    return RowFile(Path(part), MODEL)


def tokens(file: Path) -> list[int]:
    return sorted(np.diff(Profile.load(file).routes.starts).tolist())


def test_two_workers_become_one_profile(file: Path) -> None:
    """Their requests have ids of one engine: after a death the same rows come from both."""
    first, second = worker(file, 0), worker(file, 1)
    collector = Collector(file, 1 << 20)
    first(whole(0, 3))
    first(rows(5, *range(3)))
    second(whole(1, 4))
    collector.collect()
    collector.save()
    assert tokens(file) == [3, 4]
    second(whole(5, 6))
    collector.collect()
    collector.save(last=True)
    assert tokens(file) == [3, 4, 6]
    profile = Profile.load(file)
    assert (profile.model, profile.layers, profile.num_experts) == ("moe-x", (1, 3), 9)
    assert profile.tokens == 13


def over(number: int, prompt: int) -> Request:
    """A request whose prompt has so many tokens."""
    return Request(number, [5] * prompt, SamplingParams(max_tokens=9, seed=0))


def test_rows_of_two_workers_are_one_request_once_the_engine_says_so(file: Path) -> None:
    """A prefill worker has released it before. A row that both computed counts once."""
    ends, live = Ends(), LiveRouting(1 << 20, 1.0)
    decode, prefill, successor = worker(file), worker(file, role="prefill"), worker(file, 1, role="prefill")
    collector = Collector(file, 1 << 20, live, ends)
    prefill(rows(0, 0, 1))  # it dies
    successor(whole(0, 4))
    collector.collect()
    collector.save()
    assert not file.exists()
    decode(rows(0, 3, 4, 5))
    decode(ending(MODEL, 0, 4))
    ends.add(over(0, 4), False)
    collector.collect()
    collector.save()
    assert tokens(file) == [6] and live.size == (1, 6)
    assert Profile.load(file).routes.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert Profile.load(file).routes.prompts.tolist() == [4]


def test_a_cancelled_request_waits_for_rows_that_its_worker_hands_over_late(file: Path) -> None:
    ends, sink = Ends(), worker(file)
    collector = Collector(file, 1 << 20, ends=ends)
    sink(rows(0, 0, 1))
    ends.add(over(0, 2), True)
    collector.collect()
    sink(rows(0, 2))
    collector.collect()
    sink(rows(1, 0))
    ends.add(over(1, 1), True)
    collector.collect(last=True)
    collector.save()
    assert tokens(file) == [1, 3]


def test_files_that_were_read_are_removed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "WINDOW", 10 * MODEL.row.itemsize)
    sink, collector = worker(file), Collector(file, 1 << 20)
    for request in range(7):
        sink(whole(request, 6))  # with their ends 49 records: four files and most of a fifth
        if request == 3:
            collector.collect()
    assert len(list(parts_folder(file).glob("*.rows"))) == 3
    collector.collect()
    assert [path.name for path in parts_folder(file).glob("*.rows")] == ["attention-worker-0.1.000004.rows"]
    collector.save()
    assert tokens(file) == [6] * 7


def test_more_rows_than_a_file_holds_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "WINDOW", 10 * MODEL.row.itemsize)
    sink, collector = worker(file), Collector(file, 1 << 20)
    sink(whole(0, 34))
    collector.collect()
    collector.save()
    assert tokens(file) == [34]


def test_a_file_that_is_being_made_is_left_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "WINDOW", 10 * MODEL.row.itemsize)
    sink, collector = worker(file), Collector(file, 1 << 20)
    sink(rows(0, *range(10)))
    following = parts_folder(file) / "attention-worker-0.1.000001.rows"
    made = following.read_bytes()
    os.truncate(following, 3)
    collector.collect()
    following.write_bytes(made)
    assert following.is_file()
    sink._window = np.asarray(np.memmap(following, MODEL.row, mode="r+"))
    sink(ending(MODEL, 0, 10))
    collector.collect()
    collector.save()
    assert tokens(file) == [10]


def test_another_process_with_the_same_file_does_no_harm(file: Path) -> None:
    """Such as that of a second server with the same profile, which takes the place of the first."""
    first, second = worker(file), worker(file)
    second(whole(0, 5))
    first(whole(1, 3))
    collector = Collector(file, 1 << 20)
    collector.collect()
    collector.save()
    assert tokens(file) == [5]


def test_nothing_new_is_not_written_again(file: Path) -> None:
    sink, collector = worker(file), Collector(file, 1 << 20)
    sink(whole(0, 3))
    collector.collect()
    collector.save()
    before = file.stat().st_mtime_ns
    collector.collect()
    collector.save()
    assert file.stat().st_mtime_ns == before


def test_a_full_disk_ends_the_recording_and_not_the_worker(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routing, "WINDOW", 10 * MODEL.row.itemsize)
    sink = worker(file)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "write", full)
        sink(whole(0, 25))
    assert "No space left on device; this worker's routing ends here" in caplog.text
    sink(whole(1, 25))
    collector = Collector(file, 1 << 20)
    collector.collect()
    collector.save()
    assert not file.is_file()


def test_the_profile_is_brought_up_to_date_and_at_last_whole(tmp_path: Path) -> None:
    file = tmp_path / "p.npz"
    file.write_bytes(b"of the last run")
    with recording(RecordConfig(str(file), 1.0), interval=0.05):
        assert parts_folder(file).stat().st_mode & 0o777 == 0o700
        sink = worker(file)
        sink(whole(0, 3))
        until = time.monotonic() + 120
        while file.read_bytes() == b"of the last run":
            assert time.monotonic() < until
            time.sleep(0.01)
        assert tokens(file) == [3]
        sink(whole(1, 4))
        sink(rows(2, 0))  # never ends
    assert tokens(file) == [3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


def test_where_nothing_was_recorded_there_is_no_file(tmp_path: Path) -> None:
    with recording(RecordConfig(str(tmp_path / "p.npz"))):
        pass
    assert list(tmp_path.iterdir()) == []
    with recording(RecordConfig()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_in_the_file_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a run that began no worker; else that there is no file, or what it lacks."""
    file = tmp_path / "p.npz"
    with recording(RecordConfig(str(file))):
        pass
    assert caplog.messages == []
    with recording(RecordConfig(str(file))):
        worker(file)(rows(0, 0, 1))  # never ends
    [said] = caplog.messages
    assert said.startswith(f"no request was recorded, {file} was not written: --record-routing-share 0.05")
    assert list(tmp_path.iterdir()) == []
    caplog.clear()
    empty = 2 * 101 * 8 + 9 * 9 * 8  # counts of two layers, one table of transitions
    memory = str(-(-empty * 4 // 3) + 1)
    monkeypatch.setattr(routing, "WINDOW", 10 * MODEL.row.itemsize)
    with recording(RecordConfig(str(file), record_routing_memory=memory)):
        sink = worker(file)
        for request in range(100):
            sink(whole(request, 8))
    counted = Profile.load(file).tokens // 8
    said = f"--record-routing-memory was full: {100 - counted} requests were not counted"
    assert caplog.messages == [said] and 0 < counted < 100


def test_memory_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.npz"
    said = "^--record-routing-memory: got '10'; allowed: more: the empty counts of this model need it$"
    with (
        pytest.raises(ConfigError, match=said),
        recording(RecordConfig(str(file), record_routing_memory="10")),
    ):
        worker(file)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_cleared(file: Path) -> None:
    worker(file)(whole(0, 3))
    with recording(RecordConfig(str(file))):
        assert [path.name for path in parts_folder(file).iterdir()] == ["memory"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record_routing_share": 0.0}, "--record-routing-share: got 0.0; allowed: a number above 0"),
        ({"record_routing_share": 1.5}, "--record-routing-share: got 1.5; allowed: a number above 0"),
        ({"record_routing_memory": "much"}, "--record-routing-memory: got 'much'; allowed: a positive size"),
        (
            {"record_routing": None, "record_routing_share": 0.5},
            "--record-routing-share: got 0.5; allowed: nothing but 0.05 without --record-routing FILE",
        ),
        (
            {"record_routing": None, "record_routing_memory": "1GiB"},
            "--record-routing-memory: got '1GiB'; allowed: nothing but 256MiB without --record-routing FILE",
        ),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RecordConfig(**{"record_routing": "p.npz"} | settings)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "p.npz"
    said = rf"--record-routing: got '{file}'; allowed: a file to write into"
    with pytest.raises(ConfigError, match=said), recording(RecordConfig(str(file))):
        raise AssertionError("it began")
    with pytest.raises(ConfigError, match=said):
        worker(file)
