"""What a silent process of another host is taken for."""

from __future__ import annotations

import pytest

from moesaic.policy.fleet.silence import RULE, SilenceRule, Verdict


@pytest.mark.parametrize(
    ("silence", "in_service", "verdict"),
    [
        (0.8, True, Verdict.HEALTHY),
        (1.0, True, Verdict.SUSPECT),
        (1.8, True, Verdict.SUSPECT),
        (2.0, True, Verdict.DEAD),
        (2.0, False, Verdict.HEALTHY),
        (30.0, False, Verdict.DEAD),
    ],
)
def test_worked_example(silence: float, in_service: bool, verdict: Verdict) -> None:
    assert SilenceRule().judge(silence, in_service) is verdict


def test_a_process_waits_longer_for_its_supervisor_than_the_supervisor_for_it() -> None:
    """A supervisor that is slow for a moment would otherwise lose all hosts at once."""
    assert RULE.suspect_seconds < RULE.dead_seconds < RULE.lost_supervisor < RULE.gone_while_starting
