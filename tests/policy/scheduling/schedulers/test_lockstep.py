from __future__ import annotations

import numpy as np
import pytest
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_replay import replays
from tests.support.toy_model import alone, request

from moesaic.core.offload import Division, DivisionPrices, ExpertReads
from moesaic.core.request import FinishReason
from moesaic.policy.offloading.dividing import Dividing
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    Divide,
    Emit,
    ReadPrefix,
    Release,
    RunStep,
    StepDone,
    StepPlan,
)
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.policy.scheduling.schedulers.step_plan import plan_step
from moesaic.policy.scheduling.sequence import Sequence


def executor(
    num_blocks: int = 32, size: int = 4, seats: int = 4, rows: int = 16, length: int = 64
) -> FakeExecutor:
    return FakeExecutor(BatchLimits(seats, rows, length), num_blocks, size)


def plan_of(actions: list[Action]) -> StepPlan:
    (plan,) = [action.plan for action in actions if isinstance(action, RunStep)]
    return plan


def test_worked_example() -> None:
    """One request runs from arrival to end, action by action."""
    subject = executor()
    asked = request(7, [3, 1, 2], max_tokens=2)
    tokens, finish = alone(asked, 64)

    admit, run = subject.arrive(asked)
    assert isinstance(admit, Admit) and isinstance(run, RunStep)
    assert (admit.requests, admit.generated_ids, admit.cached_tokens, admit.epochs) == (
        [asked],
        [[]],
        [0],
        [0],
    )
    assert run.plan.batch.token_ids.tolist() == [3, 1, 2]
    assert run.plan.batch.logit_rows.tolist() == [2]

    emit, run = subject.step()
    assert emit == Emit([7], tokens[:1], [0], [None])
    assert isinstance(run, RunStep) and run.plan.batch.positions.tolist() == [3]

    assert subject.step() == [Emit([7], tokens[1:], [0], [finish]), Release([7])]
    assert subject.under_way is None
    stats = subject.scheduler.stats()
    assert (stats.steps, stats.prefill_tokens, stats.decode_tokens, stats.step_seconds) == (2, 3, 1, 1.0)


def test_the_plan_of_a_mixed_step() -> None:
    """The example of `step_plan`."""
    blocks = KVBlocks(8, 4)
    first, second = Sequence(request(0, [1] * 6), 64, 0.0), Sequence(request(1, [2] * 7), 64, 0.0)
    for sequence in (first, second):
        blocks.allocate(sequence.request_id, sequence.tokens.array, 0)
    first.advance(5)
    plan = plan_step(9, [(first, 1), (second, 3)], blocks)
    assert plan.step == 9
    assert plan.batch.token_ids.tolist() == [1, 2, 2, 2]
    assert plan.batch.positions.tolist() == [5, 0, 1, 2]
    assert plan.batch.query_starts.tolist() == [0, 1, 4]
    assert plan.batch.context_lens.tolist() == [6, 3]
    assert plan.batch.block_tables.tolist() == [[0, 1], [2, 3]]
    assert plan.batch.logit_rows.tolist() == [0]
    assert (plan.request_ids.tolist(), plan.epochs.tolist()) == ([0, 1], [0, 0])
    assert (plan.sampled_sequences.tolist(), plan.scored_sequences.tolist()) == ([0], [])
    arrays = [
        *vars(plan.batch).values(),
        plan.request_ids,
        plan.epochs,
        plan.sampled_sequences,
        plan.scored_sequences,
    ]
    assert all(array.dtype == np.int64 for array in arrays)


def test_arrivals_wait_for_the_step_under_way() -> None:
    subject = executor()
    subject.arrive(request(0, [1]))
    assert subject.arrive(request(1, [2])) == []
    assert subject.scheduler.stats().waiting == 1
    assert [type(action) for action in subject.step()] == [Emit, Admit, RunStep]
    subject.drain()
    subject.check_everybody()


def test_cancelled_under_way_keeps_its_blocks_until_the_step_is_done() -> None:
    subject = executor()
    subject.arrive(request(0, [1] * 9), request(1, [2] * 2))
    used = subject.scheduler.stats().blocks.num_used
    assert subject.cancel(0, 99) == []
    assert subject.scheduler.stats().blocks.num_used == used
    emit, release, run = subject.step()
    assert isinstance(emit, Emit) and emit.request_ids == [1] and emit.samples == [1]
    assert release == Release([0])
    assert isinstance(run, RunStep) and run.plan.request_ids.tolist() == [1]
    subject.drain()
    subject.check_everybody()


def test_cancelled_outside_the_step_is_released_at_once() -> None:
    """Request 2 has a seat, but its rows are not in the step. Request 3 waits and holds no block."""
    subject = FakeExecutor(BatchLimits(3, 3, 64, max_prefill_chunk=1), 32, 4)
    subject.arrive(request(0, [0] * 9), request(1, [1] * 9), request(2, [2] * 9), request(3, [3]))
    subject.scheduler._batching.limits = BatchLimits(2, 2, 64, max_prefill_chunk=1)
    subject.step()
    assert plan_of(subject.log[-1][2]).request_ids.tolist() == [0, 1]
    assert subject.cancel(2) == [Release([2])]
    assert subject.cancel(3) == []
    assert subject.cancel(2, 3) == []
    subject.drain()
    subject.check_everybody()


def test_cancelling_the_last_request_falls_idle() -> None:
    subject = executor()
    subject.arrive(request(0, [1]))
    subject.cancel(0)
    assert subject.step() == [Release([0])]
    assert subject.under_way is None


def test_preempted_requests_get_the_same_tokens() -> None:
    subject = executor(num_blocks=6, size=2, seats=4, rows=8, length=12)
    subject.arrive(*(request(i, [i % 5, 1, 2], max_tokens=9) for i in range(4)))
    subject.drain()
    subject.check_everybody()
    assert subject.preempted > 0


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """Both requests need a block and one is free. Request 0 takes it and ends soon. Request 1's blocks stay
    cached."""
    subject = executor(num_blocks=8, size=2, seats=2, rows=16, length=14)
    subject.arrive(request(0, [0] * 3, max_tokens=4), request(1, [1] * 9, max_tokens=3))
    subject.drain()
    subject.check_everybody()
    assert (subject.preempted, subject.reused) == (1, 10)


def test_a_preempted_request_is_released_before_it_is_admitted_again() -> None:
    subject = executor(num_blocks=6, size=2, seats=2, rows=8, length=12)
    subject.arrive(request(0, [0, 0, 0], 8), request(1, [1, 1, 1], 8))
    subject.drain()
    seen = [
        (type(action).__name__, getattr(action, "epochs", None))
        for _, _, actions in subject.log
        for action in actions
        if (isinstance(action, Release) and action.request_ids == [1])
        or (isinstance(action, Admit) and action.requests[-1].request_id == 1)
    ]
    assert seen == [("Admit", [0, 0]), ("Release", None), ("Admit", [1]), ("Release", None)]


def test_a_common_prefix_is_computed_once() -> None:
    subject = executor(rows=16)
    prompt = [1, 2, 3, 4] * 4
    subject.arrive(*(request(i, [*prompt, i], max_tokens=1) for i in range(4)))
    subject.drain()
    subject.check_everybody()
    assert subject.reused == 3 * 16
    assert subject.scheduler.stats().prefill_tokens == 17 + 3 * 1


def test_prompt_logprobs_are_reported_once_in_spite_of_preemption() -> None:
    """The prompt to score is preempted when half of it is computed."""
    subject = FakeExecutor(BatchLimits(2, 4, 16), 8, 2)
    subject.arrive(request(0, [1, 2], max_tokens=14), request(1, [3] * 11, 2, prompt_logprobs=0))
    subject.drain()
    subject.check_everybody()
    assert subject.clients[1].epoch > 0
    assert subject.clients[1].scored == list(range(10))


def test_a_one_token_prompt_has_nothing_to_score() -> None:
    subject = executor()
    plan = plan_of(subject.arrive(request(0, [1], prompt_logprobs=1)))
    assert plan.scored_sequences.tolist() == []


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_stop_tokens_are_emitted(min_tokens: int) -> None:
    subject = executor(length=128, num_blocks=64)
    subject.arrive(*(request(i, [i], max_tokens=100, stop=True, min_tokens=min_tokens) for i in range(4)))
    subject.drain()
    subject.check_everybody()
    assert {client.finish for client in subject.clients.values()} == {FinishReason.STOP}
    assert all(len(client.generated) > min_tokens for client in subject.clients.values())


def test_queue_seconds_count_from_arrival_and_from_preemption() -> None:
    subject = executor(num_blocks=6, size=2, seats=2, rows=8, length=12)
    subject.arrive(request(0, [0, 0, 0], 8), request(1, [1, 1, 1], 8))
    subject.arrive(request(2, [2], 1))
    subject.drain()
    waits = {}
    for _, _, actions in subject.log:
        for action in actions:
            if isinstance(action, Admit):
                for asked, epoch, waited in zip(
                    action.requests, action.epochs, action.queue_seconds, strict=True
                ):
                    waits[asked.request_id, epoch] = waited
    assert waits[0, 0] == 0.0 and waits[1, 1] > 0.0 and waits[2, 0] > 0.0


def test_a_step_that_is_not_under_way_is_refused() -> None:
    subject = executor()
    with pytest.raises(ValueError, match="step 0 is not in flight"):
        subject.scheduler.handle(StepDone(0, np.zeros(0, dtype=np.int64)), 0.0)
    subject.arrive(request(0, [1]))
    with pytest.raises(ValueError, match="step 1"):
        subject.scheduler.handle(StepDone(1, np.zeros(1, dtype=np.int64)), 0.0)
    with pytest.raises(ValueError, match="step 0 with 2 tokens"):
        subject.scheduler.handle(StepDone(0, np.zeros(2, dtype=np.int64)), 0.0)


def test_a_failed_step_is_run_again_without_what_was_cancelled() -> None:
    subject = executor()
    first = plan_of(subject.arrive(request(0, [1, 2, 3], max_tokens=2)))
    subject.arrive(request(1, [4, 5], max_tokens=1))
    again = plan_of(subject.fail())
    assert (first.step, again.step) == (0, 1)
    assert again.request_ids.tolist() == [0, 1] and again.batch.positions.tolist() == [0, 1, 2, 0, 1]
    subject.cancel(0)
    released, run = subject.fail()
    assert released == Release([0]) and isinstance(run, RunStep) and run.plan.request_ids.tolist() == [1]
    subject.drain()
    subject.check_everybody()
    assert subject.scheduler.stats().steps == 1


def test_replay_gives_the_same_actions() -> None:
    subject = executor(num_blocks=8, size=2, seats=3, rows=6, length=16)
    subject.arrive(*(request(i, [i % 2] * (i + 1), max_tokens=7) for i in range(6)))
    subject.step()
    subject.cancel(1, 5)
    subject.drain()
    assert replays(LockstepScheduler(subject.limits, KVBlocks(8, 2)), subject.log)
    assert not replays(LockstepScheduler(subject.limits, KVBlocks(9, 2)), subject.log)


def test_a_request_is_admitted_once_its_prefix_was_read() -> None:
    """And it keeps its blocks while it is read, also after its client has left."""
    subject = FakeExecutor(BatchLimits(4, 16, 16), 8, 4, stored_root=b"root")
    prompt = [index % 4 for index in range(10)]
    subject.arrive(request(0, prompt))
    subject.drain()
    subject.arrive(*(request(number, [number] * 12) for number in (1, 2)))  # these evict its blocks
    subject.drain()
    subject.write(99)

    read = subject.arrive(request(3, prompt))[-1]
    assert isinstance(read, ReadPrefix) and len(read.blocks) == 2
    left = subject.arrive(request(4, prompt))[-1]
    assert isinstance(left, ReadPrefix) and subject.cancel(4) == []
    admit, run = subject.read()
    assert isinstance(admit, Admit) and admit.cached_tokens == [8]
    assert isinstance(run, RunStep) and run.plan.batch.positions.tolist() == [8, 9]
    assert subject.blocks.stats().num_used == 6, "a thread may still write to the blocks of the other one"
    subject.read()
    subject.drain()

    subject.arrive(request(5, [3] * 12), request(6, [2] * 12))
    subject.drain()
    subject.write(99)
    subject.arrive(request(7, prompt))
    admit, run = subject.read(damaged=1)
    assert isinstance(admit, Admit) and admit.cached_tokens == [4]
    subject.drain()
    subject.check_everybody()


def test_memory_is_divided_before_a_step_and_a_request_that_waits_alone_gets_its_blocks() -> None:
    """Two requests of three and two blocks come and go. Between the divisions nothing else is done."""
    prices = DivisionPrices((1, 4), (0.1, 0.1), 0.01, layers=1, num_experts=4, top_k=1)
    divider = Dividing([Division(residents, 16 - 4 * residents) for residents in range(4)], prices)
    subject = FakeExecutor(BatchLimits(4, 16, 64), 16, 4, divider=divider)
    first = subject.arrive(request(0, [1] * 9, max_tokens=3))
    assert first[0] == Divide(Division(3, 4)) and isinstance(first[-1], RunStep)
    assert subject.blocks.num_blocks == 4
    subject.drain()
    assert subject.arrive(request(1, [2] * 20, max_tokens=4))[0] == Divide(Division(2, 8))
    subject.drain()
    subject.check_everybody()
    assert subject.divisions == 2 and subject.preempted == 0


def test_what_was_measured_goes_to_the_divider() -> None:
    prices = DivisionPrices((1, 4), (0.1, 0.1), 0.01, layers=1, num_experts=4, top_k=1)
    divider = Dividing([Division(0, 8)], prices)
    subject = FakeExecutor(BatchLimits(4, 16, 16), 8, 4, divider=divider)
    plan = plan_of(subject.arrive(request(0, [1], max_tokens=2)))
    reads = ExpertReads(5.0, (1.0, 0.0, 0.0, 0.0))
    subject.scheduler.handle(StepDone(plan.step, np.array([3]), expert_reads=reads), 1.0)
    assert divider._reads == reads
