"""Records which experts the rows of an attention worker chose, for some of its requests.

It reads what the steps leave behind: the expert ids that the gates wrote, in recorded decode steps too, where
they lie in the same memory at every replay. No stage computes anything more, so tokens stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.routing import RoutedModel, RowSink, draw, ending
from moesaic.models.spec import ModelSpec
from moesaic.policy.brain.actions import Admit, Release, StepPlan
from moesaic.runtime.walk import Chosen
from moesaic.trace.routing import RowFile

SEED = 1
"""Of the draw that decides which requests are recorded."""


class Recorder:
    """Hands the rows of recorded requests to `sink`, each once it passed all layers.

    Rows that are computed again (after a preemption) come again; rows whose keys and values the prefix cache
    holds are not computed, so they never come. What a failed step computed does not come.
    """

    def __init__(self, model: RoutedModel, sink: RowSink, share: float = 1.0) -> None:
        """share: of the requests, which are recorded: the same ones in every worker."""
        self._model = model
        self._sink = sink
        self._share = share
        self._prompts: dict[int, int] = {}
        """Recorded request -> tokens of its prompt."""
        self._units: dict[int, npt.NDArray[np.int16]] = {}
        """Recorded request -> [n, layers, k] of its rows between two places of the model."""

    def admit(self, action: Admit) -> None:
        """Some of these will be recorded."""
        for request in action.requests:
            if draw(request.request_id, SEED) < self._share:
                self._prompts[request.request_id] = len(request.prompt_token_ids)

    def release(self, action: Release) -> None:
        """These ended, unless they were preempted."""
        for request in action.request_ids:
            self._units.pop(request, None)
            if request in self._prompts and not action.preempted:
                self._sink(ending(self._model, request, self._prompts.pop(request)))

    def step(self, plan: StepPlan, chosen: Chosen) -> None:
        """A step is through. chosen: [n, k] expert ids of its rows, layer after layer."""
        mine = self._mine(plan)
        if mine:
            rows = [row for _, start, stop in mine for row in range(start, stop)]
            ids = [one.cpu().numpy() if isinstance(one, torch.Tensor) else one for one in chosen]
            experts = np.concatenate(ids, axis=1).take(rows, axis=0)
            self._write(plan, mine, rows, experts.reshape(len(rows), -1, self._model.top_k))

    def layer(self, plan: StepPlan, place: int, chosen: torch.Tensor) -> None:
        """A run came to the gate of the place-th layer with experts. chosen: [n, k] of its rows."""
        mine = self._mine(plan)
        ids = chosen.cpu().numpy() if mine else np.zeros(0)
        for request, start, stop in mine:
            if place == 0:
                shape = (stop - start, len(self._model.layers), self._model.top_k)
                self._units[request] = np.empty(shape, dtype=np.int16)
            self._units[request][:, place] = ids[start:stop]

    def through(self, plan: StepPlan) -> None:
        """A run passed the last layer."""
        for request, start, stop in self._mine(plan):
            self._write(plan, [(request, start, stop)], range(start, stop), self._units.pop(request))

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

    def _write(
        self,
        plan: StepPlan,
        requests: list[tuple[int, int, int]],
        rows: Sequence[int],
        experts: npt.NDArray[np.integer],
    ) -> None:
        """rows: of the step, those of `requests`; experts: [n, layers, k]."""
        made = np.empty(len(rows), self._model.row)
        made["experts"] = experts
        made["token"] = plan.batch.token_ids.take(rows)
        made["position"] = plan.batch.positions.take(rows)
        made["request"] = [request + 1 for request, start, stop in requests for _ in range(start, stop)]
        self._sink(made)


def recorder(config: WorkerConfig, spec: ModelSpec, sink: RowSink | None) -> Recorder | None:
    """For `sink`, else for the file that `config` names; None: nobody wants to know.

    Raises ConfigError when there is nothing to record or the file cannot be written.
    """
    if sink is None and config.record is None:
        return None
    if not spec.moe_layers:
        raise ConfigError.field("model", config.model.model, "one with routed experts, to record its routing")
    if sink is None and config.record is not None:
        sink = RowFile(Path(config.record), spec.routed)
    assert sink is not None
    return Recorder(spec.routed, sink, config.record_share)
