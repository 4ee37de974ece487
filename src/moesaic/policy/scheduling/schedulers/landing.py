"""What the end of a step changes: rows are computed, drafts are checked, sequences get their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from moesaic.policy.scheduling.batching import Chunk, ContinuousBatching
from moesaic.policy.scheduling.schedulers.actions import Emit, StepDone, StepPlan
from moesaic.policy.scheduling.sequence import Sequence, Stage


def land(plan: StepPlan, chunks: Ordered[Chunk], step_done: StepDone, batching: ContinuousBatching) -> Emit:
    """Advance the sequences of a step that is done, commit their KV and give them their tokens.

    Rows of wrong drafted tokens do not count: the next step writes over them. Sequences that were cancelled
    meanwhile get no tokens. Raises ValueError when the tokens do not fit the plan.
    """
    emit = Emit([], [], [], [], plan.step)
    tokens_by_sequence = _new_tokens(plan, step_done)
    if step_done.proposed_tokens is not None:
        for index, token in zip(
            plan.sampled_sequences.tolist(), step_done.proposed_tokens.tolist(), strict=True
        ):
            chunks[index][0].proposed_tokens = [token]
    for index, (sequence, rows) in enumerate(chunks):
        first, tokens = tokens_by_sequence.get(index, (0, []))
        num_accepted = max(0, len(tokens) - 1)
        batching.speculation.record_check(sequence, num_accepted)
        num_counted = 0 if sequence.stage is Stage.FINISHED else num_accepted
        sequence.advance(rows - len(sequence.draft_tokens) + num_counted)
        sequence.draft_tokens = []
        _append(sequence, tokens, first, emit, batching)
        batching.blocks.commit(sequence.request_id, sequence.tokens.array, sequence.num_computed)
        batching.blocks.trim(sequence.request_id, sequence.num_tokens)
    return emit


def _new_tokens(plan: StepPlan, step_done: StepDone) -> dict[int, tuple[int, list[int]]]:
    """Sampled sequence -> the place of its first token in `done.tokens`, and its tokens."""
    tokens = step_done.tokens.tolist()
    counts = [1] * len(plan.sampled_sequences) if step_done.counts is None else step_done.counts.tolist()
    if len(counts) != len(plan.sampled_sequences) or sum(counts) != len(tokens):
        raise ValueError(f"step {plan.step} with {len(tokens)} tokens is not in flight")
    tokens_by_sequence, place = {}, 0
    for sequence, count in zip(plan.sampled_sequences.tolist(), counts, strict=True):
        tokens_by_sequence[sequence] = place, tokens[place : place + count]
        place += count
    return tokens_by_sequence


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
