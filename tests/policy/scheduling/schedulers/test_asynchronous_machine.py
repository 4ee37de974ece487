"""AsynchronousScheduler under random traffic, failures and experts in any order. Every action is checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.policy.scheduling.schedulers.test_lockstep_machine import SHAPES, speculation
from tests.policy.scheduling.test_kvblocks_machine import audit
from tests.support.fake_layerwise_executor import FakeLayered
from tests.support.plain_asynchronous import PlainAsyncScheduler
from tests.support.scheduler_replay import replays
from tests.support.toy_model import request

from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import Defrag, DefragWithHistory, QueuePolicy, make_policy
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.ready_queues import RunThreshold

POLICIES: list[Callable[[], QueuePolicy]] = [
    *(
        lambda name=name, urgency=urgency: make_policy(name, urgency)
        for name in ("defrag", "mtfs", "flfs")
        for urgency in (None, 0.0, 4.0)
    ),
    lambda: make_policy("defrag", cap=2),
    lambda: DefragWithHistory(Defrag(), 3),
]


class AsynchronousMachine(RuleBasedStateMachine):
    @initialize(
        max_len=st.integers(2, 20),
        size=st.integers(1, 4),
        extra_blocks=st.integers(0, 4),
        seats=st.integers(1, 5),
        extra_rows=st.integers(0, 12),
        chunk=st.one_of(st.none(), st.integers(1, 5)),
        reuse=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(POLICIES),
        layers=st.integers(1, 4),
        top_k=st.sampled_from([1, 2, 6, 8]),
        worth=st.sampled_from([0, 3, 99]),
        drafts=st.integers(0, 4),
        right=st.sampled_from([0.0, 0.6, 1.0]),
    )
    def start(
        self,
        max_len: int,
        size: int,
        extra_blocks: int,
        seats: int,
        extra_rows: int,
        chunk: int | None,
        reuse: bool,
        policy: Callable[[], QueuePolicy],
        layers: int,
        top_k: int,
        worth: int,
        drafts: int,
        right: float,
    ) -> None:
        self.limits = BatchLimits(seats, seats + extra_rows, max_len, chunk)
        self.pool = (-(-max_len // size) + extra_blocks, size, reuse)
        self.policy, self.model = policy, (layers, top_k, RunThreshold(worth))
        self.drafts = drafts, right
        self.executor = FakeLayered(
            self.limits,
            *self.pool,
            policy=policy(),
            layers=layers,
            top_k=top_k,
            gather=RunThreshold(worth),
            speculation=speculation(drafts, right),
        )

    @rule(shapes=st.lists(SHAPES, min_size=1, max_size=4), known=st.sampled_from([0, 0, 0, 2, 9]))
    def arrive(self, shapes: list[dict[str, Any]], known: int) -> None:
        """known: the tokens that the requests got from a worker that died."""
        arrivals = []
        for offset, shape in enumerate(shapes):
            shape = dict(shape)
            prompt = shape.pop("tokens")[: self.limits.max_model_len - 1]
            if shape["max_tokens"] is not None:
                shape["min_tokens"] = min(shape["min_tokens"], shape["max_tokens"])
            if known:
                shape["prompt_logprobs"] = None
            arrivals.append(request(len(self.executor.clients) + offset, prompt, **shape))
        self.executor.arrive(*arrivals, known={asked.request_id: known for asked in arrivals})

    @precondition(lambda self: self.executor.action is not None)
    @rule()
    def end_run(self) -> None:
        self.executor.step()

    @precondition(lambda self: self.executor.action is not None)
    @rule()
    def ask_experts(self) -> None:
        """Asks the experts. They may answer from now on, also before the run has ended."""
        self.executor.compute()

    @precondition(lambda self: self.executor.action is not None)
    @rule()
    def fail_run(self) -> None:
        self.executor.fail()

    @precondition(lambda self: self.executor.open_runs())
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Answers some pairs of some run, in any order. Some were answered before."""
        run = data.draw(st.sampled_from(self.executor.open_runs()), label="run")
        pairs = list(self.executor.out[run])
        random.Random(data.draw(st.integers(0, 2**16), label="order")).shuffle(pairs)
        count = data.draw(st.integers(1, len(pairs)), label="count")
        again = data.draw(st.lists(st.sampled_from(range(max(pairs) + 1)), max_size=2), label="again")
        self.executor.answer(run, [*again, *pairs[:count]])

    @precondition(lambda self: self.executor.out)
    @rule(data=st.data())
    def answer_twice(self, data: st.DataObject) -> None:
        """Answers pairs of a run again that has all answers. The scheduler may have forgotten it."""
        done = [run for run, pairs in self.executor.out.items() if not pairs]
        if done:
            self.executor.answer(data.draw(st.sampled_from(done), label="run"), [0, 0])

    @rule(turns=st.integers(1, 40))
    def go_on(self, turns: int) -> None:
        while turns and self.executor.turn():
            turns -= 1

    @precondition(lambda self: self.executor.clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancels requests that wait, run, wait for experts, have ended, or never existed."""
        ids = st.integers(0, len(self.executor.clients))
        self.executor.cancel(*data.draw(st.lists(ids, min_size=1, max_size=3, unique=True)))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "executor"):
            return
        audit(self.executor.blocks)
        stats = self.executor.scheduler.stats()
        assert stats.running <= self.limits.max_num_seqs
        if self.executor.action is None and not self.executor.open_runs():
            assert (stats.running, stats.waiting, stats.blocks.num_used) == (0, 0, 0)

    def teardown(self) -> None:
        if not hasattr(self, "executor"):
            return
        self.executor.drain()
        self.executor.check_everybody()
        audit(self.executor.blocks)
        twin = AsyncScheduler(
            self.limits, KVBlocks(*self.pool), self.policy(), *self.model, speculation(*self.drafts)
        )
        assert replays(twin, self.executor.log)
        plain = PlainAsyncScheduler(
            self.limits, KVBlocks(*self.pool), self.policy(), *self.model, speculation(*self.drafts)
        )
        assert replays(plain, self.executor.log), "the slow form takes the same actions"
        assert twin.stats() == self.executor.scheduler.stats()


def run_machine(examples: int, steps: int) -> None:
    quiet = settings(max_examples=examples, stateful_step_count=steps, derandomize=True, deadline=None)
    run_state_machine_as_test(AsynchronousMachine, settings=quiet)


@pytest.mark.slow
def test_random_traffic() -> None:
    run_machine(30, 30)


@pytest.mark.full
def test_random_traffic_long() -> None:
    run_machine(60, 30)
