"""The best policy of a job on a machine under a cap, with a cache that holds the longest request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import ModelSizes
from moesaic.policy import planner
from moesaic.policy.planner import Limits
from moesaic.policy.policies import BLOCK, Workload
from moesaic.policy.pricing import Price, Pricing

MIB = 1 << 20
USABLE = 0.95
"""Of --fast-memory. The rest is what malloc loses between its pieces."""


@dataclass(frozen=True)
class Job:
    """Requests, in tokens."""

    requests: float
    """How many there are; math.inf: more come."""
    prompt: int
    """Of a request, in the mean."""
    generate: int
    longest: int
    """The most that one request has in the end."""
    padded: int | None = None
    """What each prompt is padded to; None: nothing is."""

    @property
    def computed(self) -> int:
        """Of a prompt with its padding."""
        return self.prompt if self.padded is None else self.padded


class Search:
    """For one job, under one cap or another."""

    def __init__(
        self, model: ModelSizes, hardware: Hardware, job: Job, cache_number: float, limits: Limits
    ) -> None:
        self.model = model
        self._hardware = hardware
        self._workload = Workload(job.computed, max(job.generate, 2), cache_number, unfilled=BLOCK // 2)
        self._longest = math.ceil(job.longest / BLOCK) * BLOCK
        self._limits = limits
        self._token = model.layers * model.cache(1, cache_number)

    def within(self, cap: int) -> tuple[Pricing, Price, int] | None:
        """The best policy, and the tokens that its cache holds: at least the longest request's.

        Where that one is longer than a whole batch of mean ones, room is set aside for it.
        """
        for aside in (0.0, self._longest * self._token):
            pricing = self._pricing(cap, aside)
            price = planner.Search(pricing, self._limits).best()
            if price is None:
                return None
            tokens = int(_cache_room(self._pricing(cap).hardware, price) / self._token)
            tokens = min(tokens, price.policy.batch * self._longest) // BLOCK * BLOCK
            if tokens >= self._longest:
                return self._pricing(cap), price, tokens
        return None

    def allowed(self) -> str:
        """What caps there are to choose from. Example: at least 275MiB."""
        low, high = 0, 1
        while not self._fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return f"at least {high}MiB"

    def _fits(self, mebibytes: int) -> bool:
        """Whether some policy fits even with the longest request's cache set aside."""
        pricing = self._pricing(mebibytes * MIB, self._longest * self._token)
        return any(True for _ in planner.candidates(pricing, self._limits))

    def _pricing(self, cap: float, aside: float = 0.0) -> Pricing:
        """aside: bytes of the cap that no policy gets."""
        memory = max(cap - aside / USABLE, 0.0)
        fast = replace(self._hardware.fast, name="--fast-memory", memory=memory, usable=USABLE)
        return Pricing(self.model, replace(self._hardware, fast=fast), self._workload)


def _cache_room(hardware: Hardware, price: Price) -> float:
    """Bytes that the cache may take on its level."""
    slow = price.policy.slow_cache > 0
    level, held = (hardware.slow, price.slow) if slow else (hardware.fast, price.fast)
    return level.room - sum(held.values()) + held["cache"]
