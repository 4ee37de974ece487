"""LockstepScheduler under random arrivals, cancellations, steps and failures. Every action is checked."""

from __future__ import annotations

import random

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
from tests.policy.scheduling.test_kvblocks_machine import audit
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_replay import replays
from tests.support.toy_model import VOCABULARY, hashes, request, sample

from moesaic.core.offload import BlockNeeds, Division, ExpertReads
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.policy.scheduling.speculation import Speculation


class Wavering:
    """Divides memory at random, among the divisions that keep what is admitted."""

    def __init__(self, most_blocks: int, seed: int) -> None:
        self._most, self._rng = most_blocks, random.Random(seed)
        self.division = Division(0, most_blocks)

    def learn(self, reads: ExpertReads) -> None:
        pass

    def choose(self, now: float, needs: BlockNeeds) -> Division:
        admitted = needs.running_blocks if needs.running else sum(needs.waiting[:1])
        least = min(self._most, max(1, admitted, needs.used_end))
        num_blocks = self._rng.choice((self._rng.randint(least, self._most), least, self.division.num_blocks))
        self.division = Division(self._most - num_blocks, max(least, num_blocks))
        return self.division


def wavering(pool: tuple[int, int, bool], seed: int | None) -> Wavering | None:
    return None if seed is None else Wavering(pool[0], seed)


class Knowing:
    """A drafter that knows the toy model, and errs with a probability. It knows no min_tokens."""

    def __init__(self, right: float) -> None:
        self._right = right

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        known: list[int] = tokens.tolist()
        noise = random.Random(hash(tuple(known)))
        for _ in range(max_tokens):
            known.append(sample(hashes(known)[-1], frozenset()))
        behind = known[len(known) - max_tokens :]
        return [token if noise.random() < self._right else (token + 1) % VOCABULARY for token in behind]


def speculation(most: int, right: float) -> Speculation:
    return Speculation(Knowing(right), most)


SHAPES = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(0, 1), min_size=1, max_size=14),
        "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
        "stop": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "prompt_logprobs": st.sampled_from([None, None, 0, 2]),
    }
)


class LockstepMachine(RuleBasedStateMachine):
    @initialize(
        max_len=st.integers(2, 20),
        size=st.integers(1, 4),
        extra_blocks=st.integers(0, 4),
        seats=st.integers(1, 5),
        extra_rows=st.integers(0, 12),
        chunk=st.one_of(st.none(), st.integers(1, 5)),
        reuse=st.sampled_from([True, True, True, False]),
        drafts=st.integers(0, 4),
        right=st.sampled_from([0.0, 0.6, 1.0]),
        stored_root=st.sampled_from([None, b"root"]),
        division_seed=st.one_of(st.none(), st.integers(0, 99)),
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
        drafts: int,
        right: float,
        stored_root: bytes | None,
        division_seed: int | None,
    ) -> None:
        self.limits = BatchLimits(seats, seats + extra_rows, max_len, chunk)
        self.pool = (-(-max_len // size) + extra_blocks, size, reuse)
        self.drafts = drafts, right
        self.stored_root = stored_root
        self.division_seed = division_seed
        divider = wavering(self.pool, division_seed)
        self.executor = FakeExecutor(
            self.limits, *self.pool, speculation(drafts, right), stored_root, divider=divider
        )

    @rule(shapes=st.lists(SHAPES, min_size=1, max_size=4))
    def arrive(self, shapes: list[dict[str, object]]) -> None:
        arrivals = []
        for offset, shape in enumerate(shapes):
            shape = dict(shape)
            prompt = shape.pop("tokens")[: self.limits.max_model_len - 1]
            if shape["max_tokens"] is not None:
                shape["min_tokens"] = min(shape["min_tokens"], shape["max_tokens"])
            arrivals.append(request(len(self.executor.clients) + offset, prompt, **shape))
        self.executor.arrive(*arrivals)

    @precondition(lambda self: self.executor.under_way is not None)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        while count and self.executor.under_way is not None:
            self.executor.step()
            count -= 1

    @precondition(lambda self: self.executor.under_way is not None)
    @rule()
    def fail(self) -> None:
        self.executor.fail()

    @precondition(lambda self: self.executor.unwritten)
    @rule(count=st.integers(1, 8))
    def write(self, count: int) -> None:
        """Blocks reach the disk, which none does before."""
        self.executor.write(count)

    @precondition(lambda self: self.executor.reading)
    @rule(damaged=st.sampled_from([None, None, 0, 1]))
    def read(self, damaged: int | None) -> None:
        """A prefix has been read, perhaps not all of it."""
        self.executor.read(damaged)

    @precondition(lambda self: self.executor.clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancels requests that wait, run, are in a step, have ended, or never existed."""
        ids = st.integers(0, len(self.executor.clients))
        self.executor.cancel(*data.draw(st.lists(ids, min_size=1, max_size=3, unique=True)))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "executor"):
            return
        audit(self.executor.blocks)
        stats = self.executor.scheduler.stats()
        assert stats.running <= self.limits.max_num_seqs
        drafts = stats.speculation
        assert 0 <= drafts.accepted_tokens <= drafts.draft_tokens
        assert sum(drafts.accepted_per_pos) == drafts.accepted_tokens
        if self.executor.under_way is None and not self.executor.reading:
            assert (stats.running, stats.waiting, stats.blocks.num_used) == (0, 0, 0)

    def teardown(self) -> None:
        if not hasattr(self, "executor"):
            return
        self.executor.drain()
        self.executor.check_everybody()
        audit(self.executor.blocks)
        twin = LockstepScheduler(
            self.limits,
            KVBlocks(*self.pool, self.stored_root),
            speculation=speculation(*self.drafts),
            divider=wavering(self.pool, self.division_seed),
        )
        assert replays(twin, self.executor.log)
        assert twin.stats() == self.executor.scheduler.stats()


def run_machine(examples: int, steps: int) -> None:
    quiet = settings(max_examples=examples, stateful_step_count=steps, derandomize=True, deadline=None)
    run_state_machine_as_test(LockstepMachine, settings=quiet)


@pytest.mark.slow
def test_random_traffic() -> None:
    run_machine(60, 30)


@pytest.mark.full
def test_random_traffic_long() -> None:
    run_machine(160, 30)
