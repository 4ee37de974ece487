"""What an expert server writes into a trace.

A span `layer l` says when the experts of layer l were computed for all pairs that waited there. Between two
spans the server is idle or receives calls. The counter `pairs waiting` says how many (row, expert) pairs have
arrived and do not run yet. It stays up while a server waits for every client (the barrier schedule).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.experts.backend import CallPairs
from moesaic.trace.track import Track


class ServerTrace:
    """A ServerObserver that writes into a track."""

    def __init__(self, track: Track) -> None:
        self._track = track

    def on_queue_changed(self, pairs: int) -> None:
        self._track.count("pairs waiting", pairs)

    def on_run_computed(self, layer: int, parts: Sequence[CallPairs], clients: int, began: float) -> None:
        end = self._track.now()
        experts = np.concatenate([part.experts for part in parts])
        counts = {"pairs": len(experts), "experts": len(np.unique(experts))}
        self._track.span(f"layer {layer}", began, end, **counts, clients=clients)
