"""How many tokens are drafted for which request, and what became of them.

A step that checks d drafted tokens of a request has d + 1 rows of it. It gives one token, and one more for
each drafted token up to the first wrong one. So the i-th drafted token gives a token with probability a^i,
where a is the request's acceptance. The policy takes the drafted tokens with the best chances as long as they
raise the tokens of a step over its price. More rows read more experts.

Acceptance is counted for each request, and old counts fade. A new request begins with the acceptance of
those before it. A request whose drafts do not pay gets none. Then a single drafted token is tried from time
to time, less and less often while it is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from moesaic.core.metrics import SpeculationStats
from moesaic.policy.scheduling.acceptance import SLOW_FADE, Acceptance
from moesaic.policy.scheduling.drafters import Drafter, NoDrafter
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.sequence import Sequence
from moesaic.policy.scheduling.step_prices import StepPrices

MOST_ROWS = 64
"""Rows of a step, at most, when it checks drafts. Their logits are in memory together."""
REPORTED = (1, 8, 32)
"""Numbers of requests for which `Speculation.described` says when drafts pay."""
MARGIN = 1.02
"""Factor by which drafts must raise the tokens of a step over its price."""


class Speculation:
    """Drafts tokens for the sequences of a step. The default drafts nothing."""

    def __init__(
        self, drafter: Drafter | None = None, most: int = 0, prices: StepPrices | None = None
    ) -> None:
        """most: maximum number of drafted tokens of a request in a step; 0: nothing is drafted.

        prices: of steps by rows. None: every step has the same price, so that as much is drafted as may be.
        """
        self._drafter: Drafter = drafter or NoDrafter()
        self._most = most
        self._prices = prices or StepPrices(lambda rows: 1.0)
        self._counts = _Counts([0] * most)
        self._all = Acceptance(fade=SLOW_FADE)
        """Of all requests together."""

    def described(self) -> str:
        """From which acceptance drafts pay, by the prices so far. Empty where nothing is drafted."""
        if not self._most:
            return ""
        parts = []
        for rows in REPORTED:
            most = min(self._most, MOST_ROWS // rows - 1)
            first, last = (break_even(self._prices, rows, drafted) for drafted in (1, most))
            ends = ["never" if end is None else f"{end:.2f}" for end in (first, last)]
            parts.append(f"{ends[0] if ends[0] == ends[1] else ' to '.join(ends)} at {rows}")
        tokens = "1 token" if self._most == 1 else f"1 to {self._most} tokens"
        return f"{tokens}; acceptance from which they pay, by requests: {', '.join(parts)}"

    def stats(self) -> SpeculationStats:
        """Counts of drafts so far."""
        counts = self._counts
        return SpeculationStats(counts.drafts, counts.drafted, counts.accepted, tuple(counts.positions))

    def measured(self, rows: int, seconds: float) -> None:
        """A step whose rows were only new and drafted tokens took so long."""
        if self._most:
            self._prices.measured(rows, seconds)

    def draft(self, sequences: Ordered[Sequence], room: int, blocks: KVBlocks, spare: int) -> None:
        """Draft tokens for sequences that lack one row. Each sequence keeps its draft until `checked`.

        room: maximum number of drafted tokens. spare: KV blocks that must stay available.
        """
        if not self._most:
            return
        room = min(room, MOST_ROWS - len(sequences))
        for sequence, most in zip(sequences, self._chosen(sequences, room), strict=True):
            if not most:
                self._of(sequence).waited += 1
                continue
            proposed = self._drafter.propose(sequence.tokens.array, most)[:most]
            stops = (place for place, token in enumerate(proposed) if token in sequence.stop_ids)
            wanted = next(stops, len(proposed))  # behind the end of an answer there is nothing to draft
            fit = blocks.reserve(sequence.request_id, sequence.num_tokens, wanted, spare)
            sequence.drafted = proposed[:fit]

    def checked(self, sequence: Sequence, accepted: int) -> None:
        """A step has checked the sequence's draft, of which the first `accepted` tokens were right."""
        drafted, counts = len(sequence.drafted), self._counts
        if not drafted:
            return
        self._of(sequence).add(drafted, accepted)
        self._all.add(drafted, accepted)
        counts.drafts += 1
        counts.drafted += drafted
        counts.accepted += accepted
        for position in range(accepted):
            counts.positions[position] += 1

    def _chosen(self, sequences: Ordered[Sequence], room: int) -> list[int]:
        """How many tokens to draft for each sequence: those that are worth the price of their rows."""
        rows, chosen = len(sequences), [0] * len(sequences)
        chances = []
        for index, sequence in enumerate(sequences):
            rate, chance = self._of(sequence).rate, 1.0
            for _ in range(self._limit(sequence)):
                chance *= rate
                chances.append((-chance, index))
        chances.sort()
        gained, best, count = 0.0, MARGIN * rows / self._prices.price(max(1, rows)), 0
        for number, (chance, _) in enumerate(chances[: max(0, room)], start=1):
            gained -= chance
            speed = (rows + gained) / self._prices.price(rows + number)
            if speed > best:
                best, count = speed, number
        for _, index in chances[:count]:
            chosen[index] += 1
        for index, sequence in enumerate(sequences):
            acceptance = self._of(sequence)
            if acceptance.waited >= acceptance.wait and not chosen[index] and sum(chosen) < room:
                chosen[index] = min(1, self._limit(sequence))
        return chosen

    def _of(self, sequence: Sequence) -> Acceptance:
        if sequence.acceptance is None:
            sequence.acceptance = self._all.of_new_request()
        return sequence.acceptance

    def _limit(self, sequence: Sequence) -> int:
        """The last token of an answer need not be drafted."""
        return max(0, min(self._most, sequence.max_len - sequence.num_tokens - 1))


@dataclass
class _Counts:
    positions: list[int]
    """Drafted tokens that were right, by their place in the draft."""
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


def break_even(prices: StepPrices, rows: int, drafted: int) -> float | None:
    """The acceptance from which drafting pays: `rows` requests with `drafted` tokens each. None: never.

    Solves (1 + a + ... + a^d) / price(rows (1 + d)) = 1 / price(rows) for a.
    """
    wanted = prices.price(rows * (1 + drafted)) / prices.price(rows)
    if wanted > 1 + drafted:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        reached = sum(middle**place for place in range(1 + drafted)) >= wanted
        low, high = (low, middle) if reached else (middle, high)
    return high
