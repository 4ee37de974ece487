"""A worker without a model: it carries out a scheduler's actions on a simulated KV cache and checks each.

The cache holds, for each position, a hash of the sequence up to there. So a block that was shared,
evicted or overwritten wrongly is seen at once: reading through the block table gives a wrong hash. The
"model" samples a function of that hash, so what a request must get is known without batching at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from moesaic.core.request import FinishReason, Request
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks, block_contents
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    Divide,
    Emit,
    Event,
    KeepPrefixes,
    PrefixRead,
    ReadPrefix,
    Release,
    RequestsArrived,
    RequestsCancelled,
    RunStep,
    StepDone,
    StepFailed,
    StepPlan,
)
from moesaic.policy.scheduling.schedulers.lockstep import Divider, LockstepScheduler
from moesaic.policy.scheduling.speculation import Speculation
from moesaic.policy.scheduling.stored_prefixes import PrefixChanges, chain_digests
from tests.support.toy_model import EMPTY, alone, hashes, mix, sample


def checked(client: Client, drafted: list[int]) -> list[int]:
    """The tokens that a request gets behind those it has: the slow, obvious way, one by one."""
    tokens: list[int] = []
    for proposed in [*drafted, None]:
        early = len(client.generated) + len(tokens) < client.request.params.min_tokens
        masked = client.request.stop_ids if early else frozenset()
        tokens.append(sample(hashes(client.tokens + tokens)[-1], masked))
        if tokens[-1] != proposed:
            break
    return tokens


@dataclass
class Client:
    """The outputs that one request has got, and the number of its computed rows."""

    request: Request
    generated: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cancelled: bool = False
    epoch: int = -1
    computed: int = 0
    scored: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.request.prompt_token_ids + self.generated


class FakeExecutor:
    """A scheduler, its simulated cache, and all requests."""

    def __init__(
        self,
        limits: BatchLimits,
        num_blocks: int,
        block_size: int,
        prefix_reuse: bool = True,
        speculation: Speculation | None = None,
        stored_root: bytes | None = None,
        divider: Divider | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = KVBlocks(num_blocks, block_size, prefix_reuse, stored_root)
        self.stored_root = stored_root
        self.disk: dict[bytes, list[int]] = {}
        """Digest -> the hashes of a block."""
        self.unwritten: dict[int, bytes] = {}
        """Block -> digest, until it is written to the disk."""
        self.digests: dict[int, list[bytes]] = {}
        """Request -> digests of its first blocks, which were on the disk when it arrived."""
        self.reading: list[ReadPrefix] = []
        self.scheduler = LockstepScheduler(limits, self.blocks, speculation=speculation, divider=divider)
        self.kv = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.clients: dict[int, Client] = {}
        self.held: set[int] = set()
        self.under_way: StepPlan | None = None
        self.last: StepPlan | None = None
        self.owners: list[int] = []
        """The sequence in `last` of each token that it gave."""
        self.steps = 0
        self.now = 0.0
        self.preempted = 0
        self.divisions = 0
        self.reused = 0
        self.log: list[tuple[Event, float, list[Action]]] = []

    # ---- driving

    def arrive(self, *requests: Request) -> list[Action]:
        stored = {}
        for asked in requests:
            self.clients[asked.request_id] = Client(asked)
            if digests := self._find(asked):
                self.digests[asked.request_id] = digests
                stored[asked.request_id] = len(digests) * self.blocks.block_size
        return self.tell(RequestsArrived(list(requests), disk_tokens=stored))

    def cancel(self, *request_ids: int) -> list[Action]:
        for request_id in request_ids:
            if request_id in self.clients and self.clients[request_id].finish is None:
                self.clients[request_id].cancelled = True
        return self.tell(RequestsCancelled(list(request_ids)))

    def step(self) -> list[Action]:
        """Runs the current step and reports it."""
        plan = self.under_way
        assert plan is not None
        tokens = self._run(plan)
        self.under_way, self.last = None, plan
        return self.tell(self.done(plan, tokens))

    def done(self, plan: StepPlan, tokens: list[list[int]]) -> StepDone:
        """The event for these tokens of each sampled request. Without drafts there are no counts."""
        self.owners = [i for i, one in zip(plan.sampled_sequences.tolist(), tokens, strict=True) for _ in one]
        flat = np.array([token for one in tokens for token in one], dtype=np.int64)
        counts = (
            np.array([len(one) for one in tokens], dtype=np.int64) if len(plan.num_draft_tokens) else None
        )
        return StepDone(plan.step, flat, counts)

    def fail(self) -> list[Action]:
        """Breaks off the current step after some of its rows were written. The next step gets its number."""
        plan = self.under_way
        assert plan is not None
        batch = plan.batch
        for table, stop in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
            block, offset = divmod(stop - 1, self.kv.shape[1])
            self.kv[table[block], offset] = -1
        for i in plan.scored_sequences.tolist():  # will be scored again
            scored = self.clients[int(plan.request_ids[i])].scored
            del scored[scored.index(batch.positions[batch.query_starts[i]]) :]
        self.under_way = None
        return self.tell(StepFailed(plan.step))

    def write(self, count: int) -> None:
        """Writes so many blocks to the disk."""
        for block in list(self.unwritten)[:count]:
            self.disk[self.unwritten.pop(block)] = self.kv[block].tolist()

    def read(self, damaged: int | None = None) -> list[Action]:
        """Ends the first read. damaged: the block of it at which it ends; None: all are whole."""
        action = self.reading.pop(0)
        digests = self.digests[action.request_id][action.first_block :]
        assert len(action.blocks) == len(set(action.blocks.tolist())) > 0
        count = len(action.blocks) if damaged is None else min(damaged, len(action.blocks))
        for block, digest in zip(action.blocks[:count], digests, strict=False):
            self.kv[block] = self.disk[digest]
        return self.tell(PrefixRead(action.request_id, count))

    def _find(self, asked: Request) -> list[bytes]:
        if self.stored_root is None:
            return []
        tokens, size = np.array(asked.prompt_token_ids, dtype=np.int64), self.blocks.block_size
        contents = block_contents(tokens, size, 0, (len(tokens) - 1) // size, b"")
        return [*takewhile(self.disk.__contains__, chain_digests(self.stored_root, contents))]

    def _keep(self, changes: PrefixChanges) -> None:
        for path in changes.paths:
            for block, digest in zip(path.blocks, path.digests, strict=True):
                if digest not in self.disk and digest not in self.unwritten.values():
                    self.unwritten[block] = digest
        for block in changes.evicted_blocks:
            if digest := self.unwritten.pop(block, None):
                self.disk[digest] = self.kv[block].tolist()

    def drain(self) -> None:
        """Steps until idle. Every request must end in a bounded number of steps."""
        work = sum(len(c.request.prompt_token_ids) + self.limits.max_model_len for c in self.clients.values())
        bound = 20 + work * len(self.clients)
        while self.under_way is not None or self.reading:
            if self.under_way is None:
                self.read()
            else:
                self.step()
            bound -= 1
            assert bound > 0, "no progress"

    def tell(self, event: Event) -> list[Action]:
        self.now += 0.5
        actions = self.scheduler.handle(event, self.now)
        self.log.append((event, self.now, actions))
        order = [
            (KeepPrefixes, Emit, Release, Admit, ReadPrefix, RunStep).index(type(action))
            for action in actions
            if not isinstance(action, Divide)
        ]
        assert order == sorted(order)
        for action in actions:
            self._carry_out(action)
        return actions

    # ---- carrying out

    def _carry_out(self, action: Action) -> None:
        match action:
            case Emit():
                self._emit(action)
            case Release(request_ids):
                self._release(request_ids)
            case Admit():
                self._admit(action)
            case KeepPrefixes(changes):
                self._keep(changes)
            case ReadPrefix():
                self.reading.append(action)
            case Divide(division):
                assert self.under_way is None and self.blocks.num_blocks == division.num_blocks
                assert not any(block >= division.num_blocks for block in self.unwritten)
                self.kv[division.num_blocks :] = -1
                self.divisions += 1
            case RunStep(plan):
                assert self.under_way is None
                assert plan.step == self.steps
                self.steps += 1
                self.under_way = plan
                self._check_plan(plan)

    def _emit(self, emit: Emit) -> None:
        assert self.last is not None
        assert len(emit.request_ids) == len(emit.tokens)
        for request_id, token, at, finish in zip(
            emit.request_ids, emit.tokens, emit.samples, emit.finish, strict=True
        ):
            client = self.clients[request_id]
            assert not client.cancelled and client.finish is None
            assert self.last.request_ids[self.owners[at]] == request_id
            assert request_id in self.held
            client.generated.append(token)
            client.finish = finish

    def _release(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            assert self.under_way is None or request_id not in self.under_way.request_ids
            self.held.remove(request_id)
            client = self.clients[request_id]
            self.preempted += client.finish is None and not client.cancelled

    def _admit(self, admit: Admit) -> None:
        assert len(admit.requests) == len(admit.cached_tokens) == len(admit.epochs) > 0
        for asked, generated, waited, cached, epoch in zip(
            admit.requests,
            admit.generated_ids,
            admit.queue_seconds,
            admit.cached_tokens,
            admit.epochs,
            strict=True,
        ):
            client = self.clients[asked.request_id]
            assert asked is client.request and generated == client.generated
            assert asked.request_id not in self.held and not client.cancelled
            assert epoch == client.epoch + 1 and waited >= 0.0
            assert 0 <= cached < len(client.tokens) and cached % self.blocks.block_size == 0
            client.epoch, client.computed = epoch, cached
            self.held.add(asked.request_id)
            self.reused += cached
        assert len(self.held) <= self.limits.max_num_seqs

    def _check_plan(self, plan: StepPlan) -> None:
        """Checks that every row belongs to its request, follows the row before it, and has a block of its
        own."""
        batch, limits = plan.batch, self.limits
        assert 0 < batch.num_rows <= limits.max_num_batched_tokens
        assert batch.num_rows == len(batch.positions) == batch.query_starts[-1]
        assert len(set(plan.request_ids.tolist())) == batch.num_sequences <= limits.max_num_seqs
        written: list[int] = []
        for i, request_id in enumerate(plan.request_ids.tolist()):
            client = self.clients[request_id]
            first, last = batch.query_starts[i : i + 2].tolist()
            begin, end = client.computed, client.computed + last - first
            assert request_id in self.held and plan.epochs[i] == client.epoch
            known = min(last - first, len(client.tokens) - begin)
            assert 0 < known <= (limits.max_prefill_chunk or batch.num_rows)
            assert batch.positions[first:last].tolist() == list(range(begin, end))
            drafted = max(0, end - len(client.tokens))
            assert end <= self.limits.max_model_len - (drafted > 0)
            assert batch.token_ids[first : last - drafted].tolist() == client.tokens[begin:end]
            assert batch.context_lens[i] == end
            assert (i in plan.sampled_sequences) == (end >= len(client.tokens))
            counted = dict(
                zip(plan.sampled_sequences.tolist(), plan.num_draft_tokens.tolist(), strict=False)
            ).get(i, 0)
            assert counted == drafted and not (drafted and last - first != 1 + drafted)
            owned = self.blocks.table(request_id).tolist()
            assert len(owned) == len(set(owned)) >= self.blocks.blocks_for(end)
            assert batch.block_tables[i].tolist()[: len(owned)] == owned
            assert not batch.block_tables[i, len(owned) :].any()
            size = self.blocks.block_size
            written += owned[begin // size : (end - 1) // size + 1]
        in_tables = [block for held in self.held for block in self.blocks.table(held).tolist()]
        assert all(in_tables.count(block) == 1 for block in written), "a block is written and shared"
        assert batch.logit_rows.tolist() == self._wanted_rows(plan)

    def _wanted_rows(self, plan: StepPlan) -> list[int]:
        """The logit rows by the definition in StepPlan. Checks `scored` too."""
        starts = plan.batch.query_starts.tolist()
        counts = plan.num_draft_tokens.tolist() or [0] * len(plan.sampled_sequences)
        rows = {
            starts[i + 1] - 1 - back
            for i, count in zip(plan.sampled_sequences.tolist(), counts, strict=True)
            for back in range(count + 1)
        }
        for i in plan.scored_sequences.tolist():
            client = self.clients[int(plan.request_ids[i])]
            positions = plan.batch.positions[starts[i] : starts[i + 1]].tolist()
            prompt = len(client.request.prompt_token_ids)
            assert client.request.params.prompt_logprobs is not None
            assert positions[0] < prompt - 1 and positions[-1] < prompt
            client.scored += [position for position in positions if position < prompt - 1]
            rows |= set(range(starts[i], starts[i + 1]))
        return sorted(rows)

    # ---- the "model"

    def _run(self, plan: StepPlan) -> list[list[int]]:
        """Writes the step's hashes through the block tables, and samples until a drafted token is wrong."""
        batch = plan.batch
        for i, request_id in enumerate(plan.request_ids.tolist()):
            client = self.clients[request_id]
            first, last = batch.query_starts[i : i + 2].tolist()
            self._check_cache(batch.block_tables[i], client.tokens[: client.computed])
            for row in range(first, last):
                self._write(batch.block_tables[i], int(batch.positions[row]), int(batch.token_ids[row]))
        tokens = []
        for i, request_id in enumerate(plan.request_ids.tolist()):
            client, end = self.clients[request_id], int(batch.context_lens[i])
            drafted = self.drafted(plan, i)
            client.computed = end - len(drafted)
            self._check_cache(batch.block_tables[i], client.tokens[: client.computed] + drafted)
            if i in plan.sampled_sequences:
                tokens.append(checked(client, drafted))
                client.computed += len(tokens[-1]) - 1
        return tokens

    def drafted(self, plan: StepPlan, i: int) -> list[int]:
        """The drafted tokens of sequence i of the step."""
        client, stop = self.clients[int(plan.request_ids[i])], int(plan.batch.query_starts[i + 1])
        count = max(0, int(plan.batch.context_lens[i]) - len(client.tokens))
        drafted: list[int] = plan.batch.token_ids[stop - count : stop].tolist()
        return drafted

    def _write(self, table: np.ndarray, position: int, token: int) -> None:
        size = self.blocks.block_size
        before = (
            EMPTY if position == 0 else int(self.kv[table[(position - 1) // size], (position - 1) % size])
        )
        self.kv[table[position // size], position % size] = mix(before, token)

    def _check_cache(self, table: np.ndarray, tokens: list[int]) -> int:
        """Checks that the table leads to the hashes of `tokens`. Returns the last one."""
        read = self.kv[table].reshape(-1)[: len(tokens)].tolist()
        assert read == hashes(tokens), "the KV cache holds another sequence's values"
        return read[-1] if read else EMPTY

    # ---- the end

    def check_everybody(self) -> None:
        """After `drain`, checks that each request got what it gets alone, and that nothing is held
        any more."""
        for client in self.clients.values():
            tokens, finish = alone(client.request, self.limits.max_model_len)
            if client.cancelled:
                assert client.finish is None and client.generated == tokens[: len(client.generated)]
                continue
            assert (client.generated, client.finish) == (tokens, finish)
            wanted = client.request.params.prompt_logprobs is not None
            prompt = len(client.request.prompt_token_ids)
            assert client.scored == (list(range(prompt - 1)) if wanted else [])
        stats = self.scheduler.stats()
        assert not self.held
        assert (stats.running, stats.waiting, stats.preemptions) == (0, 0, self.preempted)
        assert (
            stats.blocks.num_used == 0
            and stats.blocks.num_free + stats.blocks.num_cached == stats.blocks.num_total
        )
