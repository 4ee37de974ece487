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

FEW_ROWS, MANY_ROWS = 1, 16
"""Rows of each matrix that are measured."""
ROUNDS = 3
"""Measurements of each. The shortest counts, since other work only adds."""
BUDGET_SECONDS = 0.3
"""Seconds after which no further round begins. One run of such a length is not measured at all."""
MIN_RATIO, MAX_RATIO = 1.0, 64.0
"""Limits of what is believed."""
MIN_CACHED_SECONDS = 0.05
"""Seconds of measuring from which the result is kept in the cache folder."""
LAYERS = 3
"""Layers that take turns, so that their weights do not stay in a cache of the CPU."""


def measure_ratio(
    run: Callable[[int], None],
    conditions: Mapping[str, object],
    clock: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Rows for which computing takes as long as reading: measured now, or what was measured before.

    run: computes a run with so many rows for each of its matrices. conditions: what the result depends on.
    None: one run takes too long to be measured.
    """
    text = repr(sorted({"machine": platform.node(), **conditions}.items()))
    key = "rows-" + hashlib.sha256(text.encode()).hexdigest()[:24]
    cached_ratio = fingerprint.read_cache(key).get("ratio", "")
    if cached_ratio.replace(".", "", 1).isdigit():
        return min(max(float(cached_ratio), MIN_RATIO), MAX_RATIO)
    began = clock()
    run(FEW_ROWS)  # reads its weights from the disk, if nothing did so before
    if clock() - began > BUDGET_SECONDS:
        return None
    shortest: dict[int, float] = {}
    for rows in (FEW_ROWS, MANY_ROWS) * ROUNDS:
        if len(shortest) == 2 and clock() - began > BUDGET_SECONDS:
            break
        begin = clock()
        run(rows)
        shortest[rows] = min(shortest.get(rows, 1e9), clock() - begin)
    row = (shortest[MANY_ROWS] - shortest[FEW_ROWS]) / (MANY_ROWS - FEW_ROWS)
    ratio = min(max((shortest[FEW_ROWS] - row) / row, MIN_RATIO), MAX_RATIO) if row > 0 else MAX_RATIO
    if clock() - began > MIN_CACHED_SECONDS:
        fingerprint.write_cache(key, {"ratio": f"{ratio:.2f}"})
    return ratio


def measure_experts(backend: ExpertBackend, layout: ExpertLayout, threads: int) -> float | None:
    """The same for the experts that a server holds. None: it holds none yet, or they are too large."""
    experts_by_layer = {layer: experts for layer, experts in backend.resident_experts.items() if experts}
    layers = sorted(experts_by_layer)[:LAYERS]
    if not layers:
        return None
    turn = 0

    def run(rows: int) -> None:
        nonlocal turn
        layer, turn = layers[turn % len(layers)], turn + 1
        experts: IntArray = np.repeat(np.array(experts_by_layer[layer], dtype=np.int64), rows)
        hidden = np.full((rows, layout.hidden), 0.01, dtype=np.float32)
        pairs = np.arange(len(experts))
        results = np.empty((len(experts), layout.hidden), dtype=np.float32)
        backend.run(layer, [CallPairs(hidden, pairs % rows, experts, results, pairs)])

    sizes = layout.hidden, layout.width, max(map(len, experts_by_layer.values()))
    return measure_ratio(
        run, {"kernels": backend.name, "threads": threads, "sizes": sizes, "type": layout.dtype}
    )
