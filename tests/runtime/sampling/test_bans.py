"""allowed_token_ids and bad_words: what they forbid, and that other rows keep their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.request import Request, SamplingParams
from moesaic.runtime.sampling.bans import WordBans, forbid
from moesaic.runtime.sampling.penalties import Adjustment, adjust

TOKEN = st.integers(0, 4)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    words=st.lists(st.lists(TOKEN, min_size=1, max_size=4), max_size=5),
    generated=st.lists(TOKEN, max_size=12),
    later=st.integers(0, 12),
)
def test_the_bans_are_those_of_vllms_scan(words: list[list[int]], generated: list[int], later: int) -> None:
    """Of the generated tokens the last `later` come after a preemption."""
    known = max(0, len(generated) - later)
    bans = WordBans(words, generated[:known])
    for token in generated[known:]:
        bans.append(token)
    wanted = {
        word[-1]
        for word in words
        if len(word) <= len(generated) + 1 and generated[len(generated) - len(word) + 1 :] == word[:-1]
    }
    assert set(bans.next()) == wanted


def row(allowed: list[int] | None, forbidden: list[int]) -> list[int]:
    """The tokens that are left of five."""
    logits = torch.zeros(2, 5)
    forbid(logits, 1, None if allowed is None else np.array(allowed), np.array(forbidden, dtype=np.int64))
    assert torch.equal(logits[0], torch.zeros(5))
    return torch.nonzero(logits[1] == 0)[:, 0].tolist()


@pytest.mark.parametrize(
    ("allowed", "forbidden", "left"),
    [
        (None, [1, 1, 3], [0, 2, 4]),
        ([1, 4], [], [1, 4]),
        ([1, 4], [4, 0], [1]),
        ([1, 4], [4, 1, 4], [1, 4]),
        (None, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_what_is_left(allowed: list[int] | None, forbidden: list[int], left: list[int]) -> None:
    assert row(allowed, forbidden) == left


def test_a_row_with_bans_leaves_the_bits_of_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50, generator=generator)
    others = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, logit_bias={3: 1.5}, min_tokens=2)
    banned = SamplingParams(allowed_token_ids=[7, 9, 11], bad_word_ids=[[7], [5, 9]], presence_penalty=0.5)
    adjustments = [
        Adjustment(Request(index, [1, 2], params, (0,)), [4, 5])
        for index, params in enumerate((others, banned, others))
    ]
    alone = logits.clone()
    adjust(alone, [0, 2], [adjustments[0], adjustments[2]])
    adjust(logits, [0, 1, 2], adjustments)
    assert torch.equal(logits[[0, 2]], alone[[0, 2]])
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == [11]
