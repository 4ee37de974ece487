"""Divides memory between the experts that stay and the KV cache, again and again while a server runs.

A *division* says how many experts of each layer stay and how many KV blocks there are beside them. Each one
of the list fits under the cap. Which of them is the fastest depends on the requests:

 * With few requests blocks are left over. More experts may stay, and fewer are read.
 * With many requests more of them run at once, and each expert that is read serves more rows.

Each division is priced for the requests that run and wait. It runs as many of them, in order of arrival, as
it has blocks for. A step takes the seconds of computing and those of reading the experts that are missing.

A division is left at once where a running request needs its blocks. Otherwise another one must have gained
tokens since it began to be better: what it gains in PATIENCE seconds, and what moving and the reads that fill
the places of its experts cost. Tokens that it would have lost meanwhile count against it. So a load that
flips faster than that changes nothing, and of two divisions the one is kept that is better in the mean.

Question: How is memory divided between experts and the KV cache while a server runs?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.offload import BlockNeeds, Division, DivisionPrices, ExpertReads

PATIENCE = 3.0
"""Seconds for which another division must be better before it is taken."""
MOVING_SECONDS = 0.25
"""Seconds that a move takes, beside reads."""
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MemorySizes:
    """What divisions take, in bytes.

    >>> sizes = MemorySizes(num_experts=8, slot=30, place=10, lines=(4, 4), page=1)
    >>> sizes.count_experts(2), sizes.count_cache(5), sizes.blocks_in(47)
    (180, 40, 5)
    """

    num_experts: int
    """Number of experts of each layer."""
    slot: int
    """Bytes of an expert that stays in each layer, in whole pages."""
    place: int
    """Bytes of an expert of the largest layer. Each expert that does not stay has two such places."""
    lines: tuple[int, ...]
    """Bytes of a KV block in each tensor of the cache."""
    page: int
    """Memory is given back in pages of this size."""

    def count_experts(self, residents: int) -> int:
        """Bytes of all experts of which so many in each layer stay."""
        return residents * self.slot + 2 * self.count_shared(residents)

    def count_shared(self, residents: int) -> int:
        """Bytes of one of the two slots for experts that do not stay."""
        return _round_up((self.num_experts - residents) * self.place, self.page)

    def count_cache(self, num_blocks: int) -> int:
        """Bytes of so many KV blocks."""
        return sum(_round_up(num_blocks * line, self.page) for line in self.lines)

    def blocks_in(self, num_bytes: int) -> int:
        """The most KV blocks that fit into so many bytes."""
        low, high = 0, max(0, num_bytes) // max(1, sum(self.lines)) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.count_cache(middle) <= num_bytes else (low, middle)
        return low


def _round_up(size: int, page: int) -> int:
    return -(-size // page) * page


def list_divisions(sizes: MemorySizes, planned_division: Division, least_blocks: int) -> list[Division]:
    """The planned division, and those with more experts that stay and fewer blocks, within its bytes.

    least_blocks: a division with fewer is left out, unless it is the planned one.
    """
    cap = sizes.count_experts(planned_division.residents) + sizes.count_cache(planned_division.num_blocks)
    divisions = [planned_division]
    for residents in range(planned_division.residents + 1, sizes.num_experts + 1):
        fitting_blocks = sizes.blocks_in(cap - sizes.count_experts(residents))
        num_blocks = min(divisions[-1].num_blocks, fitting_blocks)
        if num_blocks < least_blocks:
            break
        divisions.append(Division(residents, num_blocks))
    return divisions


class Dividing:
    """Chooses a division for the requests of a server, between two steps.

    >>> prices = DivisionPrices((1, 8), (0.1, 0.2), 0.01, layers=4, num_experts=8, top_k=2)
    >>> dividing = Dividing([Division(2, 80), Division(6, 10)], prices)
    >>> one, many = BlockNeeds(running=(4,), running_blocks=4), BlockNeeds(waiting=(4,) * 8)
    >>> dividing.choose(0.0, one).residents, dividing.choose(0.1, many).residents
    (6, 6)
    >>> dividing.choose(9.0, many).residents
    2
    """

    def __init__(self, divisions: Sequence[Division], prices: DivisionPrices) -> None:
        """divisions: with ascending residents and no more blocks from one to the next. The first one is the
        division at the beginning, and has room for any request. Raises ValueError where they are not."""
        residents = [division.residents for division in divisions]
        blocks = [division.num_blocks for division in divisions]
        if not divisions or residents != sorted(set(residents)) or blocks != sorted(blocks, reverse=True):
            raise ValueError("divisions have ascending residents and descending blocks")
        self._divisions, self._prices = divisions, prices
        self._residents: Counts = np.array(residents)
        self._blocks: Counts = np.array(blocks)
        even_share = 1.0 / prices.num_experts
        self._reads = ExpertReads(prices.read_seconds, (even_share,) * prices.num_experts)
        self._now = 0
        self._has_chosen = False
        self._gains: Floats = np.zeros(len(divisions))
        """Tokens that each division would have gained since it began to be better."""
        self._most_faster: Floats = np.zeros(len(divisions))
        """The most tokens/s by which each division was better since then."""
        self._rates: Floats | None = None
        """Tokens/s of each division since the last call. None: no request was there."""
        self._last_time = 0.0
        self.changes = 0
        """Number of changes so far."""

    @property
    def division(self) -> Division:
        """The division now."""
        return self._divisions[self._now]

    def learn(self, reads: ExpertReads) -> None:
        """What reading experts costs from now on."""
        self._reads = reads

    def choose(self, now: float, needs: BlockNeeds) -> Division:
        """The division for the next step. now: seconds, which never decrease."""
        if self._rates is not None:
            faster = self._rates - self._rates[self._now]
            self._gains = np.maximum(0.0, self._gains + faster * (now - self._last_time))
            self._most_faster = np.where(self._gains > 0, np.maximum(self._most_faster, faster), 0.0)
        self._last_time = now
        if not needs.running and not needs.waiting:
            self._rates = None
            return self.division
        self._rates = self._price(needs)
        last = self._find_last_allowed(needs)
        if self._now > last:
            self._move(last)
        elif not self._has_chosen:
            self._move(int(np.argmax(self._rates[: last + 1])))
        else:
            surplus = np.where(self._rates > self._rates[self._now], self._gains - self._thresholds(), 0.0)
            if surplus[: last + 1].max() > 0:
                self._move(int(surplus[: last + 1].argmax()))
        self._has_chosen = True
        return self.division

    def _find_last_allowed(self, needs: BlockNeeds) -> int:
        """Index of the division with the fewest blocks among those that have room for what is admitted.

        Where nothing runs, the request that waits first counts as admitted.
        """
        blocks = needs.running_blocks if needs.running else needs.waiting[0]
        fitting = np.flatnonzero(self._blocks >= max(blocks, needs.used_end))
        return int(fitting[-1]) if len(fitting) else 0

    def _thresholds(self) -> Floats:
        """Tokens that each division must have gained to be taken now."""
        assert self._rates is not None
        more_residents = np.maximum(0, self._residents - self._residents[self._now])
        moving_seconds = MOVING_SECONDS + more_residents * self._prices.layers * self._reads.seconds
        thresholds: Floats = PATIENCE * self._most_faster + self._rates.max() * moving_seconds
        return thresholds

    def _move(self, index: int) -> None:
        if index != self._now:
            self._now = index
            self.changes += 1
            self._gains[:] = self._most_faster[:] = 0.0

    def _price(self, needs: BlockNeeds) -> Floats:
        """Tokens/s of each division, if it runs as many of the requests as it has blocks for."""
        running = np.array(needs.running, np.float64)
        if len(running):
            running *= needs.running_blocks / running.sum()  # shared blocks are there once
        ends = np.cumsum(np.concatenate([running, np.array(needs.waiting, np.float64)]))
        counts = np.searchsorted(ends, self._blocks + 1e-6, side="right")
        rates = np.zeros(len(self._divisions))
        for count in set(counts.tolist()) - {0}:
            mask = counts == count
            rates[mask] = count / self._predict_seconds(count, self._residents[mask])
        return rates

    def _predict_seconds(self, count: int, residents: Counts) -> Floats:
        """Seconds of a decode step of `count` requests, for each number of experts that stay."""
        prices, reads = self._prices, self._reads
        chances = np.minimum(1.0, prices.top_k * np.array(reads.shares))
        chances_in_step = 1.0 - (1.0 - chances) ** count
        missing = np.append(np.cumsum(chances_in_step[::-1])[::-1], 0.0)
        # missing[s]: experts of a layer that are read where the s hottest stay
        compute_seconds = float(np.interp(count, prices.requests, prices.compute_seconds))
        seconds: Floats = compute_seconds + prices.layers * reads.seconds * missing[residents]
        return seconds
