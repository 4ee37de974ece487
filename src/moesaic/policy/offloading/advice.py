"""Advice beside a plan: which faster or larger part would help most, and whether moving weights pays off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moesaic.cost.hardware import Hardware, Processor
from moesaic.cost.sizes import ModelSizes
from moesaic.policy.offloading.pipeline import Schedule
from moesaic.policy.offloading.planner import PolicySearch, SearchLimits, search
from moesaic.policy.offloading.policies import Workload
from moesaic.policy.offloading.pricing import Price, Pricing

STAYING: tuple[Schedule, ...] = ("in-place", "on-demand", "split")
"""Schedules that stream no layers of weights."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Batch sizes at which streaming weights is compared with leaving them where they are."""


@dataclass(frozen=True)
class Help:
    """The effect of one part of the machine being twice as large or as fast."""

    name: str
    gain: float
    """Throughput with the better part / throughput now. The policy is searched again for it."""


def helps(model: ModelSizes, hardware: Hardware, workload: Workload, now: Price) -> list[Help]:
    """The effects of doubling each part of the machine, the most helpful first.

    Here the roofline prices experts. A measured rate of experts depends on both processor and memory, so it
    cannot show what doubling one of them does.
    """
    bare, base = _by_roofline(hardware), now.throughput
    if bare != hardware:
        base = search(model, bare, workload).throughput
    effects = [
        Help(name, search(model, better, workload).throughput / base) for name, better in _double_parts(bare)
    ]
    return sorted(effects, key=lambda one: -one.gain)


def _double_parts(hardware: Hardware) -> Iterator[tuple[str, Hardware]]:
    fast, slow, link = hardware.fast, hardware.slow, hardware.link
    yield f"more {fast.name}", replace(hardware, fast=replace(fast, memory=2 * fast.memory))
    yield f"faster {fast.name}", replace(hardware, fast=replace(fast, bandwidth=2 * fast.bandwidth))
    if fast.processor is not None:
        quick = replace(fast, processor=_faster(fast.processor))
        yield f"a faster processor for {fast.name}", replace(hardware, fast=quick)
    yield f"more {slow.name}", replace(hardware, slow=replace(slow, memory=2 * slow.memory))
    yield f"faster {slow.name}", replace(hardware, slow=replace(slow, bandwidth=2 * slow.bandwidth))
    if slow.processor is not None:
        quick = replace(slow, processor=_faster(slow.processor))
        yield f"a faster processor for {slow.name}", replace(hardware, slow=quick)
    staging = None if link.staging is None else 2 * link.staging
    wider = replace(
        link, down_bandwidth=2 * link.down_bandwidth, up_bandwidth=2 * link.up_bandwidth, staging=staging
    )
    yield "a faster link", replace(hardware, link=wider)


def _by_roofline(hardware: Hardware) -> Hardware:
    fast, slow = (
        replace(level, processor=level.processor and replace(level.processor, experts=()))
        for level in (hardware.fast, hardware.slow)
    )
    return replace(hardware, fast=fast, slow=slow)


def _faster(processor: Processor) -> Processor:
    return processor.times(2)


@dataclass(frozen=True)
class Batch:
    """The best throughputs, in tokens/s, with at most this number of requests at once. None: nothing fits."""

    requests: int
    streamed: float | None
    """Throughput if whole layers of experts are streamed over the link."""
    left: float | None
    """Throughput if weights stay: the experts' own level computes them, or only chosen experts are loaded, or
    both."""


def by_batch(model: ModelSizes, hardware: Hardware, workload: Workload, max_batch: int) -> list[Batch]:
    """Compare both ways for batches of 1, 2, 4, ... up to `max_batch` requests."""
    pricing = Pricing(model, hardware, workload)
    streaming = PolicySearch(pricing, SearchLimits(("cgopipe",), max_batch))
    staying = PolicySearch(pricing, SearchLimits(STAYING, max_batch))

    def rate(policy_search: PolicySearch, requests: int) -> float | None:
        best = policy_search.best(requests)
        return None if best is None else best.throughput

    return [
        Batch(requests, rate(streaming, requests), rate(staying, requests))
        for requests in BATCHES
        if requests <= max(max_batch, 1)
    ]


def find_worthwhile_batch(batches: list[Batch]) -> int | None:
    """The batch from which on streaming layers is always faster than leaving weights in place, or None.

    Example: at 1, 2, 4 requests, streaming gives 1, 4, 9 tokens/s and leaving gives 3, 3, 3. The answer is
    2.
    """
    first = None
    for one in batches:
        faster = one.streamed is not None and (one.left is None or one.streamed > one.left)
        first = (first or one.requests) if faster else None
    return first


def without_offloading(model: ModelSizes, hardware: Hardware, workload: Workload) -> Price | None:
    """The price of the best policy with everything on the fast level, or None if that does not fit."""
    return PolicySearch(Pricing(model, hardware, workload), SearchLimits(("cgopipe",), fast_only=True)).best()
