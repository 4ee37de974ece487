"""A supervisor that stood still, perhaps with its whole machine, takes no silence for a frozen process."""

from __future__ import annotations

import time

import pytest

from moesaic.cluster.member import Member, Role
from moesaic.cluster.supervisor import FROZEN_SECONDS
from moesaic.cluster.suspicion import Lateness
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import cluster


def test_silence_counts_while_the_supervisor_looks() -> None:
    lateness, quiet, heard = Lateness(0.25), Member(Role.SERVER, 0), Member(Role.SERVER, 1)
    quiet.last_seen = heard.last_seen = 10.0
    for now in (10.0, 10.125, 10.375):
        lateness.excuse([quiet, heard], now)
    assert quiet.last_seen == heard.last_seen == 10.0
    heard.last_seen = 109.0  # what it sent before was read after the pause
    lateness.excuse([quiet, heard], 110.375)
    assert (quiet.last_seen, heard.last_seen) == (109.75, 110.375)
    lateness.excuse([quiet, heard], 110.5)
    assert quiet.last_seen == 109.75


@pytest.mark.slow
def test_after_a_pause_of_the_machine_every_process_lives_on() -> None:
    prompts, params = workload(2, 12)
    with cluster(attention_workers=2, expert_servers=2) as served:
        served.submit(prompts, params)
        served.finish()
        served.supervisor._clock = lambda: time.monotonic() + 10 * FROZEN_SECONDS
        served.until(lambda: min(one.silent_seconds for one in served.supervisor.status()) < FROZEN_SECONDS)
        served.submit(prompts, params)
        assert served.finish() == 2 * alone(prompts, params)
        assert [one.deaths for one in served.supervisor.status()] == [0] * 4
