"""Finds who computed the rows from which tokens are sampled, for requests that ask for it.

Experts come from the ids that the gates wrote. Servers come from the client of the expert servers, which
writes down whose answer it took for each pair. While no request asks, nothing is written down.

Question: Which experts and servers computed a token (`return_routed_experts`)?
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.request import TokenRoute
from moesaic.core.tokens import IntArray
from moesaic.experts.remote import RemoteExperts
from moesaic.policy.scheduling.schedulers.actions import Admit, Release, StepPlan
from moesaic.runtime.sampling.checking import SampledTokens
from moesaic.runtime.step.running_step import ChosenExperts

NO_SERVER = -1
"""Stands for a server whose answer has not come, or was of no use."""


@dataclass(frozen=True)
class _Rows:
    """The rows of one request in one layer, from the newest token's row to the last drafted one's."""

    experts: IntArray
    """[r, k]"""
    servers: IntArray
    """[r, k] The client writes into it as answers come in."""


class TokenRoutes:
    """The routes of the tokens of one worker.

    layers: with routed experts. remote: the client of the expert servers; None: there are none.
    """

    def __init__(self, layers: tuple[int, ...], remote: RemoteExperts | None = None) -> None:
        self.layers = layers
        self._remote = remote
        self._asking_requests: set[int] = set()
        """The running requests that ask."""
        self._plan: StepPlan | None = None
        self._rows: dict[int, dict[int, _Rows]] = {}
        """Request -> layer -> the last rows that were sent."""

    def admit(self, action: Admit) -> None:
        """These requests join the batch."""
        self._asking_requests.update(
            request.request_id for request in action.requests if request.params.return_routed_experts
        )
        self._watch()

    def release(self, action: Release) -> None:
        """These requests ended or were preempted."""
        self._asking_requests.difference_update(action.request_ids)
        for request in action.request_ids:
            self._rows.pop(request, None)
        self._watch()

    def begin(self, plan: StepPlan) -> None:
        """What is sent from now on belongs to `plan`."""
        self._plan = plan

    def on_rows_sent(self, layer: int, experts: IntArray, servers: IntArray) -> None:
        """The rows of the plan were sent to the experts of `layer`.

        experts: [n * k]. servers: [n * k] into which the client writes later.
        """
        plan = self._plan
        if plan is None or not self._asking_requests or layer not in self.layers:
            return  # as for a layer that only drafts tokens
        pairs = len(experts) // max(1, plan.batch.num_rows)
        for _, request, start, stop in self._find_asking(plan):
            part = slice(start * pairs, stop * pairs)
            rows = _Rows(experts[part].reshape(-1, pairs).copy(), servers[part].reshape(-1, pairs))
            self._rows.setdefault(request, {})[layer] = rows

    def collect(
        self, plan: StepPlan, new_tokens: SampledTokens, expert_ids: ChosenExperts
    ) -> list[TokenRoute | None]:
        """The routes of the tokens of a step, one per token. Empty if no request of the step asks.

        expert_ids: [n, k] of its rows for each layer, where this process computes the experts.
        """
        asking = self._find_asking(plan) if self._asking_requests else []
        if not asking:
            return []
        counts = (
            np.ones(len(plan.sampled_sequences), dtype=np.int64)
            if new_tokens.counts is None
            else new_tokens.counts
        )
        begins = np.cumsum(counts) - counts
        routes: list[TokenRoute | None] = [None] * int(counts.sum())
        for entry, request, start, _ in asking:
            for number in range(int(counts[entry])):
                if self._remote is None:
                    route = _read_gate_route(expert_ids, start + number)
                else:
                    route = self._read_server_route(self._rows.get(request, {}), number)
                routes[int(begins[entry]) + number] = route
        return routes

    def _read_server_route(self, rows: dict[int, _Rows], number: int) -> TokenRoute:
        rows_of_layers = [rows[layer] for layer in self.layers]
        return TokenRoute(
            [layer_rows.experts[number].tolist() for layer_rows in rows_of_layers],
            [layer_rows.servers[number].tolist() for layer_rows in rows_of_layers],
        )

    def _find_asking(self, plan: StepPlan) -> list[tuple[int, int, int, int]]:
        """The sampled sequences that ask for their routes.

        Returns the index of each in `plan.sampled_sequences`, its request, and the start and stop of the
        rows from which its tokens may be sampled.
        """
        stops = plan.batch.query_starts[plan.sampled_sequences + 1].tolist()
        num_drafted = plan.num_draft_tokens.tolist() or [0] * len(stops)
        requests = plan.request_ids[plan.sampled_sequences].tolist()
        return [
            (entry, request, stop - 1 - num_drafts, stop)
            for entry, (request, stop, num_drafts) in enumerate(
                zip(requests, stops, num_drafted, strict=True)
            )
            if request in self._asking_requests
        ]

    def _watch(self) -> None:
        if self._remote is not None:
            self._remote.routes = self if self._asking_requests else None


def _read_gate_route(expert_ids: ChosenExperts, row: int) -> TokenRoute:
    rows = [ids[row].cpu().numpy() if isinstance(ids, torch.Tensor) else ids[row] for ids in expert_ids]
    return TokenRoute([experts.tolist() for experts in rows], [])
