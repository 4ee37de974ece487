"""The first line is logged at once, the others once in a while, and all are counted."""

from __future__ import annotations

from moesaic.transport.acceptor import LineLimit


def test_a_burst_is_two_lines() -> None:
    limit = LineLimit(10.0)
    assert limit.add("0", now=100.0) == "0"
    assert [limit.add(str(i), now=100.0 + i / 1000) for i in range(1, 3000)] == [None] * 2999
    assert limit.due(now=109.9) is None
    assert limit.due(now=110.0) == "2999 (the last of 2999 such lines in 10 s)"
    assert limit.due(now=200.0) is None and limit.flush(now=200.0) is None


def test_a_stream_is_a_line_in_each_interval() -> None:
    limit = LineLimit(10.0)
    found = [(now, line) for now in range(100) if (line := limit.add(f"at {now}", float(now)))]
    assert [now for now, _ in found] == list(range(0, 100, 10))
    assert {line.partition(" (")[2] for _, line in found[1:]} == {"the last of 10 such lines in 10 s)"}


def test_rare_lines_are_logged_as_they_are() -> None:
    limit = LineLimit(10.0)
    assert [limit.add(name, now) for name, now in (("a", 0.0), ("b", 10.0), ("c", 25.0))] == ["a", "b", "c"]
    assert limit.add("d", now=26.0) is None
    assert limit.add("e", now=40.0) == "e (the last of 2 such lines in 15 s)"
    assert limit.add("f", now=41.0) is None
    assert limit.due(now=50.0) == "f"


def test_what_is_left_at_the_end() -> None:
    limit = LineLimit(10.0)
    assert limit.flush(now=0.0) is None
    limit.add("a", now=0.0)
    limit.add("b", now=0.5)
    limit.add("c", now=0.6)
    assert limit.flush(now=0.7) == "c (the last of 2 such lines in 1 s)"
    assert limit.flush(now=0.8) is None
