"""A short attack on a real server whose processes are killed; and what such a run must notice."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from scripts.soak import intruders

QUIET = Console(file=io.StringIO())


# Its parts have tests of their own, such as cluster/test_hostile, test_tampering and test_other_weights.
@pytest.mark.full
def test_no_answer_changes_while_intruders_work() -> None:
    findings = intruders.run(20.0, 0, QUIET)
    assert findings.wrong == []
    assert {
        "answers compared",
        "bits flipped in what a server that joins sends or gets",
        "hanging templates ended",
        "servers with other weights refused",
        "silent connections closed",
    } <= findings.counts.keys()
    assert any(name.startswith("kills") for name in findings.counts)


@pytest.mark.full
def test_a_different_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = intruders.expected

    def altered(prompts: list[list[int]]) -> list[tuple[str, list[float]]]:
        return [(text, [*logprobs[:-1], logprobs[-1] + 1e-6]) for text, logprobs in expected(prompts)]

    monkeypatch.setattr(intruders, "expected", altered)
    findings = intruders.run(2.0, 0, QUIET)
    assert findings.counts["answers compared"] > 0
    assert any("is different" in line for line in findings.wrong)
