"""Checked drafts: what is kept, what is freed, and what the prefix cache knows."""

from __future__ import annotations

import numpy as np
import pytest
from tests.policy.scheduling.schedulers.test_lockstep_machine import speculation
from tests.support.fake_executor import FakeExecutor
from tests.support.toy_model import alone, request

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.schedulers.actions import StepDone
from moesaic.policy.scheduling.speculation import Speculation

LIMITS = BatchLimits(4, 40, 40)


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_the_prefix_cache_never_knows_a_wrong_token(right: float) -> None:
    """Blocks have one token each, so every row that counts is known at once."""
    subject = FakeExecutor(LIMITS, 120, 1, speculation=speculation(4, right))
    subject.arrive(request(0, [1, 2, 3], max_tokens=20), request(1, [2, 2], max_tokens=20))
    while subject.under_way is not None:
        subject.step()
        known = [subject.clients[number].tokens for number in (0, 1)]
        contents = [np.frombuffer(key[1], dtype=np.int64).tolist() for key in subject.blocks._block_by_key]
        assert len(contents) <= sum(len(tokens) - 1 for tokens in known)
        for number in set(subject.held):
            table = subject.blocks.table(number).tolist()
            keys = [subject.blocks._keys[block] for block in table]
            found = [int(np.frombuffer(key[1], dtype=np.int64)[0]) for key in keys if key is not None]
            assert found == known[number][: len(found)]
    subject.check_everybody()
    counts = subject.scheduler.stats().speculation
    assert counts.draft_tokens > 0 and (counts.accepted_tokens > 0) == (right > 0)


def test_right_tokens_save_steps() -> None:
    subject = FakeExecutor(LIMITS, 120, 4, speculation=speculation(4, 1.0))
    subject.arrive(request(0, [1], max_tokens=21))
    assert subject.drain() is None
    assert subject.steps == 1 + 4  # the prompt's token, then five a step
    assert subject.clients[0].generated == alone(subject.clients[0].request, 40)[0]


def test_blocks_of_wrong_tokens_are_free_again() -> None:
    subject = FakeExecutor(LIMITS, 120, 1, speculation=speculation(4, 0.0))
    subject.arrive(request(0, [1], max_tokens=9))
    subject.step()
    assert len(subject.blocks.table(0)) == 6  # the prompt, the first token, and four drafted ones
    plan = subject.under_way
    assert (
        plan is not None
        and plan.num_draft_tokens.tolist() == [4]
        and plan.sample_rows.tolist() == [0, 1, 2, 3, 4]
    )
    subject.fail()
    assert subject.under_way is not None and subject.under_way.num_draft_tokens.tolist() == [4]
    subject.cancel(0)
    subject.step()
    assert subject.blocks.stats().num_used == 0


def test_tokens_that_do_not_fit_the_plan_are_refused() -> None:
    subject = FakeExecutor(LIMITS, 120, 4, speculation=speculation(2, 1.0))
    subject.arrive(request(0, [1]))
    subject.step()
    with pytest.raises(ValueError, match="step 1 with 2 tokens"):
        subject.scheduler.handle(StepDone(1, np.zeros(2, dtype=np.int64), np.array([1])), 9.0)


class Once:
    """A drafter that proposes wrong tokens once."""

    def __init__(self) -> None:
        self.left = 1

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        self.left -= 1
        return [9] * max_tokens if self.left == 0 else []


@pytest.mark.parametrize("fails", [False, True])
def test_a_sequence_keeps_no_block_for_a_draft_that_is_over(fails: bool) -> None:
    subject = FakeExecutor(LIMITS, 120, 1, speculation=Speculation(Once(), 4))
    subject.arrive(request(0, [1], max_tokens=9))
    subject.step()
    assert len(subject.blocks.table(0)) == 6
    if fails:
        subject.fail()
    else:
        subject.step()
    assert subject.under_way is not None and not len(subject.under_way.num_draft_tokens)
    assert len(subject.blocks.table(0)) == len(subject.clients[0].tokens) < 6
