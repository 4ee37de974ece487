"""Measures at how many rows this CPU computes for as long as it reads weights, when a process starts.

The curves of a CPU are straight lines behind the reading of weights, so this one number gives their shape
(`minimum_batch.cpu_curves`). It depends on the kernels, the type of the weights and the threads.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping

import numpy as np

from moesaic.core.experts import ExpertLayout
from moesaic.core.tokens import IntArray
from moesaic.experts.backend import CallPairs, ExpertBackend
from moesaic.models import fingerprint

FEW, MANY = 1, 16
"""Rows of each matrix that are measured."""
ROUNDS = 3
"""Measurements of each. The shortest counts, since other work only adds."""
BUDGET = 0.3
"""Seconds after which no further round begins. One run of such a length is not measured at all."""
LEAST, MOST = 1.0, 64.0
"""Limits of what is believed."""
KEPT = 0.05
"""Seconds of measuring from which the result is kept in the cache folder."""
LAYERS = 3
"""Layers that take turns, so that their weights do not stay in a cache of the CPU."""


def ratio(
    run: Callable[[int], None], known: Mapping[str, object], clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Rows for which computing takes as long as reading: measured now, or what was measured before.

    run: computes a run with so many rows for each of its matrices. known: what the result depends on.
    None: one run takes too long to be measured.
    """
    text = repr(sorted({"machine": platform.node(), **known}.items()))
    key = "rows-" + hashlib.sha256(text.encode()).hexdigest()[:24]
    kept = fingerprint.read_cache(key).get("ratio", "")
    if kept.replace(".", "", 1).isdigit():
        return min(max(float(kept), LEAST), MOST)
    began = clock()
    run(FEW)  # reads its weights from the disk, if nothing did so before
    if clock() - began > BUDGET:
        return None
    shortest: dict[int, float] = {}
    for rows in (FEW, MANY) * ROUNDS:
        if len(shortest) == 2 and clock() - began > BUDGET:
            break
        begin = clock()
        run(rows)
        shortest[rows] = min(shortest.get(rows, 1e9), clock() - begin)
    row = (shortest[MANY] - shortest[FEW]) / (MANY - FEW)
    found = min(max((shortest[FEW] - row) / row, LEAST), MOST) if row > 0 else MOST
    if clock() - began > KEPT:
        fingerprint.write_cache(key, {"ratio": f"{found:.2f}"})
    return found


def of_experts(backend: ExpertBackend, layout: ExpertLayout, threads: int) -> float | None:
    """The same for the experts that a server holds. None: it holds none yet, or they are too large."""
    held = {layer: experts for layer, experts in backend.held.items() if experts}
    layers = sorted(held)[:LAYERS]
    if not layers:
        return None
    turn = 0

    def run(rows: int) -> None:
        nonlocal turn
        layer, turn = layers[turn % len(layers)], turn + 1
        experts: IntArray = np.repeat(np.array(held[layer], dtype=np.int64), rows)
        hidden = np.full((rows, layout.hidden), 0.01, dtype=np.float32)
        pairs = np.arange(len(experts))
        out = np.empty((len(experts), layout.hidden), dtype=np.float32)
        backend.run(layer, [CallPairs(hidden, pairs % rows, experts, out, pairs)])

    sizes = layout.hidden, layout.width, max(map(len, held.values()))
    return ratio(run, {"kernels": backend.name, "threads": threads, "sizes": sizes, "type": layout.dtype})
