"""Which rows the next step computes: continuous batching, chunked prefill, preemption.

A step is filled in this order, until seats, rows or blocks run out:

 1. every running sequence that lacks one row (decode): nobody's next token waits for another's prompt;
 2. the rest of the running sequences, as large a chunk as the step has rows for;
 3. waiting requests, in order of arrival, none overtaking another.

Invariant: every running request arrived before every waiting one. Admission takes the first of the
queue, preemption the last that runs, so it holds for ever, and the two queues need no sorting.

Blocks: a request is admitted when *all* its known tokens find a block, so only decodes ask for more. If
there is none, the running request that arrived last is preempted: it loses its blocks (the full ones
stay cached while nobody needs them), keeps its tokens, and computes them again when it comes back.
The oldest request is preempted by nobody and the pool holds a longest request, so it ends; then the
next is the oldest. Hence no live-lock: every request ends.

Thrashing: nothing is admitted in a step that preempted, and an admission leaves one block for
each running request that may still grow, a block's worth of tokens before anybody has to leave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from moesaic.core.errors import ConfigError, RequestError
from moesaic.core.request import Request
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.sequence import Sequence, Stage

Chunk = tuple[Sequence, int]
"""A sequence and how many rows of it, from num_computed on, a step computes."""


@dataclass(frozen=True)
class BatchLimits:
    """How large a step may get."""

    max_num_seqs: int
    """Seats: most requests that run at once."""
    max_num_batched_tokens: int
    """Most rows of a step; at least max_num_seqs, so that every decode finds a row."""
    max_model_len: int
    """Most tokens, prompt and answer together, of one request."""
    max_prefill_chunk: int | None = None
    """Most rows of one sequence in a step. None: as many as the step has."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError.field(name, value, "at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError.field(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs, {self.max_num_seqs}",
            )


@dataclass(frozen=True)
class ScheduledStep:
    """What one step does. Nothing of it when `chunks` is empty."""

    chunks: list[Chunk]
    """Decodes first."""
    admitted: list[Sequence]
    """Left the queue; num_computed is what the prefix cache held of them."""
    preempted: list[Sequence]
    """Went back to the queue, last arrival first. Either this or `admitted` is empty."""


class ContinuousBatching:
    """The two queues. It owns every sequence's stage; blocks follow the stage."""

    def __init__(self, limits: BatchLimits, blocks: KVBlocks) -> None:
        if blocks.num_blocks * blocks.block_size < limits.max_model_len:
            raise ConfigError.field(
                "max_model_len",
                limits.max_model_len,
                f"at most the KV cache's {blocks.num_blocks * blocks.block_size} tokens",
            )
        self.limits = limits
        self.blocks = blocks
        self.running: dict[int, Sequence] = {}
        """In order of arrival."""
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        """In order of arrival, all later than `running`."""
        self.preemptions = 0

    def add(self, request: Request, now: float, generated: Iterable[int] = ()) -> None:
        """Queue a request. It must be later than all before; the engine checked its length.

        generated: what it got from a worker that died: computed again, like a preempted request's.
        """
        if request.request_id in self.running or request.request_id in self.waiting:
            raise ValueError(f"request {request.request_id} arrived twice")
        if not 0 < len(request.prompt_token_ids) < self.limits.max_model_len:
            raise RequestError(
                f"prompt: got {len(request.prompt_token_ids)} tokens; "
                f"allowed: 1 to {self.limits.max_model_len - 1}",
                "prompt",
            )
        sequence = Sequence(request, self.limits.max_model_len, now)
        for token in generated:
            sequence.append(token)
        self.waiting[request.request_id] = sequence

    def add_all(self, requests: list[Request], generated: list[list[int]], now: float) -> None:
        """In order of arrival; generated: see Arrived."""
        for index, request in enumerate(requests):
            self.add(request, now, generated[index] if index < len(generated) else ())

    def remove(self, request_id: int) -> Sequence | None:
        """Take a request out of the queues for ever. Its blocks stay held: see `free`."""
        sequence = self.running.pop(request_id, None) or self.waiting.pop(request_id, None)
        if sequence is not None:
            sequence.stage = Stage.FINISHED
        return sequence

    @property
    def may_admit(self) -> bool:
        """Somebody waits and there is a seat; whether there are blocks is for `schedule` to see."""
        return bool(self.waiting) and len(self.running) < self.limits.max_num_seqs

    def free(self, sequence: Sequence) -> None:
        """Give back the blocks of a removed request that ran. No step may use them any more."""
        self.blocks.free(sequence.request_id)

    def schedule(
        self, now: float, busy: Collection[int] = frozenset(), most_rows: int | None = None
    ) -> ScheduledStep:
        """The next rows. Counters are up to date of all running requests but the `busy` ones.

        busy: requests with rows under way: they get no others and keep their blocks. most_rows: in place of
        max_num_batched_tokens, when rows under way leave room for fewer.
        """
        rows = self.limits.max_num_batched_tokens if most_rows is None else most_rows
        preempted, stalled = self._make_room(now, busy)
        running = [s for s in self.running.values() if s.request_id not in busy and s not in stalled]
        chunks = [(sequence, 1) for sequence in running if sequence.num_pending == 1][: max(0, rows)]
        rows = max(0, rows - len(chunks))
        for sequence in running:
            if rows and sequence.num_pending > 1:
                chunks.append((sequence, self._chunk(sequence, rows)))
                rows -= chunks[-1][1]
        admitted: list[Sequence] = []
        if not preempted and rows and self.waiting:
            admitted = self._admit(chunks, rows)
        return ScheduledStep(chunks, admitted, preempted)

    def _chunk(self, sequence: Sequence, rows: int) -> int:
        """How many rows of the sequence a step with room for `rows` computes."""
        most = self.limits.max_prefill_chunk
        most = rows if most is None else min(rows, most)
        return min(sequence.chunk_end - sequence.num_computed, most)

    def _make_room(self, now: float, busy: Collection[int]) -> tuple[list[Sequence], list[Sequence]]:
        """A block for each running sequence's next token, oldest first.

        Returns who was preempted for it, and who gets no rows now: nobody can be preempted for those but
        themselves, while younger ones are busy; one of these will be there to be preempted next time.
        """
        preempted: list[Sequence] = []
        stalled: list[Sequence] = []
        idle = [sequence for sequence in self.running.values() if sequence.request_id not in busy]
        for sequence in list(idle):
            while sequence.stage is Stage.RUNNING:
                if self.blocks.extend(sequence.request_id, sequence.num_tokens):
                    break
                if idle[-1] is sequence and next(reversed(self.running)) in busy:
                    stalled.append(sequence)
                    break
                preempted.append(self._preempt(idle.pop(), now))
        return preempted, stalled

    def _preempt(self, sequence: Sequence, now: float) -> Sequence:
        request_id = sequence.request_id
        del self.running[request_id]
        self.blocks.free(request_id)
        sequence.preempt(now)
        self.waiting[request_id] = sequence
        self.waiting.move_to_end(request_id, last=False)
        self.preemptions += 1
        return sequence

    def _admit(self, chunks: list[Chunk], rows: int) -> list[Sequence]:
        """Seat requests from the queue and add their first chunks."""
        admitted: list[Sequence] = []
        if len(self.running) == self.limits.max_num_seqs:
            return admitted
        spare = sum(map(self._may_grow, self.running.values()))
        while self.waiting and rows and len(self.running) < self.limits.max_num_seqs:
            request_id, sequence = next(iter(self.waiting.items()))
            tokens = sequence.tokens.array
            cached = self.blocks.allocate(request_id, tokens, sequence.reusable, spare)
            if cached is None:
                break
            self.running[request_id] = self.waiting.pop(request_id)
            sequence.admit(cached)
            admitted.append(sequence)
            chunks.append((sequence, self._chunk(sequence, rows)))
            rows -= chunks[-1][1]
            spare += self._may_grow(sequence)
        return admitted

    def _may_grow(self, sequence: Sequence) -> bool:
        """True when it may need another block. Its last token's KV is never written."""
        return sequence.max_len - 1 > self.blocks.capacity(sequence.request_id)
