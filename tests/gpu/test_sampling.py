"""Sampling on the sanitizer's device: the tokens of a CPU, and the host waits once, for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.gpu_sanitizer import WAITS, sanitized

from moesaic.core.request import NO_TOKEN, Request, SamplingParams
from moesaic.runtime.sampling.sampler import Sampler

VOCAB = 300
EVERY_WAY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "top_p": 0.9},
    {"seed": 2, "top_k": 9, "min_p": 0.05, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {3: 1.5, 40: -2.0}},
    {"seed": 3, "temperature": 1.4, "stop_token_ids": [5, 6], "min_tokens": 3},
    {"seed": 4, "allowed_token_ids": list(range(7, 90)), "bad_word_ids": [[8]]},
]


def drawn(device: str, logits: torch.Tensor, ways: list[dict[str, Any]]) -> tuple[list[list[int]], list[str]]:
    """The tokens of four steps, and where the host waited in the last one."""
    sampler, prompt = Sampler(), [3, 1, 4, 1, 5]
    for number, way in enumerate(ways):
        sampler.admit(Request(number, prompt, SamplingParams(max_tokens=9, **way)), [])
    found = []
    for step in range(4):
        there = (logits + step).to(device)
        WAITS.of.clear()
        found.append(sampler.sample(np.arange(len(ways)), there)[0].tolist())
    return found, list(WAITS.of)


def test_every_way_to_sample_waits_once_and_gives_the_tokens_of_a_cpu() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(EVERY_WAY), VOCAB) * 3
    wanted, _ = drawn("cpu", logits, EVERY_WAY)
    with sanitized():
        found, waits = drawn("cuda", logits, EVERY_WAY)
    assert found == wanted and waits == ["_to_copy"]


def test_a_copy_that_waits_is_counted() -> None:
    """The counter sees what the sampler leaves out."""
    with sanitized():
        WAITS.of.clear()
        there = torch.ones(3).to("cuda")
        chosen = there[torch.tensor([0, 2])], there[there > 0], there.sum().item(), there.cpu()
    assert len(WAITS.of) == 5 and chosen[2] == 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_row_that_is_not_finite_gets_no_token(device: str) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 1.0
    logits[1, 5] = torch.nan
    with sanitized():
        sampler = Sampler()
        for number in range(3):
            params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
            sampler.admit(Request(number, [1], params), [])
        tokens, logprobs = sampler.sample(np.arange(3), logits.to(device))
    assert tokens.tolist() == [7, NO_TOKEN, 7]
    assert [one is None for one in logprobs] == [False, True, False]
