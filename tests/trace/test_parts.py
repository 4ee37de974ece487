"""From the parts of the processes to one file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import trace_reader

from moesaic.core.errors import ConfigError
from moesaic.trace.parts import (
    collecting,
    events,
    part_path,
    parts_folder,
    process_name,
    row_order,
    trace_path,
)
from moesaic.trace.track import Track


def test_names() -> None:
    part = part_path("t.json", "expert server 0", 2)
    assert part == "t.json.parts/expert-server-0.2.json"
    assert process_name(Path(part)) == "expert server 0"
    assert trace_path(part) == "t.json" and trace_path("a/b.npz.parts/x-0.1.json") == "a/b.npz"
    assert part_path(None, "expert server 0") is None and trace_path(None) is None


def test_workers_come_before_servers_by_number() -> None:
    names = ["expert server 0", "attention worker 10", "expert server 2", "attention worker 9"]
    assert sorted(names, key=row_order) == [
        *("attention worker 9", "attention worker 10", "expert server 0", "expert server 2")
    ]


def write(trace: Path, process: str, incarnation: int = 1) -> Path:
    """One span of `process`."""
    path = part_path(str(trace), process, incarnation)
    assert path is not None
    track = Track(Path(path), lambda: 0.0)
    track.span("layer 0", 1.0, 2.0, process=process)
    track.close()
    return Path(path)


def test_every_part_is_in_the_file_and_gone(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    processes = ["attention worker 0", "expert server 0", "expert server 1"]
    with collecting(str(trace)):
        for process in processes:
            write(trace, process)
        write(trace, "expert server 0", 2)
    spans = [event["args"]["process"] for event in trace_reader.joined(trace) if event["ph"] == "X"]
    assert sorted(spans) == [*processes[:2], *processes[1:]]
    assert list(tmp_path.iterdir()) == [trace]


def test_a_run_that_fails_has_a_trace_too(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    with pytest.raises(RuntimeError), collecting(str(trace)):
        write(trace, "attention worker 0")
        raise RuntimeError
    assert len(trace_reader.rows(trace_reader.joined(trace))) == 1


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    part = tmp_path / "attention-worker-0.1.json"
    part.write_text('[\n{"a":{}},\n      {"b":2},\n{"c":{"d":1}' + " " * 100)
    assert list(events(part)) == ['{"a":{}}', '{"b":2}']


def test_where_nothing_ran_an_older_trace_stays(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    trace.write_text("{}")
    with collecting(str(trace)):
        pass
    assert trace.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [trace]


def test_where_nothing_ran_no_file_is_left(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), collecting(str(tmp_path / "t.json")):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_parts_that_a_killed_run_left_are_not_mixed_in(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    parts_folder(trace).mkdir()
    write(trace, "expert server 5")
    with collecting(str(trace)):
        write(trace, "attention worker 0")
    assert [row.process for row in trace_reader.rows(trace_reader.joined(trace))] == ["attention worker 0"]


def test_parts_stay_where_they_cannot_be_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = tmp_path / "t.json"
    with collecting(str(trace)):
        part = write(trace, "attention worker 0")
        trace.unlink()
        trace.mkdir()
    assert part.exists()
    [warning] = caplog.records
    assert warning.getMessage().endswith(f"the parts of the trace are in {part.parent}")


@pytest.mark.parametrize("name", ["nowhere/t.json", "folder", "blocked.json", ""])
def test_a_file_that_cannot_be_written_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("blocked.json.parts").touch()
    refusal = f"^--trace: got '{name}'; allowed: a file to write into"
    with pytest.raises(ConfigError, match=refusal), collecting(name):
        raise AssertionError("it began")


def test_without_a_trace_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with collecting(None):
        assert list(tmp_path.iterdir()) == []
