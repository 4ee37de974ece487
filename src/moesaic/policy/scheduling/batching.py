"""Chooses the rows of the next step: continuous batching, chunked prefill and preemption.

A step is filled in this order, until requests, rows or KV blocks run out:

 1. Every running sequence that lacks one row (decode). So no prompt delays another request's next token.
 2. The other running sequences. Each gets as large a chunk as the step has rows for (`prompt_rows`).
 3. Waiting requests, in order of arrival. None overtakes another.

Invariant: every running request arrived before every waiting one. Admission takes the first request of the
queue and preemption the last running one, so the invariant is kept. The two queues need no sorting.

Blocks: a request is admitted only when *all* its known tokens fit into blocks. So only decodes ask for more
blocks later. If there is none, the running request that arrived last is preempted. It loses its blocks and
keeps its tokens, which are computed again when it is admitted again. Its full blocks stay cached until
another request needs the memory.

Reads: a request whose prefix is on the disk gets its blocks, and rows once they have been read. Until then it
keeps its place and its blocks, as if its rows were being computed.

No live-lock: the oldest request is never preempted, and the pool can hold a request of the maximum length. So
the oldest request ends, and then the next one is the oldest.

Thrashing: a step that preempted admits nothing. An admission also leaves one free block for each running
request that may still grow. So each can decode a block's worth of tokens before anyone is preempted.

Question: Who is preempted?
Question: Which requests and tokens are in the next step (continuous batching, chunked prefill)?
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from moesaic.core.errors import ConfigError, RequestError
from moesaic.core.offload import BlockNeeds
from moesaic.core.request import Request
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.prompt_rows import AllPromptRows, PromptRows
from moesaic.policy.scheduling.sequence import Sequence, Stage
from moesaic.policy.scheduling.speculation import Speculation

Chunk = tuple[Sequence, int]
"""A sequence, and how many of its rows, from num_computed on, a step computes."""


class Arrivals(Protocol):
    """Requests that arrived: the event Arrived."""

    @property
    def requests(self) -> list[Request]: ...

    @property
    def generated_ids(self) -> list[list[int]]: ...

    @property
    def received_tokens(self) -> dict[int, int]: ...

    @property
    def disk_tokens(self) -> dict[int, int]: ...


@dataclass(frozen=True)
class BatchLimits:
    """Maximum sizes of a step and of a request."""

    max_num_seqs: int
    """Maximum number of requests that run at once."""
    max_num_batched_tokens: int
    """Maximum rows of a step. At least max_num_seqs, so that every decode has a row."""
    max_model_len: int
    """Maximum tokens of one request, prompt and answer together."""
    max_prefill_chunk: int | None = None
    """Maximum rows of one sequence in a step. None means no limit below that of the step."""

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
    """The rows of one step and the changes to the queues.

    An empty `chunks` means that there is nothing to run.
    """

    chunks: list[Chunk]
    """The rows to compute, decodes first."""
    admitted_sequences: list[Sequence]
    """Requests that left the queue. Their num_computed counts the tokens found in the prefix cache, in memory
    or on the disk."""
    preempted_sequences: list[Sequence]
    """Requests that went back to the queue, last arrival first."""
    reading_sequences: list[tuple[Sequence, range]]
    """Requests that left the queue and whose KV is read from the disk first, and which of their blocks."""


class ContinuousBatching:
    """The queues of running and waiting requests. It owns the stage of every sequence."""

    def __init__(
        self,
        limits: BatchLimits,
        blocks: KVBlocks,
        speculation: Speculation | None = None,
        prompt_rows: PromptRows | None = None,
    ) -> None:
        """speculation: drafts tokens for steps without prompts. None: none are drafted.

        prompt_rows: limits the prompt tokens of a step. None: the step's room does.
        """
        if blocks.num_blocks * blocks.block_size < limits.max_model_len:
            raise ConfigError.field(
                "max_model_len",
                limits.max_model_len,
                f"at most the KV cache's {blocks.num_blocks * blocks.block_size} tokens",
            )
        self.limits = limits
        self.blocks = blocks
        self.speculation = speculation or Speculation()
        self.prompt_rows = prompt_rows or AllPromptRows()
        self.running: dict[int, Sequence] = {}
        """Running sequences by request id, in order of arrival."""
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        """Waiting sequences by request id, in order of arrival. All arrived later than the `running` ones."""
        self._reading: dict[int, Sequence] = {}
        """Sequences whose KV is read from the disk, by request id."""
        self._read: dict[int, Sequence] = {}
        """Sequences whose KV was read and that have no rows yet, by request id."""
        self.preemptions = 0

    def add(
        self,
        request: Request,
        now: float,
        generated_ids: Iterable[int] = (),
        received_tokens: int = 0,
        disk_tokens: int = 0,
    ) -> None:
        """Queue a request. It must have arrived later than all requests before.

        generated_ids: tokens that a worker which died had generated for it. Their KV is computed again, as
        after a preemption. received_tokens: how many of all these tokens have KV here, which another worker
        sent. disk_tokens: how many of the first ones seem to have KV on the disk.

        Raises RequestError when the prompt is empty or leaves no room for an answer, although
        the engine has checked that before.
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
        for token in generated_ids:
            sequence.append(token)
        sequence.received_tokens, sequence.disk_tokens = received_tokens, disk_tokens
        self.waiting[request.request_id] = sequence

    def add_all(self, arrivals: Arrivals, now: float) -> None:
        """Queue requests in order of arrival."""
        generated_ids = arrivals.generated_ids
        for index, request in enumerate(arrivals.requests):
            tokens = generated_ids[index] if index < len(generated_ids) else ()
            received_tokens = arrivals.received_tokens.get(request.request_id, 0)
            disk_tokens = arrivals.disk_tokens.get(request.request_id, 0)
            self.add(request, now, tokens, received_tokens, disk_tokens)

    def remove(self, request_id: int) -> Sequence | None:
        """Take a request out of the queues for good. It keeps its blocks until `free`.

        Returns None if nothing is left to do: it is unknown, or it was never admitted because its KV is read.
        """
        sequence = self.running.pop(request_id, None) or self.waiting.pop(request_id, None)
        if sequence is not None:
            sequence.stage = Stage.FINISHED
        if self._read.pop(request_id, None) is not None:
            self.blocks.free(request_id)
            return None
        return None if request_id in self._reading else sequence

    def record_prefix(self, request_id: int, num_blocks: int) -> None:
        """Record that so many blocks of a request were read from the disk. The others are computed."""
        sequence = self._reading.pop(request_id)
        if sequence.stage is Stage.FINISHED:
            self.blocks.free(request_id)
            return
        sequence.num_computed += num_blocks * self.blocks.block_size
        self.blocks.commit(request_id, sequence.tokens.array, sequence.num_computed)
        self._read[request_id] = sequence

    def record_failure(self, sequence: Sequence) -> None:
        """Record that a step with rows of this sequence has failed. Its rows are pending again."""
        sequence.draft_tokens = []
        if sequence.stage is Stage.RUNNING:
            self.blocks.trim(sequence.request_id, sequence.num_tokens)
            sequence.num_computed = self.blocks.rewind(sequence.request_id, sequence.num_computed)

    @property
    def may_admit(self) -> bool:
        """Whether a request waits and fewer than max_num_seqs run. Only `schedule` checks the blocks."""
        return bool(self.waiting) and len(self.running) < self.limits.max_num_seqs

    def count_needs(self, tokens_ahead: int) -> BlockNeeds:
        """Blocks that requests need until each of them has so many further tokens, or ends."""
        running = tuple(self._blocks_ahead(sequence, tokens_ahead) for sequence in self.running.values())
        num_held = sum(len(self.blocks.table(request_id)) for request_id in self.running)
        num_used = self.blocks.num_blocks - self.blocks.available
        seats = self.limits.max_num_seqs - len(self.running)
        waiting = itertools.islice(self.waiting.values(), seats)
        return BlockNeeds(
            running,
            num_used + sum(running) - num_held,
            tuple(self._blocks_ahead(sequence, tokens_ahead) for sequence in waiting),
            self.blocks.end_of_used,
        )

    def _blocks_ahead(self, sequence: Sequence, tokens_ahead: int) -> int:
        """Blocks of a sequence with so many further tokens, at most all that it may have."""
        num_blocks = self.blocks.blocks_for(min(sequence.num_tokens + tokens_ahead, sequence.max_len))
        if sequence.stage is not Stage.RUNNING:
            return num_blocks
        return max(num_blocks, len(self.blocks.table(sequence.request_id)))

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of a removed request that ran. No step may use them any more."""
        self.blocks.free(sequence.request_id, valid=not sequence.has_nonfinite_logits)

    def schedule(
        self,
        now: float,
        busy: Collection[int] = frozenset(),
        max_rows: int | None = None,
        max_rows_with_drafts: int | None = None,
    ) -> ScheduledStep:
        """Choose the rows of the next step.

        The counters of all running requests must be up to date, except those of `busy` requests.

        busy: requests whose rows are being computed. They get no more rows and keep their blocks.
        max_rows: replaces max_num_batched_tokens when rows that are being computed leave room for fewer.
        max_rows_with_drafts: replaces most_rows for a step with drafted tokens.
        """
        rows = self.limits.max_num_batched_tokens if max_rows is None else max_rows
        max_step_rows = rows if max_rows_with_drafts is None else max_rows_with_drafts
        busy = {*busy, *self._reading, *self._read} if self._reading or self._read else busy
        # Decodes get their blocks before anything is admitted: a prompt must not delay another next token.
        preempted, stalled = self._make_room(now, busy)
        running = [s for s in self.running.values() if s.request_id not in busy and s not in stalled]
        chunks = [(sequence, 1) for sequence in running if sequence.num_pending == 1][: max(0, rows)]
        rows = max(0, rows - len(chunks))
        if rows and (self.waiting or self._read or len(running) > len(chunks)):
            num_answers = sum(sequence.num_generated > 0 for sequence in self.running.values())
            rows = self.prompt_rows.limit(rows, num_answers)
        for sequence in running:
            if rows and sequence.num_pending > 1:
                chunks.append((sequence, self._chunk(sequence, rows)))
                rows -= chunks[-1][1]
        admitted = self._admit_with_prefix(chunks, rows)
        reading: list[tuple[Sequence, range]] = []
        rows -= sum(count for sequence, count in chunks if sequence in admitted)
        # After a preemption nothing is admitted: the new request would take the blocks that were just freed.
        if not preempted and rows and self.waiting:
            new_sequences, reading = self._admit(chunks, rows)
            admitted += new_sequences
        chunks = self._with_drafts(chunks, max_step_rows - len(chunks))
        return ScheduledStep(chunks, admitted, preempted, reading)

    def _with_drafts(self, chunks: list[Chunk], room: int) -> list[Chunk]:
        """The chunks with rows for drafted tokens, if all of them are the rows of next tokens.

        A draft takes no block that a running request may need for its next token.
        """
        sequences = [sequence for sequence, _ in chunks]
        if room <= 0 or not all(one.num_pending == 1 and one.num_generated for one in sequences):
            return chunks
        self.speculation.draft(sequences, room, self.blocks, spare=len(self.running))
        return [(sequence, 1 + len(sequence.draft_tokens)) for sequence in sequences]

    def _chunk(self, sequence: Sequence, rows: int) -> int:
        """How many rows of the sequence a step computes that has room for `rows`."""
        max_rows = self.limits.max_prefill_chunk
        max_rows = rows if max_rows is None else min(rows, max_rows)
        start = sequence.num_computed
        stop = min(sequence.chunk_end, start + max_rows)
        return self.blocks.cut(sequence.request_id, start, stop) - start

    def _make_room(self, now: float, busy: Collection[int]) -> tuple[list[Sequence], list[Sequence]]:
        """Allocate a block for each running sequence's next token, oldest sequence first.

        Returns (preempted, stalled). A stalled sequence gets no rows in this step: only itself could be
        preempted for it, while a younger request is busy. The next step can preempt the younger one.
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
        # It arrived before all requests that wait, so it goes to the front.
        self.waiting.move_to_end(request_id, last=False)
        self.preemptions += 1
        return sequence

    def _admit_with_prefix(self, chunks: list[Chunk], rows: int) -> list[Sequence]:
        """Admit requests whose KV was read from the disk, and add their first chunks."""
        sequences: list[Sequence] = []
        for request_id in list(self._read):
            if rows:
                sequence = self._read.pop(request_id)
                sequences.append(sequence)
                chunks.append((sequence, self._chunk(sequence, rows)))
                rows -= chunks[-1][1]
        return sequences

    def _admit(self, chunks: list[Chunk], rows: int) -> tuple[list[Sequence], list[tuple[Sequence, range]]]:
        """Take requests from the queue. Returns those admitted, with their first chunks in `chunks`, and
        those whose KV is read first, with the blocks to read."""
        admitted: list[Sequence] = []
        reading: list[tuple[Sequence, range]] = []
        if len(self.running) == self.limits.max_num_seqs:
            return admitted, reading
        spare = sum(map(self._may_grow, self.running.values()))
        while self.waiting and rows and len(self.running) < self.limits.max_num_seqs:
            request_id, sequence = next(iter(self.waiting.items()))
            tokens = sequence.tokens.array
            salt = sequence.request.params.cache_salt.encode()
            num_cached = self.blocks.allocate(request_id, tokens, sequence.reusable, spare, salt)
            # No later request may overtake this one, even if it would fit.
            if num_cached is None:
                break
            self.running[request_id] = self.waiting.pop(request_id)
            sequence.admit(num_cached)
            if sequence.restored_positions:
                self.blocks.restore(request_id, sequence.num_computed)
            spare += self._may_grow(sequence)
            if stored_blocks := self._find_stored_blocks(sequence):
                self._reading[request_id] = sequence
                reading.append((sequence, stored_blocks))
                continue
            admitted.append(sequence)
            chunks.append((sequence, self._chunk(sequence, rows)))
            rows -= chunks[-1][1]
        return admitted, reading

    def _find_stored_blocks(self, sequence: Sequence) -> range:
        """The blocks of a request to read from the disk: behind those in memory, and before rows that run."""
        num_tokens = sequence.disk_tokens if sequence.disk_tokens <= sequence.reusable else 0
        return range(sequence.num_computed // self.blocks.block_size, num_tokens // self.blocks.block_size)

    def _may_grow(self, sequence: Sequence) -> bool:
        """Whether the sequence may need another block. The KV of its last token is never written."""
        return sequence.max_len - 1 > self.blocks.capacity(sequence.request_id)
