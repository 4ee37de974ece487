"""Checks drafted tokens: one is right if it is the token that its request would have got without a draft.

A row's logits do not depend on the other rows of its step, and a token depends only on its row's logits, its
request's seed and its position. So no token differs from those of a run without drafts, greedy or sampled.

Requests with penalties, bans or the masks of a structured output need their tokens in order. Their rows are
sampled round by round: first the row of the newest token, then that of the first drafted token if it was
right, and so on. All rows of the other requests are sampled at once.

Question: Which drafted tokens are accepted?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from moesaic.core.request import TokenLogprob
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.runtime.sampling.sampler import Sampler


@dataclass(frozen=True)
class SampledTokens:
    """The new tokens of the requests of a step, request after request."""

    tokens: IntArray
    logprobs: list[TokenLogprob | None]
    """Log-probabilities of each token. Empty if no request wants any."""
    counts: IntArray | None = None
    """[p] new tokens of each request. None: one each."""


@dataclass(eq=False)
class _Check:
    """The rows of one request, and the tokens that it gets."""

    request_id: int
    start: int
    """Number of the first row of this request among those that tokens may be sampled from."""
    draft_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Add the token of the next row. Returns whether it was drafted, so that there is a row behind it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        place = len(self.tokens)
        return place <= len(self.draft_tokens) and token == self.draft_tokens[place - 1]


def sample_step(sampler: Sampler, plan: StepPlan, logits: torch.Tensor) -> SampledTokens:
    """The next tokens of each sampled sequence: its right drafted tokens, and one more.

    logits: [p + drafted, vocab] of plan.sample_rows. They may be changed in place.
    """
    if not len(plan.num_draft_tokens):
        return SampledTokens(*sampler.sample(plan.request_ids[plan.sampled_sequences], logits))
    checks = _checks(plan)
    _sample_at_once(sampler, [check for check in checks if not sampler.needs_order(check.request_id)], logits)
    _sample_in_rounds(sampler, [check for check in checks if not check.tokens], logits)
    logprobs = list(chain(*(check.logprobs for check in checks)))
    tokens = np.array(list(chain(*(check.tokens for check in checks))), dtype=np.int64)
    counts = np.array([len(check.tokens) for check in checks], dtype=np.int64)
    return SampledTokens(tokens, logprobs if any(logprobs) else [], counts)


def join_samples(parts: Sequence[SampledTokens]) -> SampledTokens:
    """The tokens of several calls of `sample_step` without drafts."""
    tokens = np.concatenate([part.tokens for part in parts])
    logprobs = [entry for part in parts for entry in part.logprobs or [None] * len(part.tokens)]
    return SampledTokens(tokens, logprobs if any(logprobs) else [])


def _checks(plan: StepPlan) -> list[_Check]:
    """Make a check for each sampled sequence."""
    ids, counts = plan.batch.token_ids, plan.num_draft_tokens.tolist()
    stops = plan.batch.query_starts[plan.sampled_sequences + 1].tolist()
    starts = (np.cumsum(plan.num_draft_tokens + 1) - plan.num_draft_tokens - 1).tolist()
    return [
        _Check(request_id, start, ids[stop - count : stop].tolist())
        for request_id, start, stop, count in zip(
            plan.request_ids[plan.sampled_sequences].tolist(), starts, stops, counts, strict=True
        )
    ]


def _sample_at_once(sampler: Sampler, checks: Sequence[_Check], logits: torch.Tensor) -> None:
    """Sample every row of these requests, and take the tokens up to the first one that was not drafted."""
    if not checks:
        return
    places = [(check, offset) for check in checks for offset in range(1 + len(check.draft_tokens))]
    lines = [check.start + offset for check, offset in places]
    ids, offsets = [check.request_id for check, _ in places], [offset for _, offset in places]
    tokens, report = sampler.sample_ahead(ids, offsets, _rows(logits, lines))
    going = True
    for place, (check, offset) in enumerate(places):
        # Rows behind a wrong draft do not count. Those of the next request begin again at offset 0.
        if going or offset == 0:
            going = check.take(int(tokens[place]), report[place] if report else None)
    for check in checks:
        sampler.advance(check.request_id, len(check.tokens))


def _sample_in_rounds(sampler: Sampler, checks: Sequence[_Check], logits: torch.Tensor) -> None:
    """Sample these requests row by row."""
    while checks:
        ids = np.array([check.request_id for check in checks], dtype=np.int64)
        rows = _rows(logits, [check.start + len(check.tokens) for check in checks])
        tokens, report = sampler.sample(ids, rows)
        checks = [
            check
            for place, check in enumerate(checks)
            if check.take(int(tokens[place]), report[place] if report else None)
        ]


def _rows(logits: torch.Tensor, lines: list[int]) -> torch.Tensor:
    """These rows, ascending. Consecutive ones are not copied."""
    if lines[-1] - lines[0] == len(lines) - 1:
        return logits[lines[0] : lines[-1] + 1]
    return logits[torch.tensor(lines, device=logits.device)]
