"""The row of one process, in a file that outlives it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import trace_reader

from moesaic.core.errors import ConfigError
from moesaic.trace import track as tracks
from moesaic.trace.parts import part_path
from moesaic.trace.track import Track


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "expert-server-3.1.json"


@pytest.fixture
def track(file: Path) -> Iterator[Track]:
    made = Track(file, lambda: 7.5)
    yield made
    made.close()


def test_a_span_is_an_event_in_microseconds(track: Track, file: Path) -> None:
    track.span("layer 3", 1.0000019, 1.0000051, rows=8)
    track.count("pairs waiting", 5)
    *_, span, count = trace_reader.part(file)
    ids = {"pid": os.getppid(), "tid": os.getpid()}
    assert span == ids | {"ph": "X", "name": "layer 3", "ts": 1000001, "dur": 4, "args": {"rows": 8}}
    assert count == ids | {
        "ph": "C",
        "name": "expert server 3:",
        "ts": 7500000,
        "args": {"pairs waiting": 5},
    }


def test_the_row_has_the_name_of_the_process(track: Track, file: Path) -> None:
    track.span("layer 0", 1.0, 2.0)
    [row] = trace_reader.rows(trace_reader.part(file))
    assert (row.process, row.pid, len(row.spans)) == ("expert server 3", os.getpid(), 1)


def test_a_part_opens_by_itself_while_it_is_written(track: Track, file: Path) -> None:
    """An array whose end may be missing, and blanks behind it."""
    track.span("layer 0", 1.0, 2.0)
    text = file.read_text()
    assert text.startswith("[\n")
    assert json.loads(text.rstrip().removesuffix(",") + "]")[-1]["name"] == "layer 0"


TIMES = st.lists(st.floats(0, 1e6), min_size=4, max_size=4).map(sorted)


@given(TIMES)
def test_rounding_keeps_spans_in_each_other_and_apart(times: list[float]) -> None:
    def rounded(begin: float, end: float) -> tuple[int, int]:
        found = []
        made = Track.__new__(Track)
        made._event = lambda kind, name, **fields: found.append(fields)  # type: ignore[method-assign]
        made.span("x", begin, end)
        return found[0]["ts"], found[0]["ts"] + found[0]["dur"]

    a, b, c, d = times
    assert rounded(a, d)[0] <= rounded(b, c)[0] <= rounded(b, c)[1] <= rounded(a, d)[1]
    assert rounded(a, b)[1] <= rounded(b, c)[0]


def test_it_goes_on_from_window_to_window(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks, "WINDOW", 4096)
    track = Track(file, lambda: 0.0)
    for number in range(500):
        track.span("layer 0", number, number + 0.5, number=number)
    track.close()
    spans = trace_reader.rows(trace_reader.part(file))[0].spans
    assert [span.args["number"] for span in spans] == list(range(500))
    assert file.stat().st_size > 4096
    assert file.stat().st_size % 4096 == 0


def test_a_full_disk_ends_the_row_and_not_the_process(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracks, "WINDOW", 4096)
    track = Track(file, lambda: 0.0)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for number in range(500):
        track.span("layer 0", number, number + 0.5)
    track.close()
    assert 0 < len(trace_reader.rows(trace_reader.part(file))[0].spans) < 500
    [warning] = caplog.records
    assert "No space left on device; the trace of this process ends here" in warning.getMessage()


def test_another_process_with_the_same_file_does_no_harm(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a second server with the same trace."""
    monkeypatch.setattr(tracks, "WINDOW", 4096)
    track = Track(file, lambda: 0.0)
    for number in range(50):
        track.span("layer 0", number, number + 0.5)
    size = os.fstat(track._file).st_size
    other = Track(file, lambda: 0.0)
    assert os.fstat(track._file).st_size == size > 4096, "the next span would end this process"
    track.span("layer 1", 60.0, 61.0)
    other.span("layer 2", 70.0, 71.0)
    assert [span.name for span in trace_reader.rows(trace_reader.part(file))[0].spans] == ["layer 2"]
    track.close()
    other.close()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """It says what was typed, not where this part of it is."""
    trace = str(tmp_path / "t.json")
    part = part_path(trace, "attention worker 0")
    assert part is not None
    with pytest.raises(ConfigError, match=rf"^--trace: got '{trace}'; allowed: .*No such file"):
        Track(Path(part), lambda: 0.0)


PROGRAM = """
import os, signal, sys
from pathlib import Path
from moesaic.trace.track import Track
track = Track(Path(sys.argv[1]), lambda: 0.0)
for number in range(20000):
    track.span("layer 1", number, number + 0.5, number=number)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_sigkill_loses_nothing(file: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    spans = trace_reader.rows(trace_reader.part(file))[0].spans
    assert [span.args["number"] for span in spans] == list(range(20000))
