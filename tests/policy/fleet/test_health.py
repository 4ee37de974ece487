"""What an outage means, by its age and by what can be expected of the processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.fleet.health import LONGEST_OUTAGE, HealthPolicy, Outlook, State

GAP = Outlook(("no attention worker serves",), is_starting=True, cause="killed by signal 9")


def test_a_young_outage_with_a_replacement_is_no_outage_for_users() -> None:
    policy = HealthPolicy(timeout=60.0)
    health = policy.judge(GAP, 10.0)
    assert health.state is State.RECOVERING and health.is_available
    assert health.reason == "no attention worker serves: killed by signal 9"
    assert policy.judge(GAP, 69.9).is_available
    assert policy.judge(Outlook(), 70.0).state is State.SERVING
    assert policy.judge(GAP, 200.0).is_available, "it is another outage"


def test_an_old_outage_is_told_and_begun_answers_wait_for_a_replacement() -> None:
    policy = HealthPolicy(timeout=60.0)
    policy.judge(GAP, 0.0)
    health = policy.judge(GAP, 60.0)
    assert health.state is State.UNAVAILABLE and not health.ends_begun_answers
    assert policy.judge(replace(GAP, is_starting=False), 61.0).ends_begun_answers


def test_an_outage_that_nobody_will_end_is_told_at_once() -> None:
    health = HealthPolicy(timeout=60.0).judge(replace(GAP, is_starting=False), 0.0)
    assert health.state is State.UNAVAILABLE
    assert not health.ends_begun_answers, "the file that is missing may come back soon"


def test_processes_that_keep_dying_end_the_service_at_once() -> None:
    health = HealthPolicy().judge(replace(GAP, keeps_dying=True), 0.0)
    assert health.state is State.END
    assert health.reason == ("no attention worker serves, and its processes keep dying: killed by signal 9")


def test_a_service_that_computes_nothing_for_long_ends() -> None:
    policy = HealthPolicy(timeout=1.0)
    policy.judge(GAP, 0.0)
    assert policy.judge(GAP, LONGEST_OUTAGE - 0.1).state is State.UNAVAILABLE
    ended = policy.judge(GAP, LONGEST_OUTAGE)
    assert ended.state is State.END
    assert ended.reason == "no attention worker serves for 5 s: killed by signal 9"


def test_where_processes_may_join_it_waits_for_them() -> None:
    policy, joined = HealthPolicy(timeout=1.0), replace(GAP, is_starting=False, may_join=True)
    assert policy.judge(joined, 0.0).state is State.RECOVERING
    assert policy.judge(joined, 1.0).state is State.UNAVAILABLE
    assert policy.judge(replace(joined, keeps_dying=True), 99.0).state is State.UNAVAILABLE


@pytest.mark.parametrize(("seconds", "timeout"), [(0.1, 60.0), (30.0, 60.0), (45.0, 90.0), (600.0, 1200.0)])
def test_an_outage_may_last_two_starts(seconds: float, timeout: float) -> None:
    policy = HealthPolicy()
    policy.record_start("expert server", seconds)
    policy.record_start("attention worker", 0.05)
    assert policy.timeout == timeout
    chosen = HealthPolicy(7.0)
    chosen.record_start("expert server", seconds)
    assert chosen.timeout == 7.0


OUTLOOKS = st.builds(Outlook, st.sampled_from([(), ("a gap",)]), st.booleans(), st.booleans(), st.booleans())


@given(st.lists(st.tuples(st.floats(0.0, 100.0), OUTLOOKS), min_size=1, max_size=30))
def test_200_means_computed_or_soon(steps: list[tuple[float, Outlook]]) -> None:
    """The law, in its own words: see the docstring of the module."""
    policy, now, began = HealthPolicy(timeout=60.0), 0.0, None
    for seconds, outlook in steps:
        now += seconds
        began = None if not outlook.gaps else now if began is None else began
        age = 0.0 if began is None else now - began
        health = policy.judge(outlook, now)
        soon = age < 60.0 and (outlook.is_starting or outlook.may_join)
        may_end = not outlook.may_join and (outlook.keeps_dying or age >= 300.0)
        assert health.is_available == (not outlook.gaps or (soon and not may_end))
        assert (health.state is State.END) == bool(outlook.gaps and may_end)
        assert bool(health.reason) == bool(outlook.gaps)
