"""What nobody expected is told once and ends nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moesaic.cluster.failures import MAX_CHARACTERS, MAX_FAILURES, Failures


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_what_fails_again_and_again_is_noted_once() -> None:
    failures = Failures()
    for _ in range(3):
        assert failures.run_safely(raising(KeyError(7))) == "the supervisor: KeyError: 7"
    assert failures.run_safely(lambda: None) is None
    assert [failure.what for failure in failures.list_failures()] == ["the supervisor: KeyError: 7"]
    failures.note("expert server 0: killed")
    failures.run_safely(raising(KeyError(7)))
    assert len(failures.list_failures()) == 3, "something else happened in between"


def test_the_log_has_the_traceback_and_people_one_line(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    failures.run_safely(raising(ValueError("first\nsecond")))
    assert [failure.what for failure in failures.list_failures()] == ["the supervisor: ValueError: first"]
    [record] = caplog.records
    assert record.exc_info is not None and record.exc_info[0] is ValueError


def test_an_end_is_an_end() -> None:
    with pytest.raises(SystemExit):
        Failures().run_safely(raising(SystemExit()))


def test_the_last_ones_are_kept() -> None:
    failures = Failures()
    for number in range(MAX_FAILURES + 2):
        failures.note(str(number))
    assert [failure.what for failure in failures.list_failures()] == [
        str(number) for number in range(2, MAX_FAILURES + 2)
    ]


def test_what_a_peer_wrote_looks_like_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    failures.note("worker 1: no\n2026-01-01 WARNING all is lost\x1b[31m" + "x" * MAX_CHARACTERS)
    [failure] = failures.list_failures()
    assert failure.what.startswith("worker 1: no?2026-01-01 WARNING all is lost?[31mx")
    assert len(failure.what) == MAX_CHARACTERS and caplog.messages == [failure.what]
