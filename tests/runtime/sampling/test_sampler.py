"""The vectorised sampler against the obvious one, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.request import NO_TOKEN, Request, SamplingParams
from moesaic.runtime.sampling.sampler import Sampler, token_logprobs, uniform

VOCAB = 13
EOS = 3


def plain_sample(logits: list[float], request: Request, generated: list[int]) -> int:
    """One row, in the order that the sampler documents, with Python's floats."""
    p = request.params
    logits = list(logits)
    for token, bias in p.logit_bias.items():
        logits[token] += bias
    for token in set(request.prompt_token_ids) | set(generated):
        scale = p.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
    for token in set(generated):
        logits[token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty
    forbidden = set(request.stop_ids) if len(generated) < p.min_tokens else set()
    for word in p.bad_word_ids:
        if [*generated, word[-1]][-len(word) :] == list(word):
            forbidden.add(word[-1])
    allowed = set(range(len(logits)) if p.allowed_token_ids is None else p.allowed_token_ids)
    for token in range(len(logits)):
        if token not in (allowed - forbidden or allowed):
            logits[token] = -math.inf
    if p.greedy:
        return logits.index(max(logits))
    weights = [math.exp((x - max(logits)) / p.temperature) for x in logits]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept, mass = set(), 0.0
    top = order[: p.top_k] if p.top_k > 0 else order
    total = sum(weights[token] for token in top)
    for token in top:
        if mass < p.top_p * total:
            kept.add(token)
        mass += weights[token]
    position = len(request.prompt_token_ids) + len(generated)
    noise = float(uniform(np.array([p.seed]), np.array([position]))[0])
    target = noise * sum(weights[token] for token in kept)
    reached = 0.0
    for token in range(len(logits)):
        reached += weights[token] if token in kept else 0.0
        if reached > target:
            return token
    raise AssertionError("the distribution is empty")


@st.composite
def rows(draw: st.DrawFn) -> tuple[Request, list[int], list[float]]:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, -1, 1, 3, 50])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.75])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-3.0, 2.0]), max_size=2)),
        min_tokens=draw(st.integers(0, 3)),
        stop_token_ids=[5],
        allowed_token_ids=draw(st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)),
        bad_word_ids=draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=4)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )
    token = st.integers(0, VOCAB - 1)
    prompt = draw(st.lists(token, min_size=1, max_size=4))
    generated = draw(st.lists(token, max_size=4))
    scramble = np.random.default_rng(draw(st.integers(0, 2**32))).permutation(VOCAB)
    logits = (scramble * 0.61 - 3.0).tolist()  # no two alike, so that no order is in doubt
    return Request(0, prompt, params, (EOS,)), generated, logits


@pytest.mark.slow
@settings(derandomize=True, max_examples=300, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=6))
def test_a_batch_is_sampled_as_its_rows_alone(batch: list[tuple[Request, list[int], list[float]]]) -> None:
    sampler = Sampler()
    for index, (request, generated, _) in enumerate(batch):
        sampler.admit(Request(index, request.prompt_token_ids, request.params, (EOS,)), generated)
    logits = torch.tensor([row[2] for row in batch], dtype=torch.float32)
    tokens, logprobs = sampler.sample(np.arange(len(batch)), logits)
    assert tokens.tolist() == [plain_sample(row, request, generated) for request, generated, row in batch]
    assert logprobs == []


def make(request_id: int = 0, prompt: list[int] | None = None, **params: object) -> Request:
    return Request(request_id, prompt or [1], SamplingParams(**{"seed": 1} | params), (EOS,))  # type: ignore[arg-type]


@pytest.mark.slow
def test_sampled_tokens_follow_the_distribution() -> None:
    """20,000 draws: every share within four standard deviations of its probability."""
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.09, 0.01])
    draws = 20_000
    sampler = Sampler()
    for index in range(draws):
        sampler.admit(make(index, seed=index), [])
    tokens, _ = sampler.sample(np.arange(draws), probabilities.log().repeat(draws, 1))
    shares = np.bincount(tokens, minlength=5) / draws
    for share, probability in zip(shares, probabilities.tolist(), strict=True):
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / draws)


def test_noise_is_uniform_and_differs_by_seed_and_position() -> None:
    seeds, positions = np.meshgrid(np.arange(-100, 100), np.arange(100))
    noise = uniform(seeds.ravel(), positions.ravel())
    assert noise.min() >= 0.0 and noise.max() < 1.0
    assert len(np.unique(noise)) == noise.size
    counts, _ = np.histogram(noise, bins=20, range=(0, 1))
    assert abs(counts - noise.size / 20).max() < 5 * math.sqrt(noise.size / 20)
    assert abs(np.corrcoef(noise[:-200], noise[200:])[0, 1]) < 0.03


def test_the_sample_of_a_preempted_request_is_the_same() -> None:
    logits = torch.zeros(1, VOCAB)
    steady = Sampler()
    steady.admit(make(seed=5), [])
    tokens = [int(steady.sample(np.array([0]), logits.clone())[0][0]) for _ in range(8)]
    again = Sampler()
    again.admit(make(seed=5), tokens[:4])
    assert [int(again.sample(np.array([0]), logits.clone())[0][0]) for _ in range(4)] == tokens[4:]


def test_logprobs_are_of_the_raw_logits_and_come_for_who_asked() -> None:
    sampler = Sampler()
    sampler.admit(make(0, temperature=0.0, logprobs=2, logit_bias={2: 100.0}), [])
    sampler.admit(make(1, temperature=0.0), [])
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).repeat(2, 1)
    expected = torch.log_softmax(logits[0], dim=0)
    tokens, (mine, other) = sampler.sample(np.array([0, 1]), logits)
    assert tokens.tolist() == [2, 1] and other is None and mine is not None
    assert (mine.token_id, mine.logprob) == (2, pytest.approx(expected[2].item()))
    assert mine.top == [(1, pytest.approx(expected[1].item())), (2, pytest.approx(expected[2].item()))]


def test_the_log_probabilities_of_chosen_tokens() -> None:
    sampler = Sampler()
    sampler.admit(make(0, temperature=0.0, logprobs=0, logprob_token_ids=[2, 0]), [])
    sampler.admit(make(1, temperature=0.0, logprobs=1), [])
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 1.0, 5.0]])
    wanted = torch.log_softmax(logits, dim=-1)
    _, (first, second) = sampler.sample(np.array([0, 1]), logits.clone())
    assert first is not None and second is not None
    assert first.top == [(2, wanted[0, 2].item()), (0, wanted[0, 0].item())]
    assert (first.token_id, first.logprob) == (1, wanted[0, 1].item())
    assert second.top == [(2, wanted[1, 2].item())]


def test_zero_logprobs_give_the_token_alone() -> None:
    sampler = Sampler()
    sampler.admit(make(0, temperature=0.0, logprobs=0), [])
    _, (entry,) = sampler.sample(np.array([0]), torch.tensor([[0.0, 2.0, 1.0, -1.0]]))
    assert entry is not None and entry.top == []


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e6, "temperature": 1e-5},
        {"stop_token_ids": range(4), "min_tokens": 1},
        {"stop_token_ids": range(4), "min_tokens": 1, "temperature": 1e6, "top_p": 0.5, "top_k": 2},
        {"top_p": 1e-300, "min_p": 1.0, "temperature": 1e-5},
    ],
)
def test_no_parameters_lead_out_of_the_vocabulary(params: dict[str, object]) -> None:
    sampler = Sampler()
    sampler.admit(make(0, [0, 1, 2, 3], **params), [])
    logits = torch.tensor([[3e4, -2.0, 1.0, 0.0]])
    for _ in range(5):
        assert 0 <= sampler.sample(np.array([0]), logits.clone())[0][0] < 4


def test_of_a_small_vocabulary_all_are_the_likeliest() -> None:
    found = token_logprobs(torch.log_softmax(torch.tensor([[0.0, 2.0, 1.0]]), dim=-1), [0], 20)
    assert [token for token, _ in found[0].top] == [1, 2, 0]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"logprobs": 2}, {"logit_bias": {1: 5.0}}])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_no_token(broken: float, params: dict[str, object]) -> None:
    for logits in ([broken] * 4, [1.0, broken, 0.0, 2.0], [-math.inf, 1.0, 0.0, broken]):
        sampler = Sampler()
        sampler.admit(make(0, **params), [])
        tokens, logprobs = sampler.sample(np.array([0]), torch.tensor([logits]))
        assert tokens.tolist() == [NO_TOKEN] and logprobs == []


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_broken_row_leaves_the_others_as_they_are(at: int) -> None:
    params: list[dict[str, object]] = [
        {"logprobs": 3},
        {"temperature": 0.0},
        {"top_p": 0.9, "logprobs": 1, "repetition_penalty": 1.5},
        {"logit_bias": {5: -100.0}, "min_tokens": 2},
    ]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 4, 50, generator=generator)
    whole, broken = Sampler(), Sampler()
    for sampler in (whole, broken):
        for number, each in enumerate(params):
            sampler.admit(make(number, seed=7 + number, **each), [])
    others = np.array([number for number in range(4) if number != at])
    for step, logits in enumerate(rows):
        ids = np.arange(4) if step == 0 else others
        wanted, logprobs = whole.sample(np.arange(4), logits.clone())
        spoiled = logits[ids].clone()
        if step == 0:
            spoiled[at, 3] = math.nan
        tokens, found = broken.sample(ids, spoiled)
        kept = [line for line, number in enumerate(ids) if number != at]
        assert tokens[kept].tolist() == wanted[others].tolist()
        assert [found[line] for line in kept] == [logprobs[number] for number in others]
        assert step or (tokens[at] == NO_TOKEN and found[at] is None)


def test_large_finite_logits_and_banned_tokens_are_sampled() -> None:
    sampler = Sampler()
    sampler.admit(make(0, temperature=0.0, stop_token_ids=[1, 2], min_tokens=3), [])
    for logits in ([3e38, 3.1e38, 3.2e38, 3.3e38], [-3e38] * 4):
        assert sampler.sample(np.array([0]), torch.tensor([logits]))[0][0] in (0, 3)


def test_what_scored_a_broken_prompt_gets_no_token() -> None:
    sampler = Sampler()
    sampler.admit(make(0), [])
    sampler.give_up(0)
    assert sampler.sample(np.array([0]), torch.zeros(1, 4))[0].tolist() == [NO_TOKEN]
    sampler.release(0, is_preempted=True)
    sampler.admit(make(0), [])
    assert sampler.sample(np.array([0]), torch.zeros(1, 4))[0].tolist() == [NO_TOKEN]
    sampler.release(0)
    sampler.admit(make(0), [])
    assert sampler.sample(np.array([0]), torch.zeros(1, 4))[0][0] >= 0


def test_a_bias_does_not_bring_back_a_stop_token_before_min_tokens() -> None:
    sampler = Sampler()
    sampler.admit(make(0, temperature=0.0, logit_bias={EOS: 100.0}, min_tokens=2), [])
    found = [sampler.sample(np.array([0]), torch.tensor([[0.0, 2.0, 1.0, 5.0]]))[0][0] for _ in range(3)]
    assert found == [1, 1, EOS]


def test_a_tie_goes_to_the_lowest_id() -> None:
    sampler = Sampler()
    sampler.admit(make(0, temperature=0.0), [])
    assert sampler.sample(np.array([0]), torch.tensor([[0.0, 2.0, 2.0, 2.0]]))[0].tolist() == [1]
