"""Seeded hosts that die, are cut off and are slowed down while requests go on. For `make full`."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Answer
from tests.support.hosts import Host, Hosts, missing
from tests.support.joined_cluster import PREFILL, SERVER, WORKER, JoinedCluster, joined_cluster

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=missing())]
CLUSTERS, FAULTS = 50, 4
WORK = workload(8, 48)
KINDS = ("kill", "cut", "blip", "slow", "lossy")
"""A blip is a cut that may be too short to give anybody up."""
SCHEDULES = ("lockstep", "barrier", "async", "auto")
ROLES: tuple[tuple[str, ...], ...] = ((SERVER,), (WORKER, SERVER), (WORKER, PREFILL), (SERVER, SERVER))


class Troublemaker:
    """Disturbs one host after the other, and makes it whole again some seconds later."""

    def __init__(self, joined: JoinedCluster, hosts: Hosts, seed: int) -> None:
        self._random, self._joined, self._hosts = random.Random(seed), joined, hosts
        self._left, self._next = FAULTS, self._random.randrange(20, 120)
        self._heal: tuple[float, Callable[[], None]] | None = None
        self.roles: dict[int, tuple[str, ...]] = {}
        """What runs on each host."""
        self.done: list[str] = []
        """The faults so far."""

    @property
    def over(self) -> bool:
        return not self._left and self._heal is None

    def __call__(self, tokens: int) -> None:
        if self._heal is not None:
            due, heal = self._heal
            if time.monotonic() >= due:
                self._heal = None
                heal()
                self._next = tokens + self._random.randrange(20, 120)
        elif self._left and tokens >= self._next and self._joined.all_joined:
            self._left -= 1
            number = self._random.choice(sorted(self.roles))
            kind = self._random.choice(KINDS)
            self.done.append(f"{kind} host {number}")
            self._strike(self._hosts[number], kind)

    def _strike(self, host: Host, kind: str) -> None:
        seconds = self._random.choice((3.0, 6.0))
        match kind:
            case "kill":
                host.kill()
                heal = lambda: self._reboot(host)  # noqa: E731
            case "cut" | "blip":
                host.cut()
                heal, seconds = host.heal, seconds if kind == "cut" else self._random.choice((0.3, 1.2, 1.8))
            case "slow":
                host.limit("30mbit")
                heal = lambda: host.limit(None)  # noqa: E731
            case _:
                host.disturb(delay=0.003, loss=0.01)
                heal = host.calm
        self._heal = time.monotonic() + seconds, heal

    def _reboot(self, host: Host) -> None:
        host.boot()
        for role in self.roles[host.number]:
            self._joined.join(host, role)


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*WORK)


@pytest.mark.parametrize("number", range(CLUSTERS))
def test_no_token_differs_and_nothing_is_left(
    number: int, hosts: Hosts, shared: Path, expected: list[Answer]
) -> None:
    rng = random.Random(number)
    roles = {host: rng.choice(ROLES) for host in (1, 2)}
    every = list(itertools.chain.from_iterable(roles.values()))
    shape: dict[str, Any] = {"schedule": SCHEDULES[number % 4], "min_replicas": rng.choice((1, 2))}
    shape |= {"prefill_workers": int(PREFILL in every), "rebalance_interval": rng.choice((0.0, 2.0))}
    with joined_cluster(hosts, shared, attention_workers=1, expert_servers=2, **shape) as joined:
        at_home = {role: len(joined.numbers(role)) for role in set(every)}
        for host, wanted in roles.items():
            joined.bring(hosts[host], wanted)
        trouble = Troublemaker(joined, hosts, number)
        trouble.roles = roles
        while not trouble.over:
            before = joined.served.running.tokens
            offset = lambda tokens, before=before: trouble(tokens + before)  # noqa: E731
            assert joined.answers(*WORK, offset) == expected, trouble.done
        for role, count in at_home.items():
            joined.until(count + every.count(role), role)
        assert joined.answers(*WORK) == expected, trouble.done

        def idle() -> bool:
            stats = joined.served.stats
            return not (
                stats.running or stats.waiting or stats.blocks.num_used or joined.served.router.transfers
            )

        joined.served.until(idle)
