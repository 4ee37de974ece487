"""A worker without a model for schedulers that run it segment by segment; experts answer pair by pair, in
any order.

Every segment has a simulated KV cache of its own, with the hashes of the toy model. A row carries its token
from segment to segment: what a merge makes of it is right only when all its parts are in and are its own. So
a row that goes on too early, with another's parts, through a wrong block or past a forgotten run is seen at
once, and at the last segment the token is the one that `toy_model.alone`, and LockstepScheduler, would give.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moesaic.core.request import Request
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.microqueue import QueuePolicy
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    Emit,
    Event,
    Forget,
    PartsArrived,
    Release,
    RequestsArrived,
    RowSource,
    RunSegment,
    SegmentDone,
    StepFailed,
    StepPlan,
)
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.ready_queues import GatherRule
from moesaic.policy.scheduling.speculation import Speculation
from tests.support.fake_executor import Client, FakeExecutor, checked
from tests.support.toy_model import EMPTY, VOCABULARY, alone, hashes, mix

Row = tuple[int, int, int]
"""(request id, epoch, position)"""


@dataclass
class Asked:
    """A run whose experts were asked. It is kept until it is forgotten."""

    segment: int
    rows: list[Row]
    carried: list[int]
    gated: list[int]
    """The input of the experts for each row."""
    parts: dict[int, int]
    """Pair -> its answer."""
    wanted: int
    """Number of all pairs."""


def part(gated: int, slot: int) -> int:
    """The answer of the expert at this position of the top-k."""
    return mix(gated, slot) % 1_000_003


class FakeLayered(FakeExecutor):
    """An asynchronous scheduler, its simulated caches, its experts, and all requests."""

    def __init__(
        self,
        limits: BatchLimits,
        num_blocks: int,
        block_size: int,
        prefix_reuse: bool = True,
        *,
        policy: QueuePolicy,
        layers: int = 2,
        top_k: int = 2,
        gather: GatherRule | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        super().__init__(limits, num_blocks, block_size, prefix_reuse)
        self.layers, self.top_k = layers, top_k
        self.asynchronous = AsyncScheduler(limits, self.blocks, policy, layers, top_k, gather, speculation)
        self.scheduler = self.asynchronous  # type: ignore[assignment]
        self.caches = [np.full((num_blocks, block_size), -1, dtype=np.int64) for _ in range(layers + 1)]
        self.action: RunSegment | None = None
        self.computed: list[list[int]] | None = None
        """The tokens of the current run, once its rows are written and its experts are asked."""
        self.asked: dict[int, Asked] = {}
        self.out: dict[int, list[int]] = {}
        """Run -> the pairs that its experts have not answered, also after the run failed."""
        self.forgotten: set[int] = set()
        self.failed: set[int] = set()

    # ---- driving

    def arrive(self, *requests: Request, known: dict[int, int] | None = None) -> list[Action]:
        """known: request -> how many of its tokens it got from a worker that died."""
        generated = []
        for asked in requests:
            self.clients[asked.request_id] = Client(asked)
            tokens, _ = alone(asked, self.limits.max_model_len)
            count = min((known or {}).get(asked.request_id, 0), len(tokens) - 1)
            self.clients[asked.request_id].generated = tokens[:count]
            generated.append(tokens[:count])
        return self.tell(RequestsArrived(list(requests), generated))

    def step(self) -> list[Action]:
        """Ends the current run."""
        action = self.action
        assert action is not None
        tokens = self.compute()
        self.action = self.under_way = self.computed = None
        if action.segment < self.layers:
            return self.tell(SegmentDone(action.plan.step))
        self.last = plan = action.plan
        found = dict(zip(plan.sampled_sequences.tolist(), tokens, strict=True))
        for i, request_id in enumerate(plan.request_ids.tolist()):
            client = self.clients[request_id]
            known = int(plan.batch.context_lens[i]) - len(self.drafted(plan, i))
            client.computed = known + max(0, len(found.get(i, [])) - 1)
        return self.tell(self.done(plan, tokens))

    def compute(self) -> list[list[int]]:
        """Executes the current run without reporting it. Its experts may answer before it ends."""
        assert self.action is not None
        if self.computed is None:
            self.computed = self._compute(self.action)
        return self.computed

    def fail(self) -> list[Action]:
        """Breaks off the current run after some of its rows were written. Its experts may have been asked."""
        action = self.action
        assert action is not None
        plan, cache = action.plan, self.caches[action.segment]
        for table, stop in zip(plan.batch.block_tables, plan.batch.context_lens.tolist(), strict=True):
            block, offset = divmod(stop - 1, cache.shape[1])
            cache[table[block], offset] = -1
        for i in (
            plan.scored_sequences.tolist() if action.segment == self.layers else []
        ):  # will be scored again
            scored = self.clients[int(plan.request_ids[i])].scored
            del scored[scored.index(plan.batch.positions[plan.batch.query_starts[i]]) :]
        if self.computed is None:
            self.out.pop(plan.step, None)  # it broke off before its experts were asked
        self.action = self.under_way = self.computed = None
        self.failed.add(plan.step)
        return self.tell(StepFailed(plan.step))

    def answer(self, run: int, pairs: Iterable[int]) -> list[Action]:
        """Experts answer these pairs of a run. Some may have been answered before."""
        found = list(pairs)
        self.out[run] = [pair for pair in self.out[run] if pair not in found]
        if run in self.asked:
            asked = self.asked[run]
            for pair in found:
                row, rank = divmod(pair, self.top_k)
                asked.parts[pair] = part(asked.gated[row], rank)
        return self.tell(PartsArrived([(run, np.array(found, dtype=np.int64))]))

    def open_runs(self) -> list[int]:
        """Runs with outstanding pairs whose experts were really asked, oldest first."""
        under_way = None if self.action is None or self.computed is not None else self.action.plan.step
        return [run for run, pairs in self.out.items() if pairs and run != under_way]

    def turn(self) -> bool:
        """Does the next thing that can happen. Returns False if nothing is in flight."""
        if self.action is not None:
            self.step()
            return True
        runs = self.open_runs()
        if runs:
            self.answer(runs[0], self.out[runs[0]])
        return bool(runs)

    def drain(self) -> None:
        """Runs until idle. Every request must end in a bounded number of turns."""
        work = sum(len(c.request.prompt_token_ids) + self.limits.max_model_len for c in self.clients.values())
        bound = 50 + 4 * (self.layers + 1) * work * len(self.clients) + len(self.out)
        while self.turn():
            bound -= 1
            assert bound > 0, "no progress"

    def tell(self, event: Event) -> list[Action]:
        self.now += 0.5
        actions = self.scheduler.handle(event, self.now)
        self.log.append((event, self.now, actions))
        kinds = [type(action) for action in actions]
        assert RunSegment not in kinds[:-2] and kinds.count(RunSegment) <= 1
        assert Emit not in kinds[1:]
        assert Admit not in kinds or Release not in kinds[kinds.index(Admit) :]
        for action in actions:
            self._carry_out(action)
        under_way = sum(unit.rows for unit in self.asynchronous._units.values())
        assert under_way == self.asynchronous._rows <= self.limits.max_num_batched_tokens
        return actions

    # ---- carrying out

    def _carry_out(self, action: Action) -> None:
        match action:
            case RunSegment():
                self._begin(action)
            case Forget(runs):
                for run in runs:
                    self._forget(run)
            case _:
                super()._carry_out(action)

    def _begin(self, action: RunSegment) -> None:
        assert self.under_way is None and action.plan.step == self.steps
        assert 0 <= action.segment <= self.layers
        self.steps += 1
        self.under_way, self.action = action.plan, action
        self._check_plan(action.plan)
        assert (action.segment == 0) == (not action.sources)
        rows = _rows_of(action.plan)
        if action.segment == 0:
            carried = action.plan.batch.token_ids.tolist()
        else:
            carried = [value for source in action.sources for value in self._merged(source, action.segment)]
            came = [row for s in action.sources for row in self.asked[s.run].rows[s.start : s.stop]]
            assert came == rows, "rows come from elsewhere"
        if action.segment < self.layers:
            pairs = len(rows) * self.top_k
            self.asked[action.plan.step] = Asked(action.segment, rows, carried, [], {}, pairs)
            self.out[action.plan.step] = list(range(pairs))
        self.carried = carried

    def _merged(self, source: RowSource, segment: int) -> list[int]:
        """The rows after their experts. They are garbage if a part is another row's."""
        asked = self.asked[source.run]
        assert asked.segment == segment - 1 and 0 <= source.start < source.stop <= len(asked.rows)
        merged = []
        for row in range(source.start, source.stop):
            pairs = [row * self.top_k + rank for rank in range(self.top_k)]
            assert all(pair in asked.parts for pair in pairs), "a row went on without all its parts"
            right = sum(part(asked.gated[row], rank) for rank in range(self.top_k))
            merged.append(asked.carried[row] + sum(asked.parts[pair] for pair in pairs) - right)
        return merged

    def _forget(self, run: int) -> None:
        assert run not in self.forgotten, f"run {run} is forgotten twice"
        self.forgotten.add(run)
        asked = self.asked.pop(run, None)
        if run not in self.failed:
            assert asked is not None
            assert len(asked.parts) == asked.wanted, "late parts would go into memory that is somebody else's"

    def _wanted_rows(self, plan: StepPlan) -> list[int]:
        """The logit rows. Prompt rows count as scored where logits exist, at the last segment."""
        ids = plan.request_ids[plan.scored_sequences].tolist()
        before = {request_id: len(self.clients[request_id].scored) for request_id in ids}
        rows = super()._wanted_rows(plan)
        assert self.action is not None
        if self.action.segment < self.layers:
            for request_id, count in before.items():
                del self.clients[request_id].scored[count:]
        return rows

    # ---- the "model"

    def _compute(self, action: RunSegment) -> list[list[int]]:
        """Writes the run's hashes through the block tables. Samples at the last segment."""
        plan, batch, cache = action.plan, action.plan.batch, self.caches[action.segment]
        last = action.segment == self.layers
        shift = 0 if last else VOCABULARY * (action.segment + 1)
        tokens, gated = [], []
        for i, request_id in enumerate(plan.request_ids.tolist()):
            client, table = self.clients[request_id], batch.block_tables[i]
            first, stop = batch.query_starts[i : i + 2].tolist()
            end = int(batch.context_lens[i])
            drafted = self.drafted(plan, i)
            right = hashes([token + shift for token in (client.tokens + drafted)[:end]])
            begin = end - (stop - first)
            assert _read(cache, table, begin) == right[:begin], "the KV cache holds another sequence's values"
            for row, position in zip(range(first, stop), range(begin, end), strict=True):
                before = _read(cache, table, position)[-1] if position else EMPTY
                block, offset = divmod(position, self.blocks.block_size)
                gated.append(mix(before, self.carried[row] + shift))
                cache[table[block], offset] = gated[-1]
            if last and i in plan.sampled_sequences:
                assert gated[-1] == right[-1]
                tokens.append(checked(client, drafted))
        if not last:
            self.asked[plan.step].gated = gated
        return tokens

    # ---- the end

    def check_everybody(self) -> None:
        """After `drain`, checks what FakeExecutor checks, and that nothing waits or is kept."""
        super().check_everybody()
        scheduler = self.asynchronous
        assert not self.asked and not len(scheduler._runs) and not scheduler._units
        assert not scheduler._ready.tokens.any() and not scheduler._rows
        assert set(self.out) | self.failed == self.forgotten


def _rows_of(plan: StepPlan) -> list[Row]:
    counts = np.diff(plan.batch.query_starts)
    owners, epochs = np.repeat(plan.request_ids, counts), np.repeat(plan.epochs, counts)
    return list(zip(owners.tolist(), epochs.tolist(), plan.batch.positions.tolist(), strict=True))


def _read(cache: IntArray, table: IntArray, count: int) -> list[int]:
    """The first `count` values of a sequence."""
    values: list[int] = cache[table].reshape(-1)[:count].tolist()
    return values
