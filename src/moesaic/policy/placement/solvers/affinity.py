"""Computes how often two experts serve the same tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Counts

FloatArray = npt.NDArray[np.float64]


def coactivation(counts: Counts, num_experts: int, top_k: int) -> FloatArray:
    """[E, E] expected number of tokens that choose both experts; symmetric.

    An entry is the sum over token ids v of c[v, e] * c[v, f] / n[v]. Here v was seen n[v] times and chose
    expert e c[v, e] times. This is the expected number if choices depended on the token id alone, which is
    all that placement by token id can use. It is also the product of two experts' count vectors, weighted
    so that ids count as often as they occur.

    Example: one id was seen twice, and chose expert 0 twice and expert 1 once -> [[2, 1], [1, 0.5]].

    SciPy is imported by the first call, since most processes never need it.
    """
    from scipy.sparse import csr_array

    shape = (len(counts.starts) - 1, num_experts)
    matrix = csr_array((counts.counts.astype(np.float64), counts.experts, counts.starts), shape=shape)
    seen = np.maximum(matrix.sum(axis=1) / top_k, 1.0)
    weights = np.repeat(1.0 / np.sqrt(seen), np.diff(counts.starts))
    matrix.data *= weights
    found: FloatArray = (matrix.T @ matrix).toarray()
    return found
