"""What an expert server writes into a trace. Its loop knows nothing of it.

In its row a span `layer l` says when the experts of layer l were computed for all pairs that waited there;
between them it is idle, or takes in calls. Another row, `pairs waiting`, says how many (row, expert) pairs
came in and do not run yet: it stays up while a server waits for every client (the barrier schedule).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.experts.backend import CallPairs, ExpertBackend
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, Run
from moesaic.trace.track import Track


class TracedExpertScheduler(ExpertServerScheduler):
    """A Service that knows whose calls the last run answers."""

    def __init__(self, track: Track, *parts: Any) -> None:
        """parts: of a Service."""
        super().__init__(*parts)
        self._track = track
        self._owner: dict[int, int] = {}
        """Call -> its client, while any of its pairs waits."""
        self.served_clients = 0
        """Of the last run."""

    def arrived(
        self, call: int, client: int, layer: int, experts: npt.NDArray[np.integer], now: float
    ) -> None:
        super().arrived(call, client, layer, experts, now)
        self._owner[call] = client
        self._count()

    def client_left(self, client: int) -> None:
        super().client_left(client)
        self._owner = {call: owner for call, owner in self._owner.items() if owner != client}
        self._count()

    def next_run(self, now: float) -> Run | None:
        run = super().next_run(now)
        if run is not None:
            calls = [call for call, _ in run.parts]
            self.served_clients = len({self._owner[call] for call in calls})
            for call in calls:
                if call not in self._client:
                    del self._owner[call]
            self._count()
        return run

    def _count(self) -> None:
        self._track.count("pairs waiting", self.waiting_pairs)


class TracedBackend:
    """An Arithmetic whose runs are seen."""

    def __init__(self, arithmetic: ExpertBackend, service: TracedExpertScheduler, track: Track) -> None:
        self._arithmetic = arithmetic
        self._service = service
        self._track = track

    @property
    def name(self) -> str:
        return self._arithmetic.name

    @property
    def held(self) -> dict[int, list[int]]:
        return self._arithmetic.held

    def take(self, wanted: Mapping[int, Iterable[int]]) -> None:
        self._arithmetic.take(wanted)

    def keep(self, wanted: Mapping[int, Iterable[int]]) -> None:
        self._arithmetic.keep(wanted)

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        begin = self._track.now()
        self._arithmetic.run(layer, parts)
        end = self._track.now()
        experts = np.concatenate([part.experts for part in parts])
        found = {"pairs": len(experts), "experts": len(np.unique(experts))}
        self._track.span(f"layer {layer}", begin, end, **found, clients=self._service.served_clients)
