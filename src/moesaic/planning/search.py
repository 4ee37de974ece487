"""Searches the best policy for a job on a machine under a memory cap, with a cache for the longest
request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import ModelSizes
from moesaic.policy.offloading import planner
from moesaic.policy.offloading.footprint import explain_misfit
from moesaic.policy.offloading.planner import SearchLimits
from moesaic.policy.offloading.policies import BLOCK, Workload
from moesaic.policy.offloading.pricing import Price, Pricing

MIB = 1 << 20
USABLE = 0.95
"""Usable share of --fast-memory. The rest is lost to fragmentation."""


@dataclass(frozen=True)
class Job:
    """The requests of a job. Lengths are in tokens."""

    requests: float
    """Number of requests, or math.inf if their number is not known."""
    prompt: int
    """Mean length of a prompt."""
    generate: int
    longest: int
    """Maximum final length of a request, prompt and answer."""
    padded_length: int | None = None
    """Length to which each prompt is padded. None: no padding."""

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens of each prompt, including padding."""
        return self.prompt if self.padded_length is None else self.padded_length


class JobSearch:
    """Searches policies for one job, under any memory cap."""

    def __init__(
        self, model: ModelSizes, hardware: Hardware, job: Job, cache_number: float, limits: SearchLimits
    ) -> None:
        self.model = model
        self._hardware = hardware
        self._workload = Workload(
            job.num_computed_tokens, max(job.generate, 2), cache_number, unfilled=BLOCK // 2
        )
        self._longest = math.ceil(job.longest / BLOCK) * BLOCK
        self._limits = limits
        self._token = model.layers * model.cache(1, cache_number)
        is_loaded = hardware.slow.processor is not None
        self._layer_cache_bytes = 2 * self._longest * self._token / model.layers if is_loaded else 0.0
        """Bytes for the longest request's cache in one layer, twice, if it is loaded for attention.

        They are needed since a policy assumes that all requests have the mean length.
        """

    def find_policy(self, cap: int) -> tuple[Pricing, Price, int] | None:
        """The best policy under `cap`, and the capacity of its cache in tokens, or None if nothing fits.

        The cache has room for the longest request at least. If that has more tokens than a batch of mean
        requests, memory is reserved for it.
        """
        for reserved_bytes in (0.0, self._longest * self._token):
            pricing = self._pricing(cap, reserved_bytes + self._layer_cache_bytes)
            price = planner.PolicySearch(pricing, self._limits).best()
            if price is None:
                return None
            tokens = int(
                _cache_room(self._pricing(cap, self._layer_cache_bytes).hardware, price) / self._token
            )
            # A batch can never fill more, even if all of its requests are as long as the longest.
            tokens = min(tokens, price.policy.batch * self._longest) // BLOCK * BLOCK
            if tokens >= self._longest:
                return self._pricing(cap), price, tokens
        return None

    def find_least_cap(self, cap: int) -> int | None:
        """The smallest cap, in MiB, under which a policy fits, or None if the cap is not the cause.

        Then the slow level is too small, or the schedule needs some experts on the slow level while all
        would fit on the fast one.
        """
        low, high = 0, self._sufficient_mebibytes()
        if not self._fits(high):
            return None
        # No policy fits into `low`, and some policy fits into `high`.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return None if high * MIB <= cap else high

    def explain_misfit(self, cap: int) -> str:
        """A message that no policy fits, and why."""
        reason = explain_misfit(self.model, self._pricing(cap).hardware, self._workload)
        return f"--offload-schedule {' or '.join(self._limits.schedules)}: {reason}"

    def _sufficient_mebibytes(self) -> int:
        """A number of MiB in which every policy fits."""
        requests = min(self._limits.largest_batch, planner.LARGEST * planner.COUNTS[-1])
        token = self._token + 4 * self.model.hidden * self.model.row_number
        return 1024 + math.ceil(2 * (self.model.weights + requests * self._longest * token) / MIB)

    def _fits(self, mebibytes: int) -> bool:
        """True if some policy fits while memory for the longest request's cache is reserved."""
        pricing = self._pricing(mebibytes * MIB, self._layer_cache_bytes + self._longest * self._token)
        return any(True for _ in planner.candidates(pricing, self._limits))

    def _pricing(self, cap: float, reserved_bytes: float = 0.0) -> Pricing:
        """The pricing under a cap. reserved_bytes: bytes of the cap that are reserved."""
        memory = max(cap - reserved_bytes / USABLE, 0.0)
        fast = replace(self._hardware.fast, name="--fast-memory", memory=memory, usable=USABLE)
        return Pricing(self.model, replace(self._hardware, fast=fast), self._workload)


def _cache_room(hardware: Hardware, price: Price) -> float:
    """Bytes that the cache may take on its level."""
    slow = price.policy.slow_cache > 0
    level, footprint = (hardware.slow, price.slow) if slow else (hardware.fast, price.fast)
    return level.room - sum(footprint.values()) + footprint["cache"]
