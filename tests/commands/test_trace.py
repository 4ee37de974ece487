"""`moesaic trace`: sums, and a page that opens offline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support import browser

from moesaic.commands import cli
from moesaic.commands.trace import page, read, sums
from moesaic.core.errors import ConfigError
from moesaic.trace.parts import part_path


def event(track: int, name: str, begin: int, length: int, **more: object) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": track, "name": name, "ts": begin, "dur": length, "args": more}


def named(track: int, name: str, place: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}},
        {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": place}},
    ]


EVENTS = [
    *named(7, "expert server 0", 1),
    *named(9, "attention worker 0", 0),
    event(9, "layer 0", 1000, 50, rows=2),
    event(9, "dispatch", 1010, 10, pairs=8),
    event(9, "layer 1", 1050, 30, rows=2),
    event(7, "layer 0", 1020, 5, note="</script><b>"),
    {"ph": "C", "pid": 1, "tid": 9, "name": "pairs at servers", "ts": 1000, "args": {"pairs": 8}},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": EVENTS}))
    return path


def test_rows_stand_in_order_and_spans_know_how_deep_they_are(file: Path) -> None:
    worker, server = read(file)
    assert [worker.name, server.name] == ["attention worker 0", "expert server 0"]
    shown = [(span.name, span.begin, span.length, span.depth) for span in worker.spans]
    assert shown == [("layer 0", 0, 50, 0), ("dispatch", 10, 10, 1), ("layer 1", 50, 30, 0)]
    assert sums(worker) == {"layer": 80, "dispatch": 10} and sums(server) == {"layer": 5}


def test_the_page_asks_no_other_host_and_is_not_broken_by_a_name(file: Path) -> None:
    text = page("a <b> trace", read(file))
    assert text.count("<script") == text.count("</script>") == 1
    assert "a &lt;b&gt; trace" in text and not re.search(r"""(src|href)=|https?://""", text)
    assert "default-src 'none'" in text
    [packed] = re.findall(r"const TRACE = (\{.*?\});\n", text)
    found = json.loads(packed)
    assert found["names"] == ["layer 0", "dispatch", "layer 1"]
    assert found["rows"][1]["spans"] == [[0, 20, 5, 0, {"note": "</script><b>"}]]


def test_the_command_prints_sums_and_writes_the_page(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trace.html"
    assert cli.main(["trace", str(file), "--html", str(target), "--json"]) == 0
    [first, _] = json.loads(capsys.readouterr().out)["rows"]
    assert first == {"row": "attention worker 0", "microseconds": {"layer": 80, "dispatch": 10}}
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert cli.main(["trace", str(file)]) == 0
    assert "dispatch" in capsys.readouterr().out


def test_the_parts_of_a_run_that_was_killed_are_read(file: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed.json"
    killed.touch()
    events = [json.dumps(event) for event in json.loads(file.read_text())["traceEvents"]]
    part = Path(part_path(str(killed), "attention worker 0", 1) or "")
    part.parent.mkdir()
    part.write_text("[\n" + ",\n".join(events) + ',\n{"ph":"X","na' + 100 * "\0")
    assert read(killed) == read(file)


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}', "\0"])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json: this is not a trace"):
        read(path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")


def test_a_page_that_cannot_be_written_is_told_first(file: Path) -> None:
    assert cli.main(["trace", str(file), "--html", "/no/such/place.html"]) == 2


@pytest.mark.full
@pytest.mark.skipif(browser.program() is None, reason="there is no Chromium on this machine")
def test_the_page_in_a_browser_offline(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.html"
    target.write_text(page("trace.json", read(file)), encoding="utf-8")
    with browser.browser() as opened:
        opened.open(target.as_uri())
        opened.until("document.readyState == 'complete' && document.getElementById('trace')")
        opened.run("document.getElementById('trace').focus()")
        opened.press("ArrowDown")
        opened.press("ArrowDown")
        told = opened.run("document.getElementById('told').textContent")
        assert told == "attention worker 0: dispatch, 10 µs, at 10 µs; pairs 8"
        drawn = "document.getElementById('trace').getContext('2d').getImageData(250, 30, 200, 20).data"
        assert opened.run(f"new Set({drawn}).size > 3")
        assert opened.errors == []
