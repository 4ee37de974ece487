"""Records which experts the rows of an attention worker chose, for some of its requests.

It reads what the steps leave behind: the expert ids that the gates wrote, in recorded decode steps too, where
they lie in the same memory at every replay. No stage computes anything more, so tokens stay what they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.routing import RoutedModel, RowSink, draw, ending
from moesaic.core.tokens import TokenBatch
from moesaic.models.spec import ModelSpec
from moesaic.policy.scheduling.schedulers.actions import Admit, Release, StepPlan
from moesaic.runtime.step.running_step import ChosenExperts
from moesaic.trace.routing import RowFile

Ids = npt.NDArray[np.integer]

SEED = 1
"""Of the draw that decides which requests are recorded."""
TOGETHER = 8
"""Requests in a row that are recorded or are not: they run at the same time, so that more steps have none."""
KEPT = 256
"""Rows that are handed over together: making records takes as long for one step's few rows as for these."""


class RoutingRecorder:
    """Hands the rows of recorded requests to `sink` once they passed all layers, whenever there are KEPT of
    them, and all of them before it says that a request ended.

    Rows that are computed again (after a preemption) come again; rows whose keys and values the prefix cache
    holds are not computed, so they never come. What a failed step computed does not come.
    """

    def __init__(self, model: RoutedModel, sink: RowSink, share: float = 1.0) -> None:
        """share: of the requests, TOGETHER in a row, which are recorded: the same ones in every worker."""
        self._model = model
        self._sink = sink
        self._share = share
        self._prompts: dict[int, int] = {}
        """Recorded request -> tokens of its prompt."""
        self._units: dict[int, npt.NDArray[np.int16]] = {}
        """Recorded request -> [n, layers, k] of its rows between two places of the model."""
        self._kept: list[tuple[Ids, TokenBatch, Ids]] = []
        """To be handed over, a step each: experts [n, layers * k], the batch, and its rows that they are."""
        self._owners: list[int] = []
        """The request of each of these rows."""
        self._key = b""
        """Sequences of the last step, and what `_rows` found there."""
        self._found: tuple[Ids, list[int]] = np.zeros(0, dtype=np.int64), []

    def admit(self, action: Admit) -> None:
        """Some of these will be recorded."""
        self._key = b""
        for request in action.requests:
            if draw(request.request_id // TOGETHER, SEED) < self._share:
                self._prompts[request.request_id] = len(request.prompt_token_ids)

    def release(self, action: Release) -> None:
        """These ended, unless they were preempted."""
        self._key = b""
        for request in action.request_ids:
            self._units.pop(request, None)
            if request in self._prompts and not action.preempted:
                self._hand_over()
                self._sink(ending(self._model, request, self._prompts.pop(request)))

    def step(self, plan: StepPlan, expert_ids: ChosenExperts) -> None:
        """A step is through. chosen: [n, k] expert ids of its rows, layer after layer."""
        if not self._prompts:
            return
        rows, owners = self._rows(plan)
        if owners:
            ids = [one.cpu().numpy() if isinstance(one, torch.Tensor) else one for one in expert_ids]
            self._keep(np.concatenate(ids, axis=1).take(rows, axis=0), plan, rows, owners)

    def segment(self, plan: StepPlan, segment: int, expert_ids: torch.Tensor) -> None:
        """A run came to the gate of the place-th layer with experts. chosen: [n, k] of its rows."""
        mine = self._mine(plan)
        ids = expert_ids.cpu().numpy() if mine else np.zeros(0)
        for request, start, stop in mine:
            if segment == 0:
                shape = (stop - start, len(self._model.layers), self._model.top_k)
                self._units[request] = np.empty(shape, dtype=np.int16)
            self._units[request][:, segment] = ids[start:stop]

    def last_segment(self, plan: StepPlan) -> None:
        """A run passed the last layer."""
        for request, start, stop in self._mine(plan):
            experts = self._units.pop(request).reshape(stop - start, -1)
            self._keep(experts, plan, np.arange(start, stop), [request] * (stop - start))

    def _rows(self, plan: StepPlan) -> tuple[Ids, list[int]]:
        """Rows of recorded requests in the step, and the request of each: mostly as in the last one."""
        key = plan.request_ids.tobytes() + plan.batch.query_starts.tobytes()
        if key != self._key:
            mine = self._mine(plan)
            rows = [row for _, start, stop in mine for row in range(start, stop)]
            owners = [request for request, start, stop in mine for _ in range(start, stop)]
            self._key, self._found = key, (np.array(rows, dtype=np.int64), owners)
        return self._found

    def _mine(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """Recorded requests of the step, each with the start and stop of its rows."""
        if not self._prompts:
            return []
        recorded, starts = self._prompts, plan.batch.query_starts
        return [
            (request, int(starts[i]), int(starts[i + 1]))
            for i, request in enumerate(plan.request_ids.tolist())
            if request in recorded
        ]

    def _keep(self, experts: Ids, plan: StepPlan, rows: Ids, owners: list[int]) -> None:
        """experts: [n, layers * k] of `rows` of the step."""
        self._kept.append((experts, plan.batch, rows))
        self._owners += owners
        if len(self._owners) >= KEPT:
            self._hand_over()

    def _hand_over(self) -> None:
        if not self._owners:
            return
        experts, batches, rows = zip(*self._kept, strict=True)
        starts = np.cumsum([0, *(len(batch.token_ids) for batch in batches[:-1])])
        positions = np.concatenate(rows) + np.repeat(starts, [len(part) for part in rows])
        made = np.empty(len(self._owners), self._model.row)
        made["experts"] = np.concatenate(experts).reshape(len(made), -1, self._model.top_k)
        made["token"] = np.concatenate([batch.token_ids for batch in batches]).take(positions)
        made["position"] = np.concatenate([batch.positions for batch in batches]).take(positions)
        made["request"] = np.array(self._owners) + 1
        self._kept, self._owners = [], []
        self._sink(made)


def recorder(config: WorkerConfig, spec: ModelSpec, sink: RowSink | None) -> RoutingRecorder | None:
    """For `sink`, else for the file that `config` names; None: nobody wants to know.

    Raises ConfigError when there is nothing to record, the file cannot be written, or too little memory is
    set aside for this model.
    """
    if sink is None and config.record is None:
        return None
    if not spec.moe_layers:
        raise ConfigError.field("model", config.model.model, "one with routed experts, to record its routing")
    if sink is None and config.record is not None:
        sink = RowFile(Path(config.record), spec.routed)
    assert sink is not None
    return RoutingRecorder(spec.routed, sink, config.record_share)
