"""Searches the fastest policy for a job on a machine.

The search covers all variables of MoE-Lightning (section 4.2): batch and micro-batch, the processor of
attention and of experts, and the shares of weights and cache on the fast level. It also covers the
schedules that stream layers, load chosen experts, compute experts in place, or split them by price.

A policy is priced as the executor would run it: rounded to whole experts, pages and blocks, including
prefill. Its task list is priced only if some order of the tasks could be faster than the best policy so
far.
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
from moesaic.policy.offloading import flexgen
from moesaic.policy.offloading.footprint import Footprint, explain_misfit
from moesaic.policy.offloading.pipeline import FORCED, Schedule
from moesaic.policy.offloading.policies import Policy, Workload, slow_share
from moesaic.policy.offloading.pricing import Price, Pricing

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of micro-batches that are searched, besides the largest that fits."""
LARGEST = 4096
"""Largest micro-batch that is searched."""
SEARCHED: tuple[Schedule, ...] = ("cgopipe", "in-place", "on-demand", "split")


@dataclass(frozen=True)
class SearchLimits:
    """Constraints of a search."""

    schedules: tuple[Schedule, ...] = SEARCHED
    largest_batch: float = math.inf
    """Maximum number of requests in a batch."""
    fast_only: bool = False
    """True: nothing may be on the slow level."""
    micro_batch: int | None = None
    """Requests in a micro-batch. None: the search chooses."""
    micro_batches: int | None = None
    """Number of micro-batches. None: the search chooses."""
    requests: float = math.inf
    """Number of requests of the whole job. A last batch that is not full takes as long as a full one."""
    split_cache: bool = False
    """True: each level may have a share of the cache. `run-batch` and `serve` put all of it on one."""
    tolerance: float = 0.0
    """Among policies whose throughput is within this share of the best, the one that keeps resources least
    busy is taken."""


def search(
    model: ModelSizes, hardware: Hardware, workload: Workload, limits: SearchLimits | None = None
) -> Price:
    """Find the policy with the highest throughput over prefill and decode; of equal ones the first in the
    grid.

    Raises ConfigError, naming what is missing, if no policy fits.
    """
    best = PolicySearch(Pricing(model, hardware, workload), limits or SearchLimits()).best()
    if best is None:
        raise ConfigError(explain_misfit(model, hardware, workload))
    return best


class PolicySearch:
    """Searches the policies of a grid, the most promising first. Each policy is priced only once."""

    def __init__(self, pricing: Pricing, limits: SearchLimits) -> None:
        self._pricing = pricing
        self._limits = limits
        bounds = [(pricing.bound(one) * self._fill_share(one), one) for one in candidates(pricing, limits)]
        self._policies_by_bound = sorted(bounds, key=lambda pair: -pair[0])
        self._prices: dict[Policy, Price] = {}

    def best(self, largest_batch: float = math.inf) -> Price | None:
        """The price of the best policy with at most this number of requests, or None if none fits."""
        candidates: list[tuple[float, Price]] = []
        best_throughput, tolerance = 0.0, 1 - self._limits.tolerance
        for bound, policy in self._policies_by_bound:
            if policy.batch > largest_batch:
                continue
            if bound <= best_throughput * tolerance:
                break
            if policy not in self._prices:
                self._prices[policy] = self._pricing.price(policy)
            price = self._prices[policy]
            candidates.append((price.throughput * self._fill_share(policy), price))
            best_throughput = max(best_throughput, candidates[-1][0])
        best_prices = [price for throughput, price in candidates if throughput >= best_throughput * tolerance]
        if tolerance == 1:
            return best_prices[0] if best_prices else None
        return min(best_prices, key=_busy, default=None)

    def _fill_share(self, policy: Policy) -> float:
        """Share of the slots of all batches that requests fill.

        Example: 64 requests, 60 at a time, fill 64 / 120.
        """
        requests = self._limits.requests
        if requests == math.inf:
            return 1.0
        return requests / (math.ceil(requests / policy.batch) * policy.batch)


def _busy(price: Price) -> float:
    """Busy seconds of all resources for one generated token of each request."""
    steps = price.workload.generate - 1
    seconds = sum(price.prefill.busy.values()) + steps * sum(price.step.busy.values())
    return seconds / price.policy.batch


def candidates(pricing: Pricing, limits: SearchLimits) -> Iterator[Policy]:
    """Every policy of the grid that fits, with as much as possible on the fast level."""
    slow = [True, False] if pricing.hardware.slow.processor is not None else [False]
    for schedule in limits.schedules:
        if schedule in ("in-place", "split") and not slow[0]:
            continue
        for slow_attention in (one for one in slow if one is FORCED.get(schedule, one)):
            for mu in _sizes(limits):
                policy = Policy(schedule, mu, 1, slow_attention)
                yield from _list_counts(pricing, policy, limits)


def _sizes(limits: SearchLimits) -> list[int]:
    """The micro-batch sizes to search."""
    if limits.micro_batch is not None:
        return [limits.micro_batch]
    powers = (2**power for power in range(LARGEST.bit_length()))
    return [mu for mu in powers if mu <= min(LARGEST, limits.largest_batch)]


def _list_counts(pricing: Pricing, policy: Policy, limits: SearchLimits) -> Iterator[Policy]:
    """The policies of one micro-batch size, with the counts of the grid and with the largest count that
    fits."""
    residuals = (True, False) if _stores(pricing) else (True,)
    for fast_residual, share in itertools.product(residuals, _footprint(pricing).prefill_shares):
        first = replace(policy, fast_residual=fast_residual, prefill_share=share)
        max_count = min(
            _max_micro_batches(pricing, first), int(min(limits.largest_batch, 1e9)) // policy.micro_batch
        )
        counts = COUNTS if limits.micro_batches is None else (limits.micro_batches,)
        for count in sorted({min(count, max_count) for count in counts} - {0}):
            for one in _list_allowed_policies(pricing, replace(first, micro_batches=count)):
                policy = one if limits.split_cache else replace(one, slow_cache=math.ceil(one.slow_cache))
                if policy != one and not _footprint(pricing).fits(policy):
                    continue
                if not limits.fast_only or is_fast_only(pricing.model, policy):
                    yield _guessing(pricing, policy)


def _guessing(pricing: Pricing, policy: Policy) -> Policy:
    """The policy with the number of experts that can be prefetched while the link would be idle."""
    if policy.schedule != "on-demand":
        return policy
    return replace(policy, likely_experts=pricing.durations.likely_experts(policy))


def _stores(pricing: Pricing) -> bool:
    """True if the slow level can hold rows and cache.

    A level without a processor is the disk, which cannot.
    """
    return pricing.hardware.slow.processor is not None


def _list_allowed_policies(pricing: Pricing, policy: Policy) -> Iterator[Policy]:
    """The policies of `fill_fast_level` that put nothing on a level that cannot hold it."""
    for one in fill_fast_level(pricing, policy):
        if one.slow_cache == 0 or _stores(pricing):
            yield one


def _max_micro_batches(pricing: Pricing, policy: Policy) -> int:
    """The largest number of micro-batches that fits in some way, up to the last of COUNTS. 0: none fits."""
    low, high = 0, COUNTS[-1] + 1
    while high - low > 1:
        middle = (low + high) // 2
        if any(True for _ in _list_allowed_policies(pricing, replace(policy, micro_batches=middle))):
            low = middle
        else:
            high = middle
    return low


def fill_fast_level(pricing: Pricing, policy: Policy) -> Iterator[Policy]:
    """The policy with the fast level filled: with experts, and with cache if attention is there.

    There are three variants: experts first, cache first, or half the room for each.
    """
    for fitting in _fill_variants(_footprint(pricing), replace(policy, schedule=SEARCHED[0])):
        one = replace(fitting, schedule=policy.schedule)
        if not (one.computes_there and one.static_experts == pricing.model.experts):
            yield one


def _memories(hardware: Hardware) -> Hardware:
    """The parts of a machine that a footprint depends on.

    They are the same for slower and faster machines.
    """
    fast, slow = (
        replace(one, name="", bandwidth=1.0, processor=None) for one in (hardware.fast, hardware.slow)
    )
    return Hardware("", fast, slow, Link(1.0, 1.0, hardware.link.staging and 1.0))


@lru_cache(maxsize=16)
def _footprint(pricing: Pricing) -> Footprint:
    """The footprint for these memories.

    Machines with the same memories share one, so that it is computed once.
    """
    return _shared(pricing.model, _memories(pricing.hardware), pricing.workload)


_shared = lru_cache(maxsize=16)(Footprint)


@lru_cache(maxsize=1 << 14)
def _fill_variants(footprint: Footprint, policy: Policy) -> tuple[Policy, ...]:
    """The policies that result from each way to fill the fast level, if they fit.

    They are the same for every schedule.
    """
    shares = (0.0,) if policy.slow_attention else (0.0, 0.5, 1.0)
    policies = dict.fromkeys(_fill(footprint, policy, share) for share in shares)
    return tuple(one for one in policies if footprint.fits(one))


def _fill(footprint: Footprint, policy: Policy, for_cache: float) -> Policy:
    """Fill the room with cache up to its share, then with experts, then with cache again."""
    if not policy.slow_attention:
        policy = _with_cache(footprint, policy, for_cache)
    model = footprint.model
    expert = model.expert_bytes * max(model.moe_layers - 2, 1)
    static = math.floor(_room(footprint, policy) / expert)
    all_static = replace(policy, static_experts=model.experts)
    if _count_fast_bytes(footprint, all_static) <= footprint.hardware.fast.room:
        policy = all_static
    else:
        policy = replace(policy, static_experts=min(max(static, 0), model.experts - 1))
    return policy if policy.slow_attention else _with_cache(footprint, policy, 1.0)


def _with_cache(footprint: Footprint, policy: Policy, share: float) -> Policy:
    """The policy with as many cache blocks of each request on the fast level as fit in `share` of its
    room."""
    nothing, all_of_it = (
        _count_fast_bytes(footprint, replace(policy, slow_cache=slow)) for slow in (1.0, 0.0)
    )
    room = footprint.hardware.fast.room - nothing
    fitting = min(max(share * room, 0.0) / (all_of_it - nothing), 1.0) if all_of_it > nothing else 1.0
    return replace(policy, slow_cache=slow_share(footprint.workload, fitting))


def _room(footprint: Footprint, policy: Policy) -> float:
    """Free bytes on the fast level without static experts. Negative if it is overfull."""
    return footprint.hardware.fast.room - _count_fast_bytes(footprint, replace(policy, static_experts=0))


def _count_fast_bytes(footprint: Footprint, policy: Policy) -> float:
    """Bytes used on the fast level."""
    return sum(footprint.fast(policy).values())


def is_fast_only(model: ModelSizes, policy: Policy) -> bool:
    """True if nothing is on the slow level."""
    has_fast_cache = policy.slow_cache == 0 and not policy.slow_attention
    return has_fast_cache and policy.fast_residual and policy.static_experts == model.experts


def by_flexgen(model: ModelSizes, hardware: Hardware, workload: Workload) -> tuple[Price, float]:
    """FlexGen's policy, rounded and priced as the task list of its schedule, and the throughput that
    FlexGen predicts.

    FlexGen's constants are the machine's peaks; nothing is fitted. The policy fits by FlexGen's own count
    of memory, which leaves things out. By our count (`Price.fast`, `Price.slow`) it may not fit. Raises
    ConfigError if nothing fits.
    """
    flops_per_byte = model.attention.pair_flops / model.cache(1, workload.cache_number)
    flexgen_policy = flexgen.search(
        model, flexgen.Constants.from_hardware(hardware, flops_per_byte), workload
    )
    policy = Policy(
        schedule="s4",
        micro_batch=flexgen_policy.micro_batch,
        micro_batches=flexgen_policy.micro_batches,
        slow_attention=False,
        static_experts=math.floor(flexgen_policy.weights * model.experts),
        slow_cache=slow_share(workload, flexgen_policy.cache),
        fast_residual=flexgen_policy.hidden >= 1,
    )
    return Pricing(model, hardware, workload).price(policy), flexgen_policy.throughput
