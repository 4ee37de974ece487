"""What a silent process of another host is taken for."""

from __future__ import annotations

import pytest

from moesaic.policy.fleet.silence import RULE, SilenceRule, Verdict


@pytest.mark.parametrize(
    ("silence", "in_service", "verdict"),
    [
        (0.8, True, Verdict.TRUSTED),
        (1.0, True, Verdict.SUSPECTED),
        (1.8, True, Verdict.SUSPECTED),
        (2.0, True, Verdict.GONE),
        (2.0, False, Verdict.TRUSTED),
        (30.0, False, Verdict.GONE),
    ],
)
def test_worked_example(silence: float, in_service: bool, verdict: Verdict) -> None:
    assert SilenceRule().judge(silence, in_service) is verdict


def test_a_process_waits_longer_for_its_supervisor_than_the_supervisor_for_it() -> None:
    """A supervisor that is slow for a moment would otherwise lose all hosts at once."""
    assert RULE.suspected < RULE.gone < RULE.lost_supervisor < RULE.gone_while_starting
