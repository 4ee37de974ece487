from __future__ import annotations

import pytest
from tests.support.toy_model import STOP_TOKEN, request

from moesaic.core.errors import ConfigError, RequestError
from moesaic.core.request import FinishReason
from moesaic.policy.scheduling.batching import BatchLimits, ContinuousBatching, ScheduledStep
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.sequence import Sequence, Stage


def batching(
    num_blocks: int = 100,
    size: int = 4,
    seats: int = 4,
    rows: int = 8,
    length: int = 40,
    chunk: int | None = None,
) -> ContinuousBatching:
    return ContinuousBatching(BatchLimits(seats, rows, length, chunk), KVBlocks(num_blocks, size))


def run(subject: ContinuousBatching, schedule: ScheduledStep) -> None:
    """Does what a scheduler does when a step is done. Every sampled token is 0."""
    for sequence, rows in schedule.chunks:
        sequence.advance(rows)
        subject.blocks.commit(sequence.request_id, sequence.tokens.array, sequence.num_computed)
        if not sequence.num_pending and sequence.append(0):
            subject.remove(sequence.request_id)
            subject.free(sequence)


def chunks(schedule: ScheduledStep) -> list[tuple[int, int]]:
    return [(sequence.request_id, rows) for sequence, rows in schedule.chunks]


def test_worked_example() -> None:
    """8 rows a step, and prompts of 5, 11 and 2 tokens. Decodes run together with chunks of prompts."""
    subject = batching(rows=8)
    for request_id, length in enumerate((5, 11, 2)):
        subject.add(request(request_id, [request_id] * length, max_tokens=3), now=0.0)
    seen = []
    for _ in range(6):
        schedule = subject.schedule(now=0.0)
        seen.append(chunks(schedule))
        run(subject, schedule)
    assert seen == [
        [(0, 5), (1, 3)],  # all of 0, and as much of 1 as fits
        [(0, 1), (1, 7)],  # 0 decodes; 2 waits for a row
        [(0, 1), (1, 1), (2, 2)],  # the last row of 1's prompt; 0 gets its third token and ends
        [(1, 1), (2, 1)],
        [(1, 1), (2, 1)],
        [],
    ]


def test_seats_are_kept() -> None:
    subject = batching(seats=2)
    for request_id in range(3):
        subject.add(request(request_id, [1]), 0.0)
    assert chunks(subject.schedule(0.0)) == [(0, 1), (1, 1)]
    assert list(subject.waiting) == [2]


def test_a_chunk_cap_lets_prompts_share_a_step() -> None:
    subject = batching(rows=8, chunk=3)
    for request_id in range(3):
        subject.add(request(request_id, [request_id] * 9), 0.0)
    assert chunks(subject.schedule(0.0)) == [(0, 3), (1, 3), (2, 2)]


def test_nobody_overtakes() -> None:
    """With 4 blocks request 1 does not fit beside request 0. Request 2 would fit, but waits too."""
    subject = batching(num_blocks=4, length=16, rows=16)
    for request_id, length in enumerate((7, 10, 1)):
        subject.add(request(request_id, [request_id] * length, max_tokens=1), 0.0)
    schedule = subject.schedule(0.0)
    assert chunks(schedule) == [(0, 7)]
    run(subject, schedule)
    assert chunks(subject.schedule(0.0)) == [(1, 10), (2, 1)]


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    """Two requests decode side by side until the six blocks of two tokens are used up."""
    subject = batching(num_blocks=6, size=2, seats=2, length=12)
    for request_id in range(3):
        subject.add(request(request_id, [request_id] * 3, max_tokens=8), 0.0)
    while not (schedule := subject.schedule(1.0)).preempted_sequences:
        run(subject, schedule)
    assert [sequence.request_id for sequence in schedule.preempted_sequences] == [1]
    assert chunks(schedule) == [(0, 1)] and not schedule.admitted_sequences
    victim = schedule.preempted_sequences[0]
    assert (victim.stage, victim.epoch, victim.num_computed) == (Stage.WAITING, 1, 0)
    assert victim.generated_ids and victim.waiting_since == 1.0
    assert list(subject.waiting) == [1, 2]
    run(subject, schedule)
    order = []
    while (schedule := subject.schedule(2.0)).chunks:
        order += [sequence.request_id for sequence in schedule.admitted_sequences]
        run(subject, schedule)
    assert order == [1, 2]
    assert subject.preemptions == 1


def test_no_thrash() -> None:
    """An admission leaves a free block for every request that may still grow."""
    subject = batching(num_blocks=4, length=16)
    subject.add(request(0, [0] * 8, max_tokens=8), 0.0)
    run(subject, subject.schedule(0.0))
    subject.add(request(1, [1] * 8, max_tokens=1), 0.0)
    assert chunks(subject.schedule(0.0)) == [(0, 1)]  # 2 blocks are free, 0 needs one of them soon


def test_no_block_is_spared_for_who_cannot_grow() -> None:
    """With max_tokens 1 a prompt of two blocks never needs a third, since the answer's keys and values are
    not written."""
    subject = batching(num_blocks=4, length=16, rows=16)
    subject.add(request(0, [0] * 8, max_tokens=1), 0.0)
    subject.add(request(1, [1] * 8, max_tokens=1), 0.0)
    assert chunks(subject.schedule(0.0)) == [(0, 8), (1, 8)]


def test_removed_requests_are_finished_but_hold_their_blocks_until_freed() -> None:
    subject = batching()
    subject.add(request(0, [1] * 4), 0.0)
    subject.add(request(1, [1] * 4), 0.0)
    subject.schedule(0.0)
    used = subject.blocks.stats().num_used
    sequence = subject.remove(0)
    assert sequence is not None and sequence.stage is Stage.FINISHED
    assert subject.blocks.stats().num_used == used
    subject.free(sequence)
    assert subject.blocks.stats().num_used == used - 1
    assert subject.remove(0) is None


def test_arrivals_are_checked() -> None:
    subject = batching(length=4)
    with pytest.raises(RequestError, match="prompt: got 4 tokens; allowed: 1 to 3"):
        subject.add(request(0, [1] * 4), 0.0)
    subject.add(request(0, [1] * 3), 0.0)
    with pytest.raises(ValueError, match="request 0 arrived twice"):
        subject.add(request(0, [1]), 0.0)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs: got 0; allowed: at least 1"):
        BatchLimits(0, 1, 1)
    with pytest.raises(ConfigError, match="max_num_batched_tokens: got 3; allowed: at least max_num_seqs, 4"):
        BatchLimits(4, 3, 1)
    with pytest.raises(ConfigError, match="max_model_len: got 17; allowed: at most the KV cache's 16 tokens"):
        ContinuousBatching(BatchLimits(1, 1, 17), KVBlocks(4, 4))


def test_a_stop_token_counts_once_min_tokens_are_there() -> None:
    sequence = Sequence(request(0, [1], max_tokens=9, stop=True, min_tokens=2), 20, 0.0)
    assert [sequence.append(token) for token in (STOP_TOKEN, STOP_TOKEN, 1, STOP_TOKEN)] == [
        None,
        None,
        None,
        FinishReason.STOP,
    ]


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(2, 20), (None, 5), (9, 5)])
def test_length_ends_a_request(max_tokens: int | None, max_model_len: int) -> None:
    sequence = Sequence(request(0, [1, 1, 1], max_tokens), max_model_len, 0.0)
    assert sequence.append(0) is None
    assert sequence.append(0) is FinishReason.LENGTH


def test_scored_chunks_never_mix() -> None:
    """A prompt of 6 tokens with 2 generated ones was preempted when rows 0 to 2 had been scored."""
    sequence = Sequence(request(0, [1] * 6, prompt_logprobs=0), 20, 0.0)
    assert (sequence.reusable, sequence.chunk_end, sequence.next_rows_need_scores) == (0, 6, True)
    sequence.admit(0)
    sequence.advance(3)
    sequence.preempt(0.0)
    assert (sequence.reusable, sequence.chunk_end, sequence.next_rows_need_scores) == (3, 3, False)
    sequence.admit(2)
    sequence.advance(1)
    assert (sequence.chunk_end, sequence.next_rows_need_scores) == (6, True)
    sequence.advance(2)  # row 5 scores nothing: the prompt ends there
    assert (sequence.chunk_end, sequence.next_rows_need_scores, sequence.reusable) == (6, False, 5)


def received(prompt: list[int], generated: list[int], tokens: int, **settings: int) -> ScheduledStep:
    subject = batching(**settings)
    subject.add(request(0, prompt, max_tokens=8), 0.0, generated, received_tokens=tokens)
    return subject.schedule(now=0.0)


def test_what_was_received_is_not_computed_again() -> None:
    schedule = received([1] * 10, [5], tokens=10)
    [sequence] = schedule.admitted_sequences
    assert chunks(schedule) == [(0, 1)]
    assert sequence.num_computed == 10 and sequence.restored_positions == range(10)


def test_only_what_the_prefix_cache_lacks_is_restored() -> None:
    subject = batching()
    subject.add(request(0, [1] * 8, max_tokens=1), 0.0)
    run(subject, subject.schedule(0.0))
    subject.add(request(1, [1] * 10, max_tokens=8), 0.0, [5], received_tokens=10)
    [sequence] = subject.schedule(0.0).admitted_sequences
    assert sequence.restored_positions == range(8, 10)
    subject.add(request(2, [1] * 9, max_tokens=8), 0.0, [], received_tokens=4)
    [sequence] = subject.schedule(0.0).admitted_sequences
    assert sequence.num_computed == 8 and not sequence.restored_positions


def test_a_row_to_sample_from_is_computed_in_any_case() -> None:
    schedule = received([1] * 10, [], tokens=10, rows=16)
    assert chunks(schedule) == [(0, 10)] and not schedule.admitted_sequences[0].restored_positions


def test_what_was_received_is_used_once() -> None:
    subject = batching(num_blocks=10)
    subject.add(request(0, [1] * 10, max_tokens=8), 0.0, [5], received_tokens=10)
    [sequence] = subject.schedule(0.0).admitted_sequences
    subject._preempt(sequence, 0.0)
    schedule = subject.schedule(0.0)
    assert chunks(schedule) == [(0, 8)] and not sequence.restored_positions


def test_needs_count_shared_blocks_once_and_no_more_than_a_request_may_have() -> None:
    subject = batching(num_blocks=40, seats=3, rows=32)
    subject.add(request(0, [5] * 9, max_tokens=30), 0.0)
    run(subject, subject.schedule(0.0))
    subject.add(request(1, [5] * 9, max_tokens=2), 0.0)
    for request_id in (2, 3):
        subject.add(request(request_id, [request_id] * 10, max_tokens=30), 0.0)
    needs = subject.count_needs(tokens_ahead=4)
    assert (needs.running, needs.running_blocks, needs.waiting) == ((4,), 4, (3, 4))
    assert needs.used_end == 3
    subject.schedule(0.0)
    needs = subject.count_needs(tokens_ahead=4)
    assert needs.running == (4, 3, 4) and needs.running_blocks == 11 - 2, "two blocks are shared"
    assert needs.waiting == () and needs.used_end == 7
