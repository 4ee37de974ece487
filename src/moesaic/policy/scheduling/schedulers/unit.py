"""Units, the rows that a request has in flight under the asynchronous scheduler, as objects and as arrays.

A run of any number of units costs a few operations on arrays. So each unit has a slot, and arrays by slot
have what a run needs of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import STATE_FIELDS, IntArray, TokenBatch
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.actions import RowSource, StepPlan
from moesaic.policy.scheduling.schedulers.step_plan import plan_step
from moesaic.policy.scheduling.sequence import Sequence

Number = TypeVar("Number", bound=np.generic)
NO_RUN = -1
FIELDS = 7
"""Lines of `UnitTable._columns`: token, position, context length, request, epoch, whether it is sampled, the
token after it."""


@dataclass(eq=False)
class Unit:
    """The row of a next token, with those of its drafted tokens, or a chunk of a prompt."""

    sequence: Sequence
    rows: int
    decode: bool
    """Whether it is not a chunk of a prompt."""
    slot: int
    begin_time: float
    rows_beside: int
    """Rows of other units in flight when it began."""


class UnitTable:
    """All units, by slot."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self.units: list[Unit | None] = []
        self._free: list[int] = []
        self.run: IntArray = np.zeros(0, dtype=np.int64)
        """[slots] number of the run that computed a unit's rows last. NO_RUN before segment 0."""
        self.start: IntArray = np.zeros(0, dtype=np.int64)
        """[slots] index of its first row in that run."""
        self.rows: IntArray = np.zeros(0, dtype=np.int64)
        """[slots]"""
        self._plain: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)
        """[slots] whether it is a single row without a score. Then its line of a plan is in these arrays."""
        self._columns: IntArray = np.zeros((FIELDS, 0), dtype=np.int64)
        """[fields, slots] see FIELDS."""
        self._tables: IntArray = np.zeros((0, 0), dtype=np.int64)
        """[slots, longest] block tables, padded with 0."""
        self._lengths: IntArray = np.zeros(0, dtype=np.int64)
        """[slots] blocks of each."""
        self._states: IntArray = np.zeros((0, STATE_FIELDS), dtype=np.int64)
        """[slots, 4] see TokenBatch.states. It has no lines if sequences have no states."""

    def add(
        self, sequence: Sequence, rows: int, decode: bool, begin_time: float = 0.0, rows_beside: int = 0
    ) -> Unit:
        """A new unit, which no run has computed."""
        if not self._free:
            self._grow(max(8, 2 * len(self.units)))
        unit = Unit(sequence, rows, decode, self._free.pop(), begin_time, rows_beside)
        self.units[unit.slot] = unit
        self.run[unit.slot], self.rows[unit.slot] = NO_RUN, rows
        return unit

    def remove(self, unit: Unit) -> None:
        """The unit has ended."""
        self.units[unit.slot] = None
        self._free.append(unit.slot)

    def get_units(self, slots: IntArray) -> list[Unit]:
        """The units in these slots."""
        units = [self.units[slot] for slot in slots.tolist()]
        return [unit for unit in units if unit is not None]

    def first_plan(self, number: int, slots: IntArray) -> StepPlan:
        """The plan of a run of these units at segment 0."""
        plan = self._plan_units(number, slots)
        batch = plan.batch
        first, single = batch.query_starts[:-1], self.rows[slots] == 1
        self._plain[slots] = single
        self._plain[slots[plan.scored_sequences]] = False
        is_sampled = np.zeros(len(slots), dtype=np.int64)
        is_sampled[plan.sampled_sequences] = 1
        self._columns[:, slots] = (
            *(batch.token_ids[first], batch.positions[first], batch.context_lens, plan.request_ids),
            *(plan.epochs, is_sampled, plan.following),
        )
        width = batch.block_tables.shape[1]
        if width > self._tables.shape[1]:
            new_columns = np.zeros((len(self._tables), width - self._tables.shape[1]), dtype=np.int64)
            self._tables = np.hstack([self._tables, new_columns])
        self._tables[slots, :width], self._tables[slots, width:] = batch.block_tables, 0
        self._lengths[slots] = [len(self._blocks.table(one)) for one in plan.request_ids.tolist()]
        if len(batch.states):
            self._states = _extend_lines(self._states, len(self.units))
            self._states[slots] = batch.states
        return plan

    def plan(self, number: int, slots: IntArray) -> StepPlan:
        """The plan of a later run. It equals the one that `plan_step` would make."""
        # Units with several rows or with scores are rare, so only plain ones have the fast path of arrays.
        if not self._plain[slots].all():
            return self._plan_units(number, slots)
        count = len(slots)
        tokens, positions, contexts, requests, epochs, is_sampled, following = self._columns.take(
            slots, axis=1
        )
        width, states = int(self._lengths[slots].max()), self._states
        indices = shared_arange(count + 1)
        sampled_sequences = indices[:count] if is_sampled.all() else np.flatnonzero(is_sampled)
        empty = indices[:0]
        batch = TokenBatch(
            tokens,
            positions,
            indices,
            contexts,
            self._tables[:, :width].take(slots, axis=0),
            sampled_sequences,
            states.take(slots, axis=0) if len(states) else states,
        )
        return StepPlan(number, batch, requests, epochs, sampled_sequences, empty, empty, following)

    def runs(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """The runs that computed these units last, in their order, and how many units each has."""
        runs = self.run[slots]
        if not len(runs) or runs[0] == NO_RUN:
            return runs[:0], runs[:0]
        begins = np.flatnonzero(runs[1:] != runs[:-1]) + 1
        begins = np.concatenate([[0], begins])
        return runs[begins], np.diff(begins, append=len(runs))

    def sources(self, slots: IntArray) -> list[RowSource]:
        """Where the rows of these units come from. Neighbouring rows form one source, to copy less often."""
        runs, starts = self.run[slots], self.start[slots]
        stops = starts + self.rows[slots]
        ends = np.flatnonzero((runs[1:] != runs[:-1]) | (starts[1:] != stops[:-1]))
        first, last = [0, *(ends + 1).tolist()], [*ends.tolist(), len(slots) - 1]
        spans = zip(runs[first].tolist(), starts[first].tolist(), stops[last].tolist(), strict=True)
        return [RowSource(*one) for one in spans]

    def _plan_units(self, number: int, slots: IntArray) -> StepPlan:
        chunks = [(unit.sequence, unit.rows) for unit in self.get_units(slots)]
        return plan_step(number, chunks, self._blocks)

    def _grow(self, slots: int) -> None:
        self._free = list(range(slots - 1, len(self.units) - 1, -1))
        self.units += [None] * (slots - len(self.units))
        self.run, self.start, self.rows = (
            _extend_lines(one, slots) for one in (self.run, self.start, self.rows)
        )
        self._plain, self._lengths = _extend_lines(self._plain, slots), _extend_lines(self._lengths, slots)
        self._columns = np.ascontiguousarray(_extend_lines(self._columns.T, slots).T)
        self._tables = _extend_lines(self._tables, slots)
        self._states = _extend_lines(self._states, slots) if len(self._states) else self._states


_ARANGE: list[IntArray] = [np.arange(1024)]


def shared_arange(stop: int) -> IntArray:
    """[stop] the numbers from 0. It is a view of memory that all of them share: nobody may write to it."""
    if stop > len(_ARANGE[0]):
        _ARANGE[0] = np.arange(2 * stop)
    return _ARANGE[0][:stop]


def _extend_lines(array: npt.NDArray[Number], lines: int) -> npt.NDArray[Number]:
    """The array with more lines, which are zeros."""
    new_lines = np.zeros((lines - len(array), *array.shape[1:]), dtype=array.dtype)
    return np.concatenate([array, new_lines])
