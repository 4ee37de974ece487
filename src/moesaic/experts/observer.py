"""What a client of expert servers and an expert server report to an observer, such as a trace.

Times are seconds of the process's clock. Every method is called by the thread that computes.

Question: What can a trace of an expert server see?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.experts.backend import CallPairs
from moesaic.trace.track import Track

if TYPE_CHECKING:  # the client needs torch, which a server on the native kernels never imports
    from moesaic.experts.client import ExpertRequest, RequestHandle


class ClientObserver(Protocol):
    """Follows the requests of one worker to its expert servers."""

    def on_request_sent(self, handle: RequestHandle, request: ExpertRequest, began: float) -> None:
        """The pairs of `request` were sent to their servers. Sending began at `began`."""
        ...

    def on_answer(self, handle: RequestHandle, began: float) -> None:
        """A poll that began at `began` found the complete answer."""
        ...

    def on_pairs_received(self, news: Sequence[tuple[RequestHandle, IntArray]], began: float) -> None:
        """These pairs came in, by request. Looking for them began at `began`."""
        ...

    def on_answer_released(self, handle: RequestHandle) -> None:
        """The answer is no longer needed."""
        ...

    def on_wait(self, began: float) -> None:
        """The worker had nothing to compute since `began`."""
        ...

    def on_barrier(self, waiting: bool) -> None:
        """True: the worker has rows and waits at the barrier of a step. False: it passed, or has no rows."""
        ...


class RouteObserver(Protocol):
    """Follows which server answers for which pair."""

    def on_rows_sent(self, layer: int, experts: IntArray, servers: IntArray) -> None:
        """Rows were sent. experts: [n * k]. servers: [n * k] into which the client writes who answered."""
        ...


class ServerObserver(Protocol):
    """Follows the runs of one expert server."""

    def on_queue_changed(self, pairs: int) -> None:
        """The number of pairs that wait to be computed has changed to `pairs`."""
        ...

    def on_run_computed(self, layer: int, parts: Sequence[CallPairs], clients: int, began: float) -> None:
        """A run computed `parts`, which came from so many clients. It began at `began`."""
        ...


class UnobservedClient:
    """A ClientObserver that ignores everything."""

    def on_request_sent(self, handle: RequestHandle, request: ExpertRequest, began: float) -> None: ...

    def on_answer(self, handle: RequestHandle, began: float) -> None: ...

    def on_pairs_received(self, news: Sequence[tuple[RequestHandle, IntArray]], began: float) -> None: ...

    def on_answer_released(self, handle: RequestHandle) -> None: ...

    def on_wait(self, began: float) -> None: ...

    def on_barrier(self, waiting: bool) -> None: ...


class UnobservedServer:
    """A ServerObserver that ignores everything."""

    def on_queue_changed(self, pairs: int) -> None: ...

    def on_run_computed(self, layer: int, parts: Sequence[CallPairs], clients: int, began: float) -> None: ...


class ServerTrace:
    """A ServerObserver that writes into a track of a trace.

    A span `layer l` says when the experts of layer l were computed for all pairs that waited there. Between
    two spans the server is idle or receives calls. The counter `pairs waiting` says how many (row, expert)
    pairs have arrived and do not run yet. It stays up while a server waits for every client (the barrier
    schedule).
    """

    def __init__(self, track: Track) -> None:
        self._track = track

    def on_queue_changed(self, pairs: int) -> None:
        self._track.count("pairs waiting", pairs)

    def on_run_computed(self, layer: int, parts: Sequence[CallPairs], clients: int, began: float) -> None:
        end = self._track.now()
        experts = np.concatenate([part.experts for part in parts])
        counts = {"pairs": len(experts), "experts": len(np.unique(experts))}
        self._track.span(f"layer {layer}", began, end, **counts, clients=clients)
