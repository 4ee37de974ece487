"""The limits of a search, and which of equally good policies it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.policy.offloading.test_planner import SMALL, TINY

from moesaic.cost.hardware import Level
from moesaic.policy.offloading.planner import SearchLimits, candidates, search
from moesaic.policy.offloading.policies import Workload
from moesaic.policy.offloading.pricing import Price, Pricing

DISK = replace(SMALL, slow=Level("disk", 1e9, 2e8, None))
JOB = Workload(20, 10)


def test_nothing_is_kept_on_a_disk() -> None:
    for policy in candidates(Pricing(TINY, DISK, JOB), SearchLimits(("cgopipe", "on-demand", "in-place"))):
        assert policy.slow_cache == 0 and policy.fast_residual and not policy.slow_attention
        assert policy.schedule != "in-place"


def test_sizes_that_are_given_are_the_only_ones() -> None:
    found = list(candidates(Pricing(TINY, DISK, JOB), SearchLimits(micro_batch=3, micro_batches=2)))
    assert found and {(one.micro_batch, one.micro_batches) for one in found} == {(3, 2)}
    assert not list(candidates(Pricing(TINY, DISK, JOB), SearchLimits(micro_batch=3, largest_batch=2)))


def test_seats_that_stay_empty_count() -> None:
    """Batches of 8 or of 12. With 12 requests, the second batch of 8 would be half empty."""
    limits = SearchLimits(("cgopipe",), micro_batch=4)
    for requests in (8, 12):
        best = search(TINY, DISK, JOB, replace(limits, requests=requests, largest_batch=requests))
        assert requests % best.policy.batch == 0


@pytest.mark.parametrize("near", [0.01, 0.1, 0.5])
def test_of_policies_near_the_best_the_least_busy_is_taken(near: float) -> None:
    best, calm = (
        search(TINY, DISK, JOB, SearchLimits(tolerance=share, largest_batch=64)) for share in (0.0, near)
    )
    assert (1 - near) * best.throughput <= calm.throughput <= best.throughput

    def busy(price: Price) -> float:
        seconds = sum(price.prefill.busy.values()) + (JOB.generate - 1) * sum(price.step.busy.values())
        return seconds / price.policy.batch

    assert busy(calm) <= busy(best)
