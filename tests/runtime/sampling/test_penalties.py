"""Bias, penalties, min_tokens and reports of a batch: the same bits as row by row, the slow obvious way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.request import Request, SamplingParams
from moesaic.runtime.sampling.penalties import Adjustment, TokenCounts, adjust
from moesaic.runtime.sampling.sampler import Sampler, token_logprobs

VOCAB = 13
EOS = 3
Row = tuple[Request, list[int], list[float]]
"""A request, what it generated, its logits."""


def adjusted(logits: list[float], request: Request, generated: list[int]) -> torch.Tensor:
    """One row, over the whole vocabulary."""
    row, p = torch.tensor(logits), request.params
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if p.repetition_penalty != 1.0:
        seen = torch.bincount(torch.tensor(request.prompt_token_ids + generated), minlength=VOCAB) > 0
        scale = p.repetition_penalty
        row = torch.where(seen, torch.where(row > 0, row / scale, row * scale), row)
    if generated:
        often = torch.bincount(torch.tensor(generated), minlength=VOCAB)
        row = row - (p.frequency_penalty * often + p.presence_penalty * (often > 0))
    if len(generated) < p.min_tokens:
        row[list(request.stop_ids)] = -torch.inf
    return row


@st.composite
def requests(draw: st.DrawFn) -> Row:
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4, 0.7, 3.3, 1e-300, 1e6])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -1.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.1, -0.75])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3)),
        min_tokens=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 1, 3, 7])),
    )
    token = st.integers(0, VOCAB - 1)
    prompt = draw(st.lists(token, min_size=1, max_size=5))
    generated = draw(st.lists(token, max_size=5))
    values = st.one_of(
        st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.5, 2.0, float("inf"), -float("inf")])
    )
    logits = draw(st.lists(values, min_size=VOCAB, max_size=VOCAB))
    return Request(0, prompt, params, (EOS,)), generated, logits


@settings(derandomize=True, max_examples=50, deadline=None)
@given(batch=st.lists(requests(), min_size=1, max_size=6), later=st.integers(0, 5))
def test_a_batch_is_adjusted_to_the_bit_as_its_rows_alone(batch: list[Row], later: int) -> None:
    """Of each row the last `later` generated tokens come after it was admitted."""
    logits = torch.tensor([row[2] for row in batch])
    asking = [line for line, (request, _, _) in enumerate(batch) if Adjustment.is_needed(request.params)]
    adjustments = []
    for line in asking:
        request, generated, _ = batch[line]
        known = max(0, len(generated) - later)
        adjustments.append(Adjustment(request, generated[:known]))
        for token in generated[known:]:
            adjustments[-1].append(token)
    if asking:
        adjust(logits, asking, adjustments)
    wanted = torch.stack([adjusted(row, request, generated) for request, generated, row in batch])
    assert torch.equal(logits.nan_to_num(nan=1e9), wanted.nan_to_num(nan=1e9))


@pytest.mark.slow
@settings(derandomize=True, max_examples=35, deadline=None)
@given(batch=st.lists(requests(), min_size=1, max_size=6))
def test_reports_of_a_batch_are_to_the_bit_those_of_its_rows_alone(batch: list[Row]) -> None:
    sampler = Sampler()
    for index, (request, generated, _) in enumerate(batch):
        sampler.admit(Request(index, request.prompt_token_ids, request.params, (EOS,)), generated)
    logits = torch.tensor([row[2] for row in batch]).nan_to_num(posinf=3e4)
    raw = torch.log_softmax(logits, dim=-1)
    tokens, report = sampler.sample(np.arange(len(batch)), logits)
    counts = [request.params.logprobs for request, _, _ in batch]
    wanted = [
        None if count is None else token_logprobs(raw[line : line + 1], [int(tokens[line])], count)[0]
        for line, count in enumerate(counts)
    ]
    assert report == (wanted if any(count is not None for count in counts) else [])


def test_counts_are_of_distinct_tokens_in_order_of_their_first_appearance() -> None:
    counts = TokenCounts(seen_tokens=[7, 8, 7], generated_tokens=[8, 9])
    counts.append(9)
    assert (counts.tokens.tolist(), counts.frequencies.tolist()) == ([7, 8, 9], [0, 1, 2])


def test_nobody_is_adjusted_who_did_not_ask() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.5, stop_token_ids=[5], logprobs=2)
    assert not Adjustment.is_needed(params)


def test_ties_are_reported_alike_whoever_wants_more() -> None:
    """Of many equal logits a topk of more picks others: a row gets those it would get alone."""

    def report(*wishes: int) -> object:
        sampler = Sampler()
        for index, wish in enumerate(wishes):
            params = SamplingParams(temperature=0.0, logprobs=wish)
            sampler.admit(Request(index, [1], params), [])
        return sampler.sample(np.arange(len(wishes)), torch.zeros(len(wishes), 4096))[1][0]

    assert report(2) == report(2, 20) == report(2, 2, 20)
