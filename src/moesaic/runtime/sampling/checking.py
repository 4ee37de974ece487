"""Checks drafted tokens: one is right if it is the token that its request would have got without a draft.

A row's logits do not depend on the other rows of its step, and a token depends only on its row's logits, its
request's seed and its position. So no token differs from those of a run without drafts, greedy or sampled.

Rows are sampled round by round: first the row of each request's newest token, then those of the first drafted
tokens that were right, and so on. So penalties, bans and the masks of structured outputs see the tokens in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from moesaic.core.request import TokenLogprob
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.runtime.sampling.sampler import Sampler


@dataclass(frozen=True)
class Sampled:
    """The new tokens of the requests of a step, request after request."""

    tokens: IntArray
    logprobs: list[TokenLogprob | None]
    """One per token; empty if no request wants any."""
    counts: IntArray | None = None
    """[p] new tokens of each request. None: one each."""


def sample_step(sampler: Sampler, plan: StepPlan, logits: torch.Tensor) -> Sampled:
    """The next tokens of each sampled sequence: its right drafted tokens, and one more.

    logits: [p + drafted, vocab] of plan.sample_rows. They may be changed in place.
    """
    ids = plan.request_ids[plan.sampled]
    if not len(plan.drafted):
        return Sampled(*sampler.sample(ids, logits))
    proposed = _proposed(plan)
    tokens: list[list[int]] = [[] for _ in proposed]
    logprobs: list[list[TokenLogprob | None]] = [[] for _ in proposed]
    starts = np.cumsum(plan.drafted + 1) - plan.drafted - 1
    going = list(range(len(proposed)))
    while going:
        lines = torch.tensor([int(starts[entry]) + len(tokens[entry]) for entry in going])
        found, report = sampler.sample(ids[going], logits[lines.to(logits.device)])
        for place, entry in enumerate(going):
            tokens[entry].append(int(found[place]))
            logprobs[entry].append(report[place] if report else None)
        going = [entry for entry in going if _goes_on(tokens[entry], proposed[entry])]
    flat = [entry for one in logprobs for entry in one]
    every, counts = np.array(list(chain(*tokens))), np.array(list(map(len, tokens)))
    return Sampled(every, flat if any(flat) else [], counts)


def joined(parts: Sequence[Sampled]) -> Sampled:
    """The tokens of several calls of `sample_step` without drafts."""
    tokens = np.concatenate([part.tokens for part in parts])
    logprobs = [entry for part in parts for entry in part.logprobs or [None] * len(part.tokens)]
    return Sampled(tokens, logprobs if any(logprobs) else [])


def _goes_on(tokens: list[int], proposed: list[int]) -> bool:
    """Whether the last token was drafted, so that there is a row behind it."""
    return len(tokens) <= len(proposed) and tokens[-1] == proposed[len(tokens) - 1]


def _proposed(plan: StepPlan) -> list[list[int]]:
    """The drafted tokens of each sampled sequence."""
    stops, ids = plan.batch.query_starts[plan.sampled + 1].tolist(), plan.batch.token_ids
    return [
        ids[stop - count : stop].tolist() for stop, count in zip(stops, plan.drafted.tolist(), strict=True)
    ]
