"""How many tokens are drafted for whom, and what counts as accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.toy_model import STOP_TOKEN, request

from moesaic.core.metrics import SpeculationStats
from moesaic.core.speculation import MAX_CHECKED_ROWS, break_even
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.acceptance import FIRST_WAIT, LAST_WAIT, SOON, Acceptance
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.sequence import Sequence
from moesaic.policy.scheduling.speculation import TRIALS_APART, Speculation
from moesaic.policy.scheduling.step_prices import StepPrices

FREE = StepPrices(lambda rows: 1.0)


class Counting:
    """A drafter that proposes 0, 1, 2, ..."""

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        return list(range(max_tokens))


def sequences(count: int, blocks: KVBlocks, acceptance: float = 0.9, **kind: object) -> list[Sequence]:
    """Running sequences of 3 tokens, of which one is generated."""
    found = []
    for number in range(count):
        one = Sequence(request(number, [1, 2], **{"max_tokens": 50, **kind}), 64, 0.0)  # type: ignore[arg-type]
        one.append(3)
        one.num_computed = 2
        one.acceptance = Acceptance(acceptance, 1.0)
        blocks.allocate(number, one.tokens.array, 0)
        found.append(one)
    return found


def drafted(
    count: int, prices: StepPrices, acceptance: float = 0.9, room: int = 99, most: int = 4, spare: int = 0
) -> list[int]:
    blocks = KVBlocks(400, 2)
    found = sequences(count, blocks, acceptance)
    Speculation(Counting(), most, prices).draft(found, room, blocks, spare)
    return [len(one.draft_tokens) for one in found]


def test_as_much_as_may_be_is_drafted_where_rows_cost_nothing() -> None:
    assert drafted(2, FREE) == [4, 4]
    assert drafted(2, FREE, room=5) == [3, 2]
    assert drafted(2, FREE, room=0) == [0, 0]
    assert sum(drafted(20, FREE)) == MAX_CHECKED_ROWS - 20
    assert sum(drafted(MAX_CHECKED_ROWS, FREE)) == 0
    assert drafted(2, FREE, most=0) == [0, 0]


def test_no_more_is_drafted_than_pays() -> None:
    """Each row costs half a row: the n-th token has to have a chance of more than half of the rate."""
    prices = StepPrices(lambda rows: 1 + 0.5 * (rows - 1))
    assert drafted(1, prices, acceptance=0.95) == [4]
    assert drafted(1, prices, acceptance=0.7) == [1]
    assert drafted(1, prices, acceptance=0.4) == [0]


def test_nothing_is_drafted_where_every_row_costs_a_row() -> None:
    assert drafted(3, StepPrices(float), acceptance=0.99) == [0, 0, 0]


def test_the_best_chances_come_first() -> None:
    blocks = KVBlocks(400, 2)
    found = sequences(2, blocks)
    found[0].acceptance = Acceptance(0.5, 1.0)
    Speculation(Counting(), 3, FREE).draft(found, 4, blocks, 0)
    assert [len(one.draft_tokens) for one in found] == [1, 3]  # 0.9, 0.81, 0.73, 0.5


def test_the_last_token_of_an_answer_is_not_drafted() -> None:
    blocks = KVBlocks(400, 2)
    [short] = sequences(1, blocks, max_tokens=4)
    Speculation(Counting(), 9, FREE).draft([short], 99, blocks, 0)
    assert short.draft_tokens == [0, 1]  # 3 of 6 tokens are there; behind two drafted ones comes the last


def test_nothing_is_drafted_behind_the_end_of_an_answer() -> None:
    blocks = KVBlocks(400, 2)
    [ending] = sequences(1, blocks, stop=True)
    Speculation(Counting(), 9, FREE).draft([ending], 99, blocks, 0)
    assert ending.draft_tokens == list(range(STOP_TOKEN))


def test_blocks_that_others_may_need_are_left() -> None:
    blocks = KVBlocks(4, 2)  # two of them are the sequence's own, with room for one more token
    [one] = sequences(1, blocks)
    for spare, expected in ((3, 1), (1, 3), (0, 5)):
        Speculation(Counting(), 9, FREE).draft([one], 99, blocks, spare)
        assert len(one.draft_tokens) == expected
        blocks.trim(0, one.num_tokens)
        assert blocks.available == 2


def test_drafts_that_are_wrong_end_and_are_tried_again_less_and_less() -> None:
    blocks = KVBlocks(400, 2)
    [one] = sequences(1, blocks)
    subject = Speculation(Counting(), 2, StepPrices(lambda rows: 1 + 0.3 * (rows - 1)))
    gaps, gap = [], 0
    for _ in range(5000):
        subject.draft([one], 99, blocks, 0)
        gap += 1
        if one.draft_tokens:
            subject.record_check(one, 0)
            one.draft_tokens = []
            gaps.append(gap)
            gap = 0
    start = gaps.index(max(gaps[:12]))
    tail = [size for size in gaps if size > 1]
    assert start < 12 and tail == sorted(tail) and tail[0] > FIRST_WAIT and tail[-1] == LAST_WAIT + 1
    assert subject.stats().accepted_tokens == 0
    while one.acceptance.tokens_since_draft < one.acceptance.wait:
        subject.draft([one], 99, blocks, 0)
    subject.draft([one], 99, blocks, 0)
    assert len(one.draft_tokens) == 1
    subject.record_check(one, 1)
    assert one.acceptance.wait == SOON


def test_counts() -> None:
    blocks = KVBlocks(400, 2)
    [one] = sequences(1, blocks)
    subject = Speculation(Counting(), 3, FREE)
    for accepted in (3, 0, 1):
        one.acceptance = None
        subject.draft([one], 99, blocks, 0)
        subject.record_check(one, accepted)
    subject.record_check(sequences(1, KVBlocks(9, 2))[0], 0)  # one without a draft
    assert replace(subject.stats(), prices=()) == SpeculationStats(3, 9, 4, (2, 1, 1))
    assert Speculation().stats() == SpeculationStats()


def test_acceptance_forgets() -> None:
    subject = Acceptance()
    for _ in range(60):
        subject.add(4, 0)
    assert subject.rate < 0.01
    for _ in range(60):
        subject.add(4, 4)
    assert subject.rate > 0.99


@pytest.mark.parametrize(("price", "tokens"), [(1.3, 1), (2.1, 4), (2.9, 2)])
def test_at_break_even_a_step_gives_as_many_tokens_for_its_price(price: float, tokens: int) -> None:
    acceptance = break_even(price, tokens)
    assert acceptance is not None
    assert sum(acceptance**place for place in range(1 + tokens)) == pytest.approx(price)
    assert break_even(1.01 + tokens, tokens) is None
    assert break_even(1.0, tokens) == pytest.approx(0.0, abs=1e-6)


def test_tokens_that_the_model_proposes_are_drafted() -> None:
    blocks = KVBlocks(400, 2)
    found = sequences(2, blocks)
    found[0].proposed_tokens = [7]
    Speculation(None, 1, FREE).draft(found, 99, blocks, 0)
    assert [one.draft_tokens for one in found] == [[7], []]


def test_its_prices_are_reported() -> None:
    prices = StepPrices(lambda rows: 100.0 * (1 + rows))
    subject = Speculation(Counting(), 4, prices)
    assert subject.stats().prices == tuple((1 + rows) / 2 for rows in range(1, MAX_CHECKED_ROWS + 1))
    for _ in range(9):
        subject.record_step(1, 0.1)
        subject.record_step(2, 0.2)
    assert subject.stats().prices[1] == pytest.approx(2.0)
    assert Speculation().stats().prices == ()


def test_tries_are_apart_where_requests_are_many() -> None:
    blocks = KVBlocks(400, 2)
    for requests, apart in ((1, 1), (3, 3), (20, TRIALS_APART)):
        found = sequences(requests, blocks, acceptance=0.0)
        subject, tried = Speculation(Counting(), 2, StepPrices(float)), []
        for step in range(3 * apart):
            for one in found:
                assert one.acceptance is not None
                one.acceptance.tokens_since_draft = LAST_WAIT
            subject.draft(found, 9, blocks, 0)
            tried += [step] * sum(len(one.draft_tokens) for one in found)
            for one in found:
                one.draft_tokens = []
        assert tried == [0, apart, 2 * apart]
        for one in found:
            blocks.free(one.request_id)


def test_it_says_when_drafts_pay() -> None:
    text = Speculation(Counting(), 4, StepPrices(lambda rows: 1 + 0.4 * rows)).describe()
    assert text.startswith("1 to 4 tokens; acceptance from which they pay, by requests: 0.29 to ")
    assert text.endswith(" at 16") and " at 8, " in text
    assert Speculation().describe() == ""


def test_a_new_request_begins_with_the_acceptance_of_those_before() -> None:
    blocks = KVBlocks(400, 2)
    subject, prices = Speculation(Counting(), 4, FREE), []
    for one in sequences(40, blocks):
        one.acceptance = None
        subject.draft([one], 99, blocks, 0)
        subject.record_check(one, 0)
        prices.append(one.acceptance.rate if one.acceptance else -1.0)
    assert prices[:20] == sorted(prices[:20], reverse=True) and prices[-1] < 0.1


def test_a_request_without_proposals_does_not_keep_others_from_a_try() -> None:
    class OnlyOdd:
        def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
            return [0] if tokens[0] % 2 else []

    blocks = KVBlocks(400, 2)
    found = sequences(2, blocks, acceptance=0.0)
    found[0].tokens.array[0] = 4
    for one in found:
        assert one.acceptance is not None
        one.acceptance.tokens_since_draft = LAST_WAIT
    subject = Speculation(OnlyOdd(), 2, StepPrices(float))
    tried = []
    for _ in range(2):
        subject.draft(found, 9, blocks, 0)
        tried.append([len(one.draft_tokens) for one in found])
    assert tried == [[0, 0], [0, 1]]
