"""Records which experts the rows of an attention worker chose, for some of its requests.

It reads the expert ids that the gates wrote and that each step returns. No stage computes anything more, so
the tokens stay the same.
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
from moesaic.models import files
from moesaic.models.fingerprint import origin
from moesaic.models.spec import ModelSpec
from moesaic.policy.scheduling.schedulers.actions import Admit, Release, StepPlan
from moesaic.runtime.step.running_step import ChosenExperts
from moesaic.trace.routing import RowFile

Ids = npt.NDArray[np.integer]

SEED = 1
"""Seed of the draw that decides which requests are recorded."""
REQUESTS_TOGETHER = 8
"""Consecutive requests that are recorded together or not at all. They run at the same time, so more steps
have no recorded request."""
ROWS_TOGETHER = 256
"""Rows that are handed over together. To make records of so many rows takes no longer than of a few."""


class RoutingRecorder:
    """Hands the rows of recorded requests to `sink` once they have passed all layers.

    It hands over KEPT rows at a time, and the rest before it reports that a request ended. Rows that are
    computed again after a preemption come again. Rows that the prefix cache has are not computed, so they
    never come. Rows of a failed step do not come either.
    """

    def __init__(self, model: RoutedModel, sink: RowSink, share: float = 1.0) -> None:
        """share: the share of requests that are recorded. Every worker draws the same requests."""
        self._model = model
        self._sink = sink
        self._share = share
        self._prompts: dict[int, int] = {}
        """Recorded request -> tokens of its prompt."""
        self._units: dict[int, npt.NDArray[np.int16]] = {}
        """Recorded request -> [n, layers, k] expert ids of its rows between two segments of the model."""
        self._kept_rows: list[tuple[Ids, TokenBatch, Ids]] = []
        """Rows to be handed over, by step: expert ids [n, layers * k], the batch, and their indices in it."""
        self._owners: list[int] = []
        """The request of each row in `_kept_rows`."""
        self._key = b""
        """Identifies the sequences of the last step, whose result of `_rows` is in `_last_rows`."""
        self._last_rows: tuple[Ids, list[int]] = np.zeros(0, dtype=np.int64), []

    def admit(self, action: Admit) -> None:
        """Draw which of these requests are recorded."""
        self._key = b""
        for request in action.requests:
            if draw(request.request_id // REQUESTS_TOGETHER, SEED) < self._share:
                self._prompts[request.request_id] = len(request.prompt_token_ids)

    def release(self, action: Release) -> None:
        """These requests ended or were preempted."""
        self._key = b""
        for request in action.request_ids:
            self._units.pop(request, None)
            if request in self._prompts and not action.is_preemption:
                self._hand_over()
                self._sink(ending(self._model, request, self._prompts.pop(request)))

    def record_step(self, plan: StepPlan, expert_ids: ChosenExperts) -> None:
        """A step ended. expert_ids: [n, k] of its rows, for each layer."""
        if not self._prompts:
            return
        rows, owners = self._rows(plan)
        if owners:
            ids = [
                layer_ids.cpu().numpy() if isinstance(layer_ids, torch.Tensor) else layer_ids
                for layer_ids in expert_ids
            ]
            self._keep(np.concatenate(ids, axis=1).take(rows, axis=0), plan, rows, owners)

    def record_segment(self, plan: StepPlan, segment: int, expert_ids: torch.Tensor) -> None:
        """A run reached the gate of routed layer number `segment`. expert_ids: [n, k] of its rows."""
        recorded_requests = self._find_recorded(plan)
        ids = expert_ids.cpu().numpy() if recorded_requests else np.zeros(0)
        for request, start, stop in recorded_requests:
            if segment == 0:
                shape = (stop - start, len(self._model.layers), self._model.top_k)
                self._units[request] = np.empty(shape, dtype=np.int16)
            self._units[request][:, segment] = ids[start:stop]

    def record_last_segment(self, plan: StepPlan) -> None:
        """A run passed the last layer."""
        for request, start, stop in self._find_recorded(plan):
            experts = self._units.pop(request).reshape(stop - start, -1)
            self._keep(experts, plan, np.arange(start, stop), [request] * (stop - start))

    def _rows(self, plan: StepPlan) -> tuple[Ids, list[int]]:
        """The recorded rows of the step, and the request of each.

        In most steps they are those of the step before.
        """
        # Decode steps mostly have the same sequences as the step before. Comparing bytes is cheap.
        key = plan.request_ids.tobytes() + plan.batch.query_starts.tobytes()
        if key != self._key:
            recorded_requests = self._find_recorded(plan)
            rows = [row for _, start, stop in recorded_requests for row in range(start, stop)]
            owners = [request for request, start, stop in recorded_requests for _ in range(start, stop)]
            self._key, self._last_rows = key, (np.array(rows, dtype=np.int64), owners)
        return self._last_rows

    def _find_recorded(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """The recorded requests of the step, each with the start and stop of its rows."""
        if not self._prompts:
            return []
        prompt_lengths, starts = self._prompts, plan.batch.query_starts
        return [
            (request, int(starts[i]), int(starts[i + 1]))
            for i, request in enumerate(plan.request_ids.tolist())
            if request in prompt_lengths
        ]

    def _keep(self, experts: Ids, plan: StepPlan, rows: Ids, owners: list[int]) -> None:
        """Keep rows to be handed over. experts: [n, layers * k], of `rows` of the step."""
        self._kept_rows.append((experts, plan.batch, rows))
        self._owners += owners
        if len(self._owners) >= ROWS_TOGETHER:
            self._hand_over()

    def _hand_over(self) -> None:
        if not self._owners:
            return
        experts, batches, rows = zip(*self._kept_rows, strict=True)
        starts = np.cumsum([0, *(len(batch.token_ids) for batch in batches[:-1])])
        positions = np.concatenate(rows) + np.repeat(starts, [len(part) for part in rows])
        records = np.empty(len(self._owners), self._model.row)
        records["experts"] = np.concatenate(experts).reshape(len(records), -1, self._model.top_k)
        records["token"] = np.concatenate([batch.token_ids for batch in batches]).take(positions)
        records["position"] = np.concatenate([batch.positions for batch in batches]).take(positions)
        records["request"] = np.array(self._owners) + 1
        self._kept_rows, self._owners = [], []
        self._sink(records)


def build_recorder(config: WorkerConfig, spec: ModelSpec, sink: RowSink | None) -> RoutingRecorder | None:
    """A recorder into `sink`, or else into the file that `config` names. None if there is neither.

    Raises ConfigError when the model has no routed experts, the file cannot be written, or too little memory
    is set aside for this model.
    """
    if sink is None and config.record is None:
        return None
    if not spec.moe_layers:
        raise ConfigError.field("model", config.model.model, "one with routed experts, to record its routing")
    routed_model = spec.to_routed_model(origin(files.resolve(*config.model.source)))
    if sink is None and config.record is not None:
        sink = RowFile(Path(config.record), routed_model)
    assert sink is not None
    return RoutingRecorder(routed_model, sink, config.record_share)
