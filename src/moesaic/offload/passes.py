"""Runs one engine step as one pass over the model: micro-batches, their tasks on lanes, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from moesaic.core.metrics import PassStats, ResidencyStats
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.models.model import Model
from moesaic.offload.caches import Cache
from moesaic.offload.operations import Operations
from moesaic.offload.parts import (
    UNPADDED,
    MicroBatch,
    Rows,
    divide_by_context,
    divide_by_rows,
    divide_by_sequences,
    is_cut,
)
from moesaic.policy.offloading.pipeline import decode, first_layer, prefill
from moesaic.policy.offloading.policies import Policy, shape_of
from moesaic.policy.offloading.tasks import Lane, Shape, Task
from moesaic.policy.offloading.timeline import Timeline


class Runs(Protocol):
    """Runs a task list: offload.lanes.Lanes, or a wrapper that also records what it observes."""

    def run(self, tasks: Sequence[Task], run_task: Callable[[Task], None]) -> Timeline: ...


BUSY_NAMES = {
    Lane.FAST: "fast",
    Lane.SLOW: "slow",
    Lane.LINK_DOWN: "down",
    Lane.LINK_UP: "up",
    Lane.STAGING: "staging",
}
"""The names of lanes in metrics and in reports of batches."""
NO_TASKS = Timeline((), (), dict.fromkeys(Lane, 0.0))
"""Timeline of an empty list."""
Observe = Callable[[Sequence[Task], Timeline], None]
"""Called after a pass, with its tasks and when each began and ended."""


@dataclass(frozen=True)
class PassSettings:
    """How passes are run."""

    policy: Policy
    prefill_rows: int
    """Maximum rows of a micro-batch in a pass with prompts."""
    experts: int
    """Most routed experts of a layer in any one process, so that all processes use the same lists."""
    rows: Rows = UNPADDED
    is_staged: bool = False
    """True: pages are copied to pinned memory before they are loaded."""
    checked_rows: int = 0
    """Maximum rows of a decode pass with several rows of a sequence, which check drafted tokens. 0: nothing
    is drafted."""
    rows_by_choice: int = 0
    """Maximum rows of a pass with prompts that is computed as a decode pass if the schedule is on-demand."""


class Passes:
    """Runs steps, one at a time. A pass with rows of prompts is prefill, even if some sequences decode. A few
    rows of prompts may load the experts that they choose, as a decode pass does."""

    def __init__(
        self,
        model: Model,
        settings: PassSettings,
        operations: Operations,
        lanes: Runs,
        prompts: Cache,
        decodes: Cache,
        observe: Observe | None = None,
    ) -> None:
        """prompts, decodes: the cache for prefill passes and for decode passes."""
        self.observe = observe
        self._model = model
        self._settings = settings
        self._operations = operations
        self._lanes = lanes
        self._caches = {True: prompts, False: decodes}
        self._first_layer_turn = 0
        self._first: int | None = None
        """The turn (layer number over all passes) whose layer is loaded. It is the first layer of a pass."""
        self._stats: dict[tuple[bool, int, int], PassStats] = {}
        self.decode_steps = [0, 0]
        """Decode steps so far that loaded chosen experts, and those that loaded pages."""
        self.link_seconds = 0.0
        """Seconds so far in which weights were loaded."""

    def run(self, batch: TokenBatch) -> torch.Tensor:
        """Runs one step and writes the cache of all its rows.

        Returns hidden states [m, h] of the logit_rows after the last block.
        """
        with self._model.kernels.reuse_memory():
            return self._run(batch)

    def _run(self, batch: TokenBatch) -> torch.Tensor:
        step_batch, batch = batch, self._settings.rows.add_padding(batch)
        prompts = self.has_prompts(batch) and not self._loads_by_choice(batch)
        cache = self._caches[prompts]
        micro_batches = self._divide(batch, prompts)
        parts = [self._part(*micro_batch, cache) for micro_batch in micro_batches]
        cut = prompts and self._moves and is_cut(batch, micro_batches)
        shape = replace(self.shape(prompts, len(parts)), cut=cut)
        self._operations.begin(parts, cache, self._first_layer_turn, shape.pages, prompts)
        # The counter runs over all passes, so this pass loaded the difference.
        earlier_bytes = self._operations.loaded_bytes
        first = self._load_first(shape)
        self._first = None  # until the pass has ended: after an error the slots are in an unknown state
        tasks = _list_tasks(self._settings.policy, shape, prompts)
        timeline = self._lanes.run(tasks, self._operations)
        if self.observe is not None:
            self.observe(tasks, timeline)
        self._first_layer_turn += shape.layers
        self._first = self._first_layer_turn if shape.pages else None
        self._count(
            step_batch, batch, len(parts), (first, timeline), self._operations.loaded_bytes - earlier_bytes
        )
        return _gather_logit_rows(batch, parts, self._model.embedding.device)

    def has_prompts(self, batch: TokenBatch) -> bool:
        """Whether a pass is prefill: it has rows beside those of next tokens and of drafted ones."""
        if batch.num_rows == batch.num_sequences:
            return False
        return len(batch.logit_rows) < batch.num_rows or batch.num_rows > self._settings.checked_rows

    @property
    def policy(self) -> Policy:
        """The policy of the next pass."""
        return self._settings.policy

    def revise(self, policy: Policy) -> None:
        """Computes all further passes by another policy. No pass may run meanwhile.

        It may differ in its schedule, its micro-batches and its likely experts, for which memory has room.
        """
        self._settings = replace(self._settings, policy=policy)
        self._operations.most_likely = policy.likely_experts

    def forget_loaded(self) -> None:
        """Loads again what was loaded for the next pass: its memory was moved. No pass may run meanwhile."""
        self._first = None
        self._operations.forget_prefetched()

    @property
    def residency(self) -> ResidencyStats:
        """What the passes so far found in memory, and what they loaded. `held_bytes` is left out."""
        operations = self._operations
        return ResidencyStats(
            operations.num_chosen, operations.num_hits, operations.num_exchanged, operations.loaded_bytes
        )

    def shape(self, prompts: bool, count: int) -> Shape:
        """Returns the input of the scheduler for a pass of `count` micro-batches."""
        spec = self._model.spec
        shape = shape_of(self._settings.policy, self._settings.experts, spec.num_layers, count, prompts)
        dense = frozenset(range(spec.num_layers)) - frozenset(spec.moe_layers)
        return replace(shape, dense=dense, uses_pinned_memory=self._settings.is_staged)

    def stats(self) -> tuple[PassStats, ...]:
        """Statistics of the passes so far, by phase, number of micro-batches and number of sequences."""
        return tuple(self._stats.values())

    def _divide(self, batch: TokenBatch, prompts: bool) -> list[tuple[TokenBatch, IntArray]]:
        rows, largest = self._settings.rows, self._settings.prefill_rows
        if not prompts:
            return divide_by_sequences(batch, self._settings.policy.micro_batch)
        if self._moves:
            return divide_by_context(batch, rows.contexts(batch), largest, rows.has_whole_sequences)
        return divide_by_rows(batch, largest, rows.has_whole_sequences)

    def _loads_by_choice(self, batch: TokenBatch) -> bool:
        """Whether a pass with prompts is computed as a decode pass."""
        is_on_demand = self._settings.policy.schedule == "on-demand" and not self._moves
        return is_on_demand and batch.num_rows <= self._settings.rows_by_choice

    @property
    def _moves(self) -> bool:
        """Whether the cache is on the slow level."""
        return self._settings.policy.slow_attention or self._settings.policy.slow_cache > 0

    def _part(self, batch: TokenBatch, origin: IntArray, cache: Cache) -> MicroBatch:
        embedding = self._model.embedding
        positions = torch.from_numpy(batch.positions).to(embedding.device)
        no_rows = torch.empty(0, embedding.shape[1])
        return MicroBatch(batch, origin, cache.attention(batch), positions, no_rows)

    def _load_first(self, shape: Shape) -> Timeline:
        """Loads the first layer, unless the last pass loaded it."""
        if not shape.pages_of(0) or self._first == self._first_layer_turn:
            return NO_TASKS
        return self._lanes.run(first_layer(shape), self._operations)

    def _count(
        self,
        step_batch: TokenBatch,
        batch: TokenBatch,
        parts: int,
        times: tuple[Timeline, Timeline],
        loaded_bytes: int,
    ) -> None:
        """step_batch: the part of the batch that the step contains. times: of the first layer's load, and of
        the task list."""
        key = self.has_prompts(batch), parts, batch.num_sequences
        context = int(step_batch.context_lens.sum())
        old = self._stats.get(key, PassStats(*key))
        busy = {BUSY_NAMES[lane]: sum(timeline.busy[lane] for timeline in times) for lane in Lane}
        self.link_seconds += busy[BUSY_NAMES[Lane.LINK_DOWN]]
        self.decode_steps[self._settings.policy.schedule not in ("on-demand", "split")] += not key[0]
        self._stats[key] = replace(
            old,
            passes=old.passes + 1,
            cold=old.cold + bool(times[0].ends),
            rows=old.rows + step_batch.num_rows,
            context=old.context + context,
            padding_rows=old.padding_rows + batch.num_rows - step_batch.num_rows,
            padding_context=old.padding_context + int(self._settings.rows.contexts(batch).sum()) - context,
            loaded_bytes=old.loaded_bytes + loaded_bytes,
            seconds=old.seconds + sum(timeline.makespan for timeline in times),
            busy={name: old.busy.get(name, 0.0) + busy[name] for name in busy},
        )


@lru_cache(maxsize=4)  # a list takes megabytes if there are many layers and micro-batches
def _list_tasks(policy: Policy, shape: Shape, prompts: bool) -> Sequence[Task]:
    if prompts:
        return prefill(shape, rows_move=not policy.fast_residual)
    return decode(policy.schedule, shape)


def _gather_logit_rows(batch: TokenBatch, parts: Sequence[MicroBatch], device: torch.device) -> torch.Tensor:
    """Returns the hidden states for the LM head, on `device`. Parts may have them on the slow level."""
    hidden_states = torch.empty(len(batch.logit_rows), parts[0].hidden.shape[1], device=device)
    for part in parts:
        rows = part.batch.logit_rows
        lines = np.searchsorted(batch.logit_rows, part.origin[rows])
        hidden_states[torch.from_numpy(lines)] = part.hidden[torch.from_numpy(rows)].to(device)
    return hidden_states
