"""Says before a model is loaded from which acceptance drafted tokens pay (--speculative-config).

Question: From which acceptance do drafted tokens pay?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moesaic.core.speculation import COUNTS, break_even
from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.outlook import choose_lengths
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.pricing import Pricing
from moesaic.policy.scheduling.step_prices import work_by_rows

Price = Callable[[int], float]
"""The price of a step by its rows. Only ratios count."""


@dataclass(frozen=True)
class Drafts:
    """The price of steps that check drafted tokens, and what it asks of them."""

    requests: int
    """Number of requests in a step."""
    tokens: int
    """Drafted tokens of each request."""
    price: float
    """The price of such a step over that of a step without drafts."""
    acceptance: float | None
    """The probability that a drafted token is right from which such steps pay. None: they never do."""


def list_drafts(price: Price) -> list[Drafts]:
    """When drafts pay, by requests and drafted tokens. Steps with more rows than are ever drafted are left
    out."""
    table = []
    for requests, tokens in COUNTS:
        ratio = price(requests * (1 + tokens)) / price(requests)
        table.append(Drafts(requests, tokens, ratio, break_even(ratio, tokens)))
    return table


def price_by_bytes(model: ModelSizes) -> Price:
    """Prices by the bytes of a model, with which a worker begins. See `work_by_rows`."""
    return work_by_rows(
        model.other_bytes, model.moe_layers * model.routed_bytes, model.experts, round(model.top_k)
    )


def price_by_machine(model: ModelSizes, hardware: Hardware, cache_number: float, context: int) -> Price:
    """Seconds by the cost model of `moesaic plan`, with everything on the fast level.

    Each row attends to a context of its own, so that of several rows of a request is counted several times.
    """
    pricing = Pricing(model, hardware, Workload(*choose_lengths(context), cache_number))

    def price(rows: int) -> float:
        policy = Policy("cgopipe", rows, 1, False, static_experts=model.experts, slow_cache=0.0)
        return pricing.step(policy).seconds

    return price
