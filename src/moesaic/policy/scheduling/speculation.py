"""How many tokens are drafted for which request, and what became of them.

A step that checks d drafted tokens of a request has d + 1 rows of it. It gives one token, and one more for
each drafted token up to the first wrong one. So the i-th drafted token gives a token with probability a^i,
where a is the request's acceptance. The policy takes the drafted tokens with the best chances as long as they
raise the tokens of a step over its price. More rows read more experts.

Acceptance is counted for each request, and old counts fade. A new request begins with the acceptance of
those before it. A request whose drafts do not pay gets none. Then a single drafted token is tried from time
to time, less and less often while it is wrong.

Question: How many tokens are drafted for a request?
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from moesaic.core.metrics import SpeculationStats
from moesaic.core.speculation import MAX_CHECKED_ROWS, REQUESTS, break_even
from moesaic.policy.scheduling.acceptance import SLOW_FADE, Acceptance
from moesaic.policy.scheduling.drafters import Drafter, NoDrafter
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.sequence import Sequence
from moesaic.policy.scheduling.step_prices import REFRESH, StepPrices

TRIALS_APART = 8
"""Steps between two drafts that are only tried, with so many requests or more. Fewer requests have as many
steps between."""
MARGIN = 1.1
"""Factor by which drafts must raise the tokens of a step over its price."""


class Speculation:
    """Drafts tokens for the sequences of a step. The default drafts nothing."""

    def __init__(
        self,
        drafter: Drafter | None = None,
        max_tokens: int = 0,
        prices: StepPrices | None = None,
        max_rows: int = MAX_CHECKED_ROWS,
    ) -> None:
        """max_tokens: maximum number of drafted tokens of a request in a step; 0: nothing is drafted.

        prices: of steps by rows. None: every step has the same price, so that as much is drafted as may be.
        max_rows: maximum number of rows of a step with drafted tokens, at most MAX_CHECKED_ROWS.
        """
        self._drafter: Drafter = drafter or NoDrafter()
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._prices = prices or StepPrices(lambda rows: 1.0)
        self._counts = _Counts([0] * max_tokens)
        self._total_acceptance = Acceptance(fade=SLOW_FADE)
        """The acceptance of all requests together, with which a new request begins."""
        self._since_trial = TRIALS_APART
        """Steps since a draft was only tried."""
        self._least: dict[int, float] = {}
        """Number of requests -> `_least_rate`, by the prices of the last refresh."""

    def describe(self) -> str:
        """A text that says from which acceptance drafts pay, by the prices so far. Empty: no drafter."""
        if not self._max_tokens:
            return ""
        parts, price = [], self._prices.price
        for rows in REQUESTS:
            max_tokens = min(self._max_tokens, MAX_CHECKED_ROWS // rows - 1)
            first, last = (
                break_even(price(rows * (1 + each)) / price(rows), each) for each in (1, max_tokens)
            )
            ends = ["never" if end is None else f"{end:.2f}" for end in (first, last)]
            parts.append(f"{ends[0] if ends[0] == ends[1] else ' to '.join(ends)} at {rows}")
        tokens = "1 token" if self._max_tokens == 1 else f"1 to {self._max_tokens} tokens"
        return f"{tokens}; acceptance from which they pay, by requests: {', '.join(parts)}"

    def stats(self) -> SpeculationStats:
        """Counts of drafts so far."""
        counts = self._counts
        prices = self._prices.now(MAX_CHECKED_ROWS)[1:] if self._max_tokens else np.zeros(0)
        ratios = tuple((prices / prices[:1]).tolist())
        return SpeculationStats(
            counts.drafts, counts.draft_tokens, counts.accepted_tokens, tuple(counts.positions), ratios
        )

    def record_step(self, rows: int, seconds: float) -> None:
        """A step whose rows were only new and drafted tokens took so long."""
        if self._max_tokens:
            self._prices.record_duration(rows, seconds)

    def draft(self, sequences: Ordered[Sequence], room: int, blocks: KVBlocks, spare: int) -> None:
        """Draft tokens for sequences that lack one row. Each sequence keeps its draft until `record_check`.

        room: maximum number of drafted tokens. spare: KV blocks that must stay available.
        """
        room = min(room, self._max_rows - len(sequences))
        if not self._max_tokens or room <= 0 or not sequences:
            return
        for sequence, max_tokens in zip(sequences, self._choose_counts(sequences, room), strict=True):
            if not max_tokens:
                self._get_acceptance(sequence).tokens_since_draft += 1
                continue
            proposed_tokens = sequence.proposed_tokens or self._drafter.propose(
                sequence.tokens.array, max_tokens
            )
            proposed_tokens = proposed_tokens[:max_tokens]
            stops = (place for place, token in enumerate(proposed_tokens) if token in sequence.stop_ids)
            num_useful = next(
                stops, len(proposed_tokens)
            )  # behind the end of an answer there is nothing to draft
            fit = blocks.reserve(sequence.request_id, sequence.num_tokens, num_useful, spare)
            sequence.draft_tokens = proposed_tokens[:fit]
            if not fit:
                self._get_acceptance(sequence).tokens_since_draft, self._since_trial = (
                    0,
                    TRIALS_APART,
                )  # another one is tried next

    def record_check(self, sequence: Sequence, num_accepted: int) -> None:
        """A step has checked the sequence's draft, of which the first `num_accepted` tokens were right."""
        num_draft_tokens, counts = len(sequence.draft_tokens), self._counts
        if not num_draft_tokens:
            return
        self._get_acceptance(sequence).add(num_draft_tokens, num_accepted)
        self._total_acceptance.add(num_draft_tokens, num_accepted)
        counts.drafts += 1
        counts.draft_tokens += num_draft_tokens
        counts.accepted_tokens += num_accepted
        for position in range(num_accepted):
            counts.positions[position] += 1

    def _choose_counts(self, sequences: Ordered[Sequence], room: int) -> list[int]:
        """How many tokens to draft for each sequence. It is quick where no draft pays."""
        acceptances = [self._get_acceptance(sequence) for sequence in sequences]
        if max(one.rate for one in acceptances) >= self._least_rate(len(acceptances)):
            return self._worthwhile(sequences, acceptances, room)
        draft_counts = [0] * len(acceptances)
        self._try_one(sequences, acceptances, draft_counts)
        return draft_counts

    def _least_rate(self, rows: int) -> float:
        """An acceptance below which nothing pays, however many of `rows` requests have it."""
        # The table is made anew only now and then: making it costs more than a few stale prices.
        if self._prices.news >= REFRESH:
            self._prices.refresh()
            self._least.clear()
        if rows not in self._least:
            places = np.arange(max(0, MAX_CHECKED_ROWS - rows) + 1)[: rows * self._max_tokens]
            prices = self._prices.table(rows, MAX_CHECKED_ROWS)
            low, high = 0.0, 1.0
            for _ in range(8):
                middle = (low + high) / 2
                tokens = rows + np.cumsum(middle ** (places // rows + 1))[: len(prices) - 1]
                is_worth = bool((tokens / prices[1 : len(tokens) + 1] > MARGIN * rows / prices[0]).any())
                low, high = (low, middle) if is_worth else (middle, high)
            self._least[rows] = low
        return self._least[rows]

    def _worthwhile(
        self, sequences: Ordered[Sequence], acceptances: Ordered[Acceptance], room: int
    ) -> list[int]:
        """The drafted tokens with the best chances, while they raise the tokens of a step over its price."""
        limits = np.array([self._limit(sequence) for sequence in sequences])
        rates = np.array([one.rate for one in acceptances])
        chances = np.cumprod(np.repeat(rates[:, None], self._max_tokens, axis=1), axis=1)
        chances[np.arange(self._max_tokens) >= limits[:, None]] = 0.0
        best = np.argsort(-chances, axis=None, kind="stable")[:room]  # so those of one sequence are in order
        tokens = len(acceptances) + np.concatenate([[0.0], np.cumsum(chances.ravel()[best])])
        speeds = tokens / self._prices.table(len(acceptances), MAX_CHECKED_ROWS)[: len(tokens)]
        count = int(speeds.argmax())
        if speeds[count] <= MARGIN * speeds[0]:
            count = 0
        best_counts = np.bincount(best[:count] // self._max_tokens, minlength=len(acceptances)).clip(
            max=limits
        )
        draft_counts: list[int] = best_counts.tolist()
        if count < room:
            self._try_one(sequences, acceptances, draft_counts)
        return draft_counts

    def _try_one(
        self, sequences: Ordered[Sequence], acceptances: Ordered[Acceptance], draft_counts: list[int]
    ) -> None:
        """Draft a token for the first sequence that had none for long, if there is one.

        Such a draft may cost a step more than it gives, so only every few steps have one.
        """
        self._since_trial += 1
        if self._since_trial < min(TRIALS_APART, len(acceptances)):
            return
        for index, one in enumerate(acceptances):
            if (
                one.tokens_since_draft >= one.wait
                and not draft_counts[index]
                and self._limit(sequences[index])
            ):
                draft_counts[index], self._since_trial = 1, 0
                return

    def _get_acceptance(self, sequence: Sequence) -> Acceptance:
        if sequence.acceptance is None:
            sequence.acceptance = self._total_acceptance.of_new_request()
        return sequence.acceptance

    def _limit(self, sequence: Sequence) -> int:
        """The last token of an answer need not be drafted."""
        return max(0, min(self._max_tokens, sequence.max_len - sequence.num_tokens - 1))


@dataclass
class _Counts:
    positions: list[int]
    """Drafted tokens that were right, by their place in the draft."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
