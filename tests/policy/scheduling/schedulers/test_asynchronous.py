from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_layerwise_executor import FakeLayered
from tests.support.plain_asynchronous import Run, Unit, sources
from tests.support.scheduler_replay import replays
from tests.support.toy_model import alone, request

from moesaic.core.curves import Curve, DeviceCurves
from moesaic.core.request import Request
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import (
    POLICIES,
    Defrag,
    FirstLayerFirst,
    MostTokensFirst,
    make_policy,
)
from moesaic.policy.scheduling.minimum_batch import Decisions, Load
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    Emit,
    Forget,
    Release,
    RowSource,
    RunSegment,
    RunStep,
    SegmentDone,
    StepDone,
    StepFailed,
)
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.ready_queues import RunThreshold
from moesaic.policy.scheduling.schedulers.step_plan import plan_step
from moesaic.policy.scheduling.sequence import Sequence
from moesaic.policy.scheduling.tokenpool import Units


def worker(
    num_blocks: int = 32,
    size: int = 4,
    seats: int = 4,
    rows: int = 16,
    length: int = 64,
    chunk: int | None = None,
    *,
    policy: str = "defrag",
    layers: int = 2,
    top_k: int = 2,
) -> FakeLayered:
    limits = BatchLimits(seats, rows, length, chunk)
    return FakeLayered(limits, num_blocks, size, policy=make_policy(policy), layers=layers, top_k=top_k)


def run_of(actions: list[Action]) -> RunSegment:
    (run,) = [action for action in actions if isinstance(action, RunSegment)]
    return run


def requests_under_way(subject: FakeLayered) -> list[int]:
    assert subject.action is not None
    ids: list[int] = subject.action.plan.request_ids.tolist()
    return ids


def requests_of(actions: list[Action]) -> list[int]:
    """The ids of the requests whose rows run next."""
    ids: list[int] = run_of(actions).plan.request_ids.tolist()
    return ids


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions]


def test_worked_example() -> None:
    """One request passes through two routed layers, action by action: its prompt, then one decode."""
    subject = worker()
    asked = request(7, [3, 1, 2], max_tokens=2)
    tokens, finish = alone(asked, 64)

    admit, run = subject.arrive(asked)
    assert isinstance(admit, Admit) and isinstance(run, RunSegment)
    assert (run.plan.step, run.segment, run.sources) == (0, 0, [])
    assert run.plan.batch.token_ids.tolist() == [3, 1, 2]

    assert subject.step() == []  # SegmentDone: the row waits for six parts
    assert subject.answer(0, [5, 0, 4, 1, 2]) == []
    run, forget = subject.answer(0, [3])
    assert isinstance(run, RunSegment) and forget == Forget([0])
    assert (run.plan.step, run.segment, run.sources) == (1, 1, [RowSource(0, 0, 3)])

    subject.step()
    run, forget = subject.answer(1, range(6))
    assert isinstance(run, RunSegment) and (run.segment, run.sources) == (2, [RowSource(1, 0, 3)])
    assert run.plan.batch.logit_rows.tolist() == [2] and forget == Forget([1])

    emit, run = subject.step()
    assert emit == Emit([7], tokens[:1], [0], [None])
    assert isinstance(run, RunSegment) and (run.segment, run.plan.batch.positions.tolist()) == (0, [3])
    for call in (3, 4):
        subject.step()
        subject.answer(call, [1, 0])
    assert subject.step() == [Emit([7], tokens[1:], [0], [finish]), Release([7])]
    subject.check_everybody()
    stats = subject.scheduler.stats()
    assert (stats.steps, stats.prefill_tokens, stats.decode_tokens) == (6, 3, 1)
    assert stats.step_seconds == 3.0  # six runs, each over at the event after it began


def test_rows_do_not_wait_for_others_experts() -> None:
    """Request 0's experts answer at once and those of request 1 never. Request 0 finishes meanwhile."""
    subject = worker()
    subject.arrive(request(0, [1], max_tokens=3), request(1, [2], max_tokens=3))
    assert subject.step() == []
    assert requests_of(subject.answer(0, [0, 1])) == [0]
    while subject.clients[0].finish is None:
        for run in subject.open_runs():
            if run != 0:
                subject.answer(run, subject.out[run])
        if subject.action is not None:
            subject.step()
    assert subject.clients[1].generated == [] and subject.out[0] == [2, 3]
    subject.drain()
    subject.check_everybody()


def test_rows_of_different_runs_join_again() -> None:
    """Requests 0 and 1 asked their experts in different runs. They are ready at one segment and go on
    together."""
    subject = worker()
    subject.arrive(request(0, [1, 2]))
    subject.arrive(request(1, [3]))
    subject.step()
    subject.answer(0, range(4))  # request 0 is ready at segment 1 while request 1 is in run 1
    subject.compute()
    subject.answer(1, [0, 1])  # and request 1 is, before its run has ended
    run = run_of(subject.step())
    assert (run.segment, run.plan.request_ids.tolist()) == (1, [0, 1])
    assert run.sources == [RowSource(0, 0, 2), RowSource(1, 0, 1)]
    subject.drain()
    subject.check_everybody()


def test_a_chunk_waits_for_the_parts_of_all_its_rows() -> None:
    subject = worker(chunk=3, top_k=1)
    run = run_of(subject.arrive(request(0, [1, 2, 3, 4, 5], max_tokens=1)))
    assert run.plan.batch.num_rows == 3
    subject.step()
    assert subject.answer(0, [2, 0]) == []
    assert run_of(subject.answer(0, [1])).segment == 1
    subject.drain()
    subject.check_everybody()


def test_chunks_of_a_request_go_through_one_after_another() -> None:
    subject = worker(chunk=2, top_k=1, layers=1)
    subject.arrive(request(0, [1, 2, 3, 4, 5], max_tokens=1))
    subject.drain()
    subject.check_everybody()
    runs = [run_of(actions) for _, _, actions in subject.log if RunSegment in kinds(actions)]
    assert [(run.segment, run.plan.batch.positions.tolist()) for run in runs] == [
        (0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3]), (0, [4]), (1, [4]),
    ]  # fmt: skip


def test_rows_under_way_are_at_most_those_of_a_step() -> None:
    """A chunk of 5 rows is in flight and the limit is 6. Another request gets one row, a third none."""
    subject = worker(seats=3, rows=6, chunk=5)
    subject.arrive(*(request(i, [i] * 30, max_tokens=3) for i in range(3)))
    assert subject.action is not None
    assert subject.action.plan.batch.query_starts.tolist() == [0, 5, 6]
    subject.step()
    assert subject.action is None and subject.scheduler.stats().waiting == 1
    subject.drain()
    subject.check_everybody()


def test_neighbouring_sources_are_joined() -> None:
    sequence = Sequence(request(0, [1]), 64, 0.0)
    plan = plan_step(0, [], KVBlocks(8, 4))
    none = np.zeros(0, dtype=np.int64)
    third, fourth = (Run(i, 0, plan, [], Units.of_run(i, 0, none, none, none, none)) for i in (3, 4))
    rows = [(third, 0, 2), (third, 2, 3), (third, 4, 5), (fourth, 5, 6), (fourth, 6, 9)]
    units = [Unit(sequence, stop - start, run, start) for run, start, stop in rows]
    assert sources(units) == [RowSource(3, 0, 3), RowSource(3, 4, 5), RowSource(4, 5, 9)]
    assert sources([]) == sources([Unit(sequence, 1)]) == []
    subject = worker(top_k=1)
    subject.arrive(request(0, [1, 2]), request(1, [3]))
    subject.step()
    assert run_of(subject.answer(0, range(3))).sources == [RowSource(0, 0, 3)]


# ---- cancellation


def test_cancelled_while_its_experts_compute() -> None:
    """The request's blocks are free at once. The run is forgotten when the last late part has arrived."""
    subject = worker(top_k=1)
    subject.arrive(request(0, [1, 2]))
    subject.step()
    assert subject.cancel(0, 99) == [Release([0])]
    assert subject.scheduler.stats().blocks.num_used == 0
    assert subject.answer(0, [1]) == []
    assert subject.answer(0, [0]) == [Forget([0])]
    subject.check_everybody()


def test_cancelled_when_ready() -> None:
    """Run 0 has all of its answers, but its request was cancelled."""
    subject = worker(top_k=1)
    subject.arrive(request(0, [1, 2]))
    subject.arrive(request(1, [3]))
    subject.step()
    assert subject.answer(0, [0, 1]) == []
    assert subject.cancel(0) == [Forget([0]), Release([0])]
    subject.drain()
    subject.check_everybody()


@pytest.mark.parametrize("ending", ["step", "fail"])
def test_cancelled_in_the_run_under_way(ending: str) -> None:
    subject = worker(top_k=1)
    subject.arrive(request(0, [1, 2]), request(1, [3]))
    assert subject.cancel(0) == []
    used = subject.scheduler.stats().blocks.num_used
    assert used > 0
    actions = getattr(subject, ending)()
    assert Release([0]) in actions and subject.scheduler.stats().blocks.num_used == used - 1
    subject.drain()
    subject.check_everybody()


def test_cancelled_at_the_last_place_gets_no_token() -> None:
    subject = worker(top_k=1, layers=1)
    subject.arrive(request(0, [1]), request(1, [2]))
    subject.step()
    subject.answer(0, [0, 1])
    subject.cancel(0)
    emit, release, run = subject.step()
    assert isinstance(emit, Emit) and (emit.request_ids, emit.samples) == ([1], [1])
    assert release == Release([0]) and isinstance(run, RunSegment)
    subject.drain()
    subject.check_everybody()


def test_the_same_request_twice_in_a_cancel() -> None:
    subject = worker()
    subject.arrive(request(0, [1]))
    subject.step()
    assert subject.cancel(0, 0) == [Release([0])]
    subject.drain()
    subject.check_everybody()


# ---- failures


def test_a_failed_run_is_forgotten_and_its_rows_begin_again() -> None:
    subject = worker(top_k=1)
    subject.arrive(request(0, [1, 2], max_tokens=1))
    subject.step()
    subject.answer(0, [0, 1])
    subject.compute()
    forget, run = subject.fail()
    assert forget == Forget([1]) and isinstance(run, RunSegment)
    assert (run.plan.step, run.segment, run.plan.batch.positions.tolist()) == (2, 0, [0, 1])
    assert subject.answer(1, [0, 1]) == []  # late: nobody waits for these
    subject.drain()
    subject.check_everybody()


def test_a_run_that_breaks_off_after_its_last_part_came() -> None:
    """The run's rows are already ready at the next segment. They must not run there."""
    subject = worker(top_k=1)
    subject.arrive(request(0, [1]))
    subject.compute()
    assert subject.answer(0, [0]) == []
    forget, run = subject.fail()
    assert forget == Forget([0]) and isinstance(run, RunSegment) and run.segment == 0
    subject.drain()
    subject.check_everybody()


def test_another_run_than_the_one_under_way_is_refused_and_changes_nothing() -> None:
    subject = worker()
    none = np.zeros(0, dtype=np.int64)
    for event in (SegmentDone(0), StepDone(0, none), StepFailed(0)):
        with pytest.raises(ValueError, match="run 0 is not in flight"):
            subject.scheduler.handle(event, 0.0)
    subject.arrive(request(0, [1]))
    with pytest.raises(ValueError, match="run 5 is not in flight"):
        subject.scheduler.handle(SegmentDone(5), 0.0)
    subject.drain()
    subject.check_everybody()


def test_events_of_other_schedulers_are_refused() -> None:
    with pytest.raises(ValueError, match="not an event of this scheduler"):
        worker().scheduler.handle("what?", 0.0)  # type: ignore[arg-type]


# ---- memory


def test_preempted_requests_get_the_same_tokens() -> None:
    subject = worker(num_blocks=6, size=2, rows=8, length=12)
    subject.arrive(*(request(i, [i % 5, 1, 2], max_tokens=9) for i in range(4)))
    subject.drain()
    subject.check_everybody()
    assert subject.preempted > 0


def test_a_request_stalls_while_only_younger_ones_under_way_could_make_room() -> None:
    """5 blocks of 2 tokens. Request 1 runs ahead and takes the last block. Request 0 needs one while 1 waits
    for its experts."""
    subject = worker(num_blocks=5, size=2, seats=2, length=8, layers=1, top_k=1)
    subject.arrive(request(0, [0] * 3, max_tokens=5), request(1, [1] * 3, max_tokens=5))
    subject.step()

    def through_all_places(call: int, pairs: list[int]) -> list[Action]:
        subject.answer(call, pairs)
        subject.step()
        return subject.step() if subject.action is not None else subject.log[-1][2]

    through_all_places(0, [3, 4, 5])
    through_all_places(2, [0])
    assert len(subject.clients[1].generated) == 2 and subject.out[4] == [0]
    through_all_places(0, [0, 1, 2])
    assert RunSegment not in kinds(through_all_places(6, [0])), "0 has five tokens and two blocks"
    assert subject.scheduler.stats().running == 2 and subject.preempted == 0

    subject.answer(4, [0])
    emit, release, run = subject.step()
    assert isinstance(emit, Emit) and release == Release([1])
    assert isinstance(run, RunSegment) and run.plan.request_ids.tolist() == [0]
    subject.drain()
    subject.check_everybody()


def test_a_common_prefix_is_computed_once() -> None:
    """The prefix can be shared once the last segment has written it."""
    subject = worker(rows=32)
    prompt = [1, 2, 3, 4] * 4
    subject.arrive(request(0, [*prompt, 0], max_tokens=1))
    subject.drain()
    subject.arrive(*(request(i, [*prompt, i], max_tokens=1) for i in range(1, 4)))
    subject.drain()
    subject.check_everybody()
    assert (subject.reused, subject.scheduler.stats().prefill_tokens) == (3 * 16, 17 + 3 * 1)


def test_a_prefix_under_way_is_not_shared() -> None:
    """The prefix's first layers are written, but not the others."""
    subject = worker(seats=2, rows=8)
    subject.arrive(request(0, [1, 2, 3, 4, 5], max_tokens=1))
    subject.step()
    subject.arrive(request(1, [1, 2, 3, 4, 6], max_tokens=1))
    subject.drain()
    subject.check_everybody()
    assert subject.reused == 0


def test_prompt_logprobs_are_reported_once_in_spite_of_preemption() -> None:
    subject = FakeLayered(BatchLimits(2, 4, 16), 8, 2, policy=Defrag())
    subject.arrive(request(0, [1, 2], max_tokens=14), request(1, [3] * 11, 2, prompt_logprobs=0))
    subject.drain()
    subject.check_everybody()
    assert subject.clients[1].epoch > 0
    assert subject.clients[1].scored == list(range(10))


def test_tokens_from_a_worker_that_died_are_not_sampled_again() -> None:
    subject = worker()
    asked = request(0, [1, 2, 3], max_tokens=6)
    (admit, _) = subject.arrive(asked, known={0: 4})
    assert isinstance(admit, Admit) and admit.generated_ids == [alone(asked, 64)[0][:4]]
    subject.drain()
    subject.check_everybody()
    assert sum(len(a.tokens) for _, _, actions in subject.log for a in actions if isinstance(a, Emit)) == 2


# ---- schedules


def traffic() -> list[Request]:
    return [
        request(
            i,
            [i % 3] * (1 + 3 * i % 11),
            max_tokens=1 + i % 7,
            stop=i % 4 == 0,
            prompt_logprobs=(None, 0)[i % 2],
        )
        for i in range(12)
    ]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_tokens_of_one_process(policy: str, top_k: int, layers: int) -> None:
    """Both schedulers give the tokens of one process, each in a pool that is too small for all requests."""
    limits = BatchLimits(4, 7, 20, 3)
    one, other = (
        FakeExecutor(limits, 10, 2),
        FakeLayered(limits, 10, 2, policy=make_policy(policy), layers=layers, top_k=top_k),
    )
    for subject in (one, other):
        subject.arrive(*traffic())
        subject.drain()
        subject.check_everybody()
        assert subject.preempted > 0
    for number, client in one.clients.items():
        assert other.clients[number].generated == client.generated
        assert other.clients[number].finish is client.finish


def test_experts_may_answer_in_every_order() -> None:
    for order in itertools.permutations(range(4)):
        subject = worker(layers=1)
        subject.arrive(request(0, [1], max_tokens=1), request(1, [2], max_tokens=1))
        subject.step()
        for pair in order:
            subject.answer(0, [pair, pair])
        subject.drain()
        subject.check_everybody()


class Spy(MostTokensFirst):
    """A policy that records its arguments."""

    seen: list[tuple[list[int], list[float]]] = []  # noqa: RUF012

    def choose(self, tokens: IntArray, wait_seconds: np.ndarray) -> tuple[int, int] | None:
        self.seen.append((tokens[:, 0].tolist(), wait_seconds[:, 0].tolist()))
        return super().choose(tokens, wait_seconds)


def test_the_policy_sees_rows_and_how_long_the_oldest_waits() -> None:
    """Run 0 takes request 0's three rows. Request 1 arrives at 1.0 and its two rows are ready at 1.5."""
    spy = Spy()
    spy.seen.clear()
    subject = FakeLayered(BatchLimits(4, 16, 64), 32, 4, policy=spy, top_k=1)
    subject.arrive(request(0, [1, 2, 3]))
    subject.arrive(request(1, [3, 4]))
    subject.compute()
    subject.answer(0, [0, 1, 2])
    subject.step()
    assert spy.seen == [([2, 3, 0], [0.0, 0.5, 0.0])], "it is not asked while only one segment has rows"
    assert subject.action is not None and subject.action.segment == 1


def test_rows_wait_for_others_while_answers_are_out() -> None:
    """Four units are in flight, and the parts of one have arrived. If a run needs two rows, it waits for
    another unit."""
    for rows, goes in ((0, True), (1, True), (2, False)):
        subject = FakeLayered(
            BatchLimits(4, 16, 64), 32, 4, policy=Defrag(), top_k=1, gather=RunThreshold(rows)
        )
        subject.arrive(*(request(number, [number]) for number in range(4)))
        subject.step()
        subject.answer(0, [2])
        assert (subject.action is not None) == goes
        if not goes:
            subject.answer(0, [0])
            assert subject.action is not None and subject.action.plan.batch.num_rows == 2
        subject.drain()
        subject.check_everybody()


def test_parts_that_come_twice_complete_nothing() -> None:
    """Four parts have come, but two of them are the same: one is still missing."""
    subject = FakeLayered(BatchLimits(4, 16, 64), 32, 4, policy=Defrag(), top_k=2, gather=RunThreshold(99))
    subject.arrive(request(0, [1]), request(1, [2]))
    subject.step()
    subject.answer(0, [0])
    subject.answer(0, [0, 1, 2])
    assert subject.action is None
    subject.answer(0, [3])
    assert requests_under_way(subject) == [0, 1]
    subject.drain()
    subject.check_everybody()


def test_nobody_waits_for_a_cancelled_request() -> None:
    subject = FakeLayered(BatchLimits(4, 16, 64), 32, 4, policy=Defrag(), top_k=1, gather=RunThreshold(99))
    subject.arrive(request(0, [1]), request(1, [2]))
    subject.step()
    subject.answer(0, [0])
    assert subject.action is None
    subject.cancel(1)
    assert subject.action is not None and subject.action.plan.request_ids.tolist() == [0]


def test_enough_is_worth_a_run_or_all_decodes() -> None:
    for rule, decodes, wanted in (
        (RunThreshold(64), 80, [True, True, False]),
        (RunThreshold(999), 512, [True, False, False]),
        (RunThreshold(), 580, [True, True, True]),
    ):
        assert [rule.runs_alone(ready, Load(decodes, decodes)) for ready in (512, 64, 4)] == wanted


def test_a_part_runs_alone_once_the_worker_is_idle_for_long_enough() -> None:
    """Of four rows the experts answer one after 0.5 s, and the others 40 s later."""
    flat = Curve(((8.0, 0.5), (16.0, 1.0)))
    rule = Decisions(DeviceCurves("x", flat, flat), 4, 1)
    subject = FakeLayered(BatchLimits(4, 16, 64), 32, 4, policy=Defrag(), layers=40, top_k=1, gather=rule)
    subject.arrive(*(request(number, [number], max_tokens=2) for number in range(4)))
    gone: list[bool] = []
    while len(gone) < 10:
        subject.step()
        run, *more = subject.open_runs()
        assert not more
        subject.answer(run, [0])
        gone.append(subject.action is not None)
        if gone[-1]:
            break
        subject.now += 40.0
        subject.answer(run, [1, 2, 3])
    assert 1 < len(gone) < 10
    assert requests_under_way(subject) == [0]
    subject.drain()
    subject.check_everybody()


def test_where_no_row_goes_on_alone_a_new_request_joins_the_next_step() -> None:
    """As in lockstep: also the chunk of its prompt runs with the decodes of others."""
    dear = Curve(((0.0, 1.0), (1.0, 1.0)))
    rule = Decisions(DeviceCurves("x", dear, dear), 4, 1)
    subject = FakeLayered(BatchLimits(4, 16, 64), 32, 4, policy=FirstLayerFirst(), top_k=1, gather=rule)
    subject.arrive(request(0, [1], max_tokens=9), request(1, [2], max_tokens=9))
    subject.step()
    subject.arrive(request(2, [3] * 9))
    assert subject.action is None, "it does not begin while others are with the experts"
    subject.answer(0, [0])
    assert subject.action is None, "one decode waits for the other"
    while subject.scheduler.stats().decode_tokens + subject.scheduler.stats().prefill_tokens < 2:
        for run in subject.open_runs():
            subject.answer(run, [0, 1])
        subject.step()
    assert requests_under_way(subject) == [0, 1, 2]
    subject.drain()
    subject.check_everybody()
    assert subject.scheduler.stats().partial_runs == 0


def test_decodes_and_the_chunk_of_a_prompt_do_not_wait_for_each_other() -> None:
    subject = FakeLayered(
        BatchLimits(4, 16, 64), 32, 4, policy=FirstLayerFirst(), top_k=1, gather=RunThreshold(99)
    )
    subject.arrive(request(0, [1], max_tokens=9), request(1, [2], max_tokens=9))
    subject.step()
    subject.arrive(request(2, [3] * 9))
    assert subject.action is not None and subject.action.plan.request_ids.tolist() == [2]
    subject.step()
    subject.answer(0, [0])
    assert subject.action is None, "one decode waits for the other"
    subject.answer(0, [1])
    assert requests_under_way(subject) == [0, 1], "and for no chunk"
    subject.step()
    subject.answer(1, range(9))
    assert requests_under_way(subject) == [2]
    subject.drain()
    subject.check_everybody()


def test_rows_that_go_on_together_keep_their_batch() -> None:
    """Rows that go on together keep the same batch object. Rows that join others, or leave some behind, get
    another one."""
    subject = worker(layers=3, top_k=1)
    subject.arrive(request(0, [1]), request(1, [2]), request(2, [3]))
    first = subject.action
    assert first is not None
    subject.step()
    subject.answer(0, [2, 0, 1])
    second = subject.action
    assert second is not None and second.plan.batch is first.plan.batch and second.plan.step == 1
    subject.step()
    subject.answer(1, [2])
    third = subject.action
    assert third is not None and third.plan.request_ids.tolist() == [2]
    assert third.plan.batch is not first.plan.batch
    subject.drain()
    subject.check_everybody()


def test_rows_stand_in_the_order_of_the_run_that_they_come_from() -> None:
    """The order of the rows does not depend on the order in which experts answered."""
    subject = FakeLayered(BatchLimits(4, 16, 64), 32, 4, policy=Defrag(), top_k=1, gather=RunThreshold(99))
    subject.arrive(*(request(number, [number]) for number in range(3)))
    subject.step()
    for pair in (2, 0, 1):
        subject.answer(0, [pair])
    assert subject.action is not None and subject.action.sources == [RowSource(0, 0, 3)]


def test_too_few_rows_hold_up_no_others() -> None:
    """A run needs three rows. flfs would take the single row at the first segment. That is too few, so the
    three rows of a later segment run."""
    subject = FakeLayered(
        BatchLimits(8, 16, 64), 32, 4, policy=FirstLayerFirst(), top_k=1, gather=RunThreshold(3)
    )
    subject.arrive(*(request(number, [number]) for number in range(6)))
    subject.step()
    subject.answer(0, [1, 2, 3])
    subject.answer(0, [0])
    subject.step()
    assert subject.action is None
    subject.answer(1, [0, 1, 2])
    assert subject.action is not None and subject.action.plan.request_ids.tolist() == [1, 2, 3]
    subject.drain()
    subject.check_everybody()


def test_replay_gives_the_same_actions() -> None:
    subject = worker(num_blocks=8, size=2, seats=3, rows=6, length=16)
    subject.arrive(*(request(i, [i % 2] * (i + 1), max_tokens=7) for i in range(6)))
    subject.step()
    subject.cancel(1, 5)
    subject.drain()
    assert replays(AsyncScheduler(subject.limits, KVBlocks(8, 2), Defrag(), 2, 2), subject.log)
    assert not replays(AsyncScheduler(subject.limits, KVBlocks(9, 2), Defrag(), 2, 2), subject.log)
    assert RunStep not in {kind for _, _, actions in subject.log for kind in kinds(actions)}
