"""What the end of a step changes: rows are computed, drafts are checked, sequences get their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from moesaic.policy.scheduling.batching import Chunk, ContinuousBatching
from moesaic.policy.scheduling.schedulers.actions import Emit, StepDone, StepPlan
from moesaic.policy.scheduling.sequence import Sequence, Stage


def land(plan: StepPlan, chunks: Ordered[Chunk], done: StepDone, batching: ContinuousBatching) -> Emit:
    """Advance the sequences of a step that is done, commit their KV and give them their tokens.

    Rows of wrong drafted tokens do not count: the next step writes over them. Sequences that were cancelled
    meanwhile get no tokens. Raises ValueError when the tokens do not fit the plan.
    """
    emit = Emit([], [], [], [], plan.step)
    fresh = _new_tokens(plan, done)
    if done.proposed is not None:
        for index, token in zip(plan.sampled.tolist(), done.proposed.tolist(), strict=True):
            chunks[index][0].proposed = [token]
    for index, (sequence, rows) in enumerate(chunks):
        first, tokens = fresh.get(index, (0, []))
        accepted = max(0, len(tokens) - 1)
        batching.speculation.checked(sequence, accepted)
        right = 0 if sequence.stage is Stage.FINISHED else accepted
        sequence.advance(rows - len(sequence.drafted) + right)
        sequence.drafted = []
        _append(sequence, tokens, first, emit, batching)
        batching.blocks.commit(sequence.request_id, sequence.tokens.array, sequence.num_computed)
        batching.blocks.trim(sequence.request_id, sequence.num_tokens)
    return emit


def _new_tokens(plan: StepPlan, done: StepDone) -> dict[int, tuple[int, list[int]]]:
    """Sampled sequence -> the place of its first token in `done.tokens`, and its tokens."""
    tokens = done.tokens.tolist()
    counts = [1] * len(plan.sampled) if done.counts is None else done.counts.tolist()
    if len(counts) != len(plan.sampled) or sum(counts) != len(tokens):
        raise ValueError(f"step {plan.step} with {len(tokens)} tokens is not in flight")
    found, place = {}, 0
    for sequence, count in zip(plan.sampled.tolist(), counts, strict=True):
        found[sequence] = place, tokens[place : place + count]
        place += count
    return found


def _append(
    sequence: Sequence, tokens: list[int], first: int, emit: Emit, batching: ContinuousBatching
) -> None:
    """Give a sequence its tokens, up to the one that ends it. first: place of the first one."""
    for sample, token in enumerate(tokens, start=first):
        if sequence.stage is Stage.FINISHED:
            return
        finish = sequence.append(token)
        if finish is not None:
            batching.remove(sequence.request_id)
        emit.add(sequence.request_id, token, sample, finish)
