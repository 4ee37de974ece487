"""Which policy does a job fastest on a machine.

All of MoE-Lightning's variables are searched (section 4.2): batch and micro-batch, attention and experts on
the fast or the slow processor, shares of weights and cache on the fast level; and with them schedules that
stream layers, fetch chosen experts, or compute experts where they are. A policy is priced as the executor
would run it, rounded to whole experts, pages and blocks, prefill included; its task list is priced only while
an order of the tasks could be faster than the best one found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import Hardware, Link
from moesaic.cost.sizes import ModelSizes
from moesaic.policy.offloading.footprint import Footprint, why_not
from moesaic.policy.offloading.pipeline import FORCED, Schedule
from moesaic.policy.offloading.policies import Policy, Workload, slow_share
from moesaic.policy.offloading.pricing import Price, Pricing

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batches of a batch, beside the most that fit."""
LARGEST = 4096
"""Micro-batch."""
SEARCHED: tuple[Schedule, ...] = ("cgopipe", "in-place", "on-demand")


@dataclass(frozen=True)
class SearchLimits:
    """What a search is held to."""

    schedules: tuple[Schedule, ...] = SEARCHED
    largest_batch: float = math.inf
    """Requests that there are."""
    fast_only: bool = False
    """Nothing is on the slow level."""
    micro_batch: int | None = None
    """Requests; None: searched, and so below."""
    micro_batches: int | None = None
    requests: float = math.inf
    """Of the whole job: the last batch takes as long when it is not full."""
    whole_cache: bool = False
    """All of the cache is on one level: what is carried out."""
    near: float = 0.0
    """Of policies within this share of the best, the one that keeps its resources least busy."""


def search(
    model: ModelSizes, hardware: Hardware, workload: Workload, limits: SearchLimits | None = None
) -> Price:
    """The policy with the highest throughput over prefill and decode; of equal ones the first in the grid.

    Raises ConfigError, with what is missing, where no policy fits.
    """
    best = PolicySearch(Pricing(model, hardware, workload), limits or SearchLimits()).best()
    if best is None:
        raise ConfigError(why_not(model, hardware, workload))
    return best


class PolicySearch:
    """Every policy of a grid, the most promising first. Asked again, it prices nothing twice."""

    def __init__(self, pricing: Pricing, limits: SearchLimits) -> None:
        self._pricing = pricing
        self._limits = limits
        bounded = [(pricing.bound(one) * self._filled(one), one) for one in candidates(pricing, limits)]
        self._bounded = sorted(bounded, key=lambda pair: -pair[0])
        self._priced: dict[Policy, Price] = {}

    def best(self, largest_batch: float = math.inf) -> Price | None:
        """Of policies with at most so many requests; None where none fits."""
        found: list[tuple[float, Price]] = []
        most, near = 0.0, 1 - self._limits.near
        for bound, policy in self._bounded:
            if policy.batch > largest_batch:
                continue
            if bound <= most * near:
                break
            if policy not in self._priced:
                self._priced[policy] = self._pricing.price(policy)
            price = self._priced[policy]
            found.append((price.throughput * self._filled(policy), price))
            most = max(most, found[-1][0])
        good = [price for throughput, price in found if throughput >= most * near]
        if near == 1:
            return good[0] if good else None
        return min(good, key=_busy, default=None)

    def _filled(self, policy: Policy) -> float:
        """Share of all batches' seats that requests sit on. Example: 64 requests, 60 at a time: 64 / 120."""
        requests = self._limits.requests
        if requests == math.inf:
            return 1.0
        return requests / (math.ceil(requests / policy.batch) * policy.batch)


def _busy(price: Price) -> float:
    """Seconds of all resources, for a generated token."""
    steps = price.workload.generate - 1
    seconds = sum(price.prefill.busy.values()) + steps * sum(price.step.busy.values())
    return seconds / price.policy.batch


def candidates(pricing: Pricing, limits: SearchLimits) -> Iterator[Policy]:
    """Every policy of the grid that fits, with as much on the fast level as there is room for."""
    slow = [True, False] if pricing.hardware.slow.processor is not None else [False]
    for schedule in limits.schedules:
        if schedule == "in-place" and not slow[0]:
            continue
        for slow_attention in (one for one in slow if one is FORCED.get(schedule, one)):
            for mu in _sizes(limits):
                policy = Policy(schedule, mu, 1, slow_attention)
                yield from _counted(pricing, policy, limits)


def _sizes(limits: SearchLimits) -> list[int]:
    """Of a micro-batch."""
    if limits.micro_batch is not None:
        return [limits.micro_batch]
    powers = (2**power for power in range(LARGEST.bit_length()))
    return [mu for mu in powers if mu <= min(LARGEST, limits.largest_batch)]


def _counted(pricing: Pricing, policy: Policy, limits: SearchLimits) -> Iterator[Policy]:
    """One micro-batch size, with the counts of the grid and the largest that fits."""
    residuals = (True, False) if _stores(pricing) else (True,)
    for fast_residual, share in itertools.product(residuals, _footprint(pricing).prefill_shares):
        first = replace(policy, fast_residual=fast_residual, prefill_share=share)
        most = min(_most(pricing, first), int(min(limits.largest_batch, 1e9)) // policy.micro_batch)
        counts = COUNTS if limits.micro_batches is None else (limits.micro_batches,)
        for count in sorted({min(count, most) for count in counts} - {0}):
            for one in _allowed(pricing, replace(first, micro_batches=count)):
                policy = replace(one, slow_cache=math.ceil(one.slow_cache)) if limits.whole_cache else one
                if policy != one and not _footprint(pricing).fits(policy):
                    continue
                if not limits.fast_only or is_fast_only(pricing.model, policy):
                    yield _guessing(pricing, policy)


def _guessing(pricing: Pricing, policy: Policy) -> Policy:
    """With the experts that can come while the link has nothing else to do."""
    if policy.schedule != "on-demand":
        return policy
    return replace(policy, likely_experts=pricing.durations.likely_experts(policy))


def _stores(pricing: Pricing) -> bool:
    """Whether the slow level takes rows and cache. One without a processor is the disk."""
    return pricing.hardware.slow.processor is not None


def _allowed(pricing: Pricing, policy: Policy) -> Iterator[Policy]:
    """Those of `filled` that keep nothing where nothing can be kept."""
    for one in filled(pricing, policy):
        if one.slow_cache == 0 or _stores(pricing):
            yield one


def _most(pricing: Pricing, policy: Policy) -> int:
    """Micro-batches that fit somehow, up to the last of COUNTS; 0 where none does."""
    low, high = 0, COUNTS[-1] + 1
    while high - low > 1:
        middle = (low + high) // 2
        if any(True for _ in _allowed(pricing, replace(policy, micro_batches=middle))):
            low = middle
        else:
            high = middle
    return low


def filled(pricing: Pricing, policy: Policy) -> Iterator[Policy]:
    """The policy with the fast level filled: with experts, and where attention is there with cache.

    Experts first, cache first, or half the room for each.
    """
    for fitting in _filled(_footprint(pricing), replace(policy, schedule=SEARCHED[0])):
        one = replace(fitting, schedule=policy.schedule)
        if not (one.in_place and one.static_experts == pricing.model.experts):
            yield one


def _memories(hardware: Hardware) -> Hardware:
    """All that a footprint asks about a machine, which is the same of a slower and of a faster one."""
    fast, slow = (
        replace(one, name="", bandwidth=1.0, processor=None) for one in (hardware.fast, hardware.slow)
    )
    return Hardware("", fast, slow, Link(1.0, 1.0, hardware.link.staging and 1.0))


@lru_cache(maxsize=16)
def _footprint(pricing: Pricing) -> Footprint:
    """One object for all machines with the same memories: what fits there is found once."""
    return _shared(pricing.model, _memories(pricing.hardware), pricing.workload)


_shared = lru_cache(maxsize=16)(Footprint)


@lru_cache(maxsize=1 << 14)
def _filled(footprint: Footprint, policy: Policy) -> tuple[Policy, ...]:
    """Of each way to fill the fast level, where the result fits. It is the same under every schedule."""
    shares = (0.0,) if policy.slow_attention else (0.0, 0.5, 1.0)
    found = dict.fromkeys(_fill(footprint, policy, share) for share in shares)
    return tuple(one for one in found if footprint.fits(one))


def _fill(footprint: Footprint, policy: Policy, for_cache: float) -> Policy:
    """Room is first given to the cache, up to its share, then to experts, then again to the cache."""
    if not policy.slow_attention:
        policy = _with_cache(footprint, policy, for_cache)
    model = footprint.model
    expert = model.expert_bytes * max(model.moe_layers - 2, 1)
    static = math.floor(_room(footprint, policy) / expert)
    whole = replace(policy, static_experts=model.experts)
    if _held(footprint, whole) <= footprint.hardware.fast.room:
        policy = whole
    else:
        policy = replace(policy, static_experts=min(max(static, 0), model.experts - 1))
    return policy if policy.slow_attention else _with_cache(footprint, policy, 1.0)


def _with_cache(footprint: Footprint, policy: Policy, share: float) -> Policy:
    """With as many blocks of each request's cache on the fast level as fit in a share of its room."""
    nothing, all_of_it = (_held(footprint, replace(policy, slow_cache=slow)) for slow in (1.0, 0.0))
    room = footprint.hardware.fast.room - nothing
    fitting = min(max(share * room, 0.0) / (all_of_it - nothing), 1.0) if all_of_it > nothing else 1.0
    return replace(policy, slow_cache=slow_share(footprint.workload, fitting))


def _room(footprint: Footprint, policy: Policy) -> float:
    """Bytes that are free on the fast level; below 0 where too much is there."""
    return footprint.hardware.fast.room - _held(footprint, replace(policy, static_experts=0))


def _held(footprint: Footprint, policy: Policy) -> float:
    """Bytes on the fast level."""
    return sum(footprint.fast(policy).values())


def is_fast_only(model: ModelSizes, policy: Policy) -> bool:
    """Whether nothing is on the slow level."""
    cached = policy.slow_cache == 0 and not policy.slow_attention
    return cached and policy.fast_residual and policy.static_experts == model.experts


def by_flexgen(model: ModelSizes, hardware: Hardware, workload: Workload) -> tuple[Price, float]:
    """FlexGen's policy, rounded and priced as the list of its schedule; and the throughput that it predicts.

    Its constants are the machine's peaks: nothing is fitted. It fits by FlexGen's own count of memory, which
    leaves things out; by ours (`Price.fast`, `Price.slow`) it may not. Raises ConfigError where nothing fits.
    """
    from moesaic.policy.offloading import flexgen

    flops_per_byte = model.attention.pair_flops / model.cache(1, workload.cache_number)
    found = flexgen.search(model, flexgen.Constants.of(hardware, flops_per_byte), workload)
    policy = Policy(
        schedule="s4",
        micro_batch=found.micro_batch,
        micro_batches=found.micro_batches,
        slow_attention=False,
        static_experts=math.floor(found.weights * model.experts),
        slow_cache=slow_share(workload, found.cache),
        fast_residual=found.hidden >= 1,
    )
    return Pricing(model, hardware, workload).price(policy), found.throughput
