"""Maps requests to points in a plane, near each other if they use the same experts (Sem-MoE, appendix A.1).

The paper draws one layer by t-SNE. This map uses all layers and principal components, which need no seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import NO_TOPIC, Routes

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RequestMap:
    """A point for each request. Requests that use the same experts are near each other."""

    points: tuple[tuple[float, float], ...]
    """The first two principal components of how often a request chose each expert of each layer."""
    topics: tuple[int, ...]
    """Topic of each point, or NO_TOPIC if it is unknown."""
    neighbours: float | None
    """Share of requests with the topic of their nearest other request, or None with fewer than two topics.

    Nearness is the cosine in all dimensions.
    """
    neighbours_by_chance: float | None


def map_requests(routes: Routes, num_experts: int, most: int = 1000) -> RequestMap | None:
    """Map at most `most` requests, taken evenly.

    Requests without tokens are left out. None: nothing is left.
    """
    filled = np.flatnonzero(np.diff(routes.starts))
    if not len(filled):
        return None
    routes = routes.select(filled[np.linspace(0, len(filled) - 1, min(most, len(filled))).astype(np.int64)])
    chosen = _chosen(routes, num_experts)
    centred = chosen - chosen.mean(axis=0)
    values, vectors = np.linalg.eigh(centred @ centred.T)
    plane = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    plane = np.pad(plane, ((0, 0), (0, 2 - plane.shape[1])))
    plane *= np.where(plane[np.abs(plane).argmax(axis=0), [0, 1]] < 0, -1, 1)  # one of two mirror images
    found, chance = _neighbours(chosen, routes.topics)
    points = tuple((x, y) for x, y in plane.tolist())
    return RequestMap(points, tuple(routes.topics.tolist()), found, chance)


def _chosen(routes: Routes, num_experts: int) -> FloatArray:
    """[r, layers * E] share of each request's choices that fall on each expert of each layer."""
    size = routes.requests * num_experts
    found = []
    for layer in range(routes.experts.shape[1]):
        keys = routes.owners[:, None] * num_experts + routes.experts[:, layer]
        found.append(np.bincount(keys.ravel(), minlength=size).reshape(-1, num_experts))
    rows = np.concatenate(found, axis=1).astype(np.float64)
    shares: FloatArray = rows / rows.sum(axis=1, keepdims=True)
    return shares


def _neighbours(chosen: FloatArray, topics: npt.NDArray[Any]) -> tuple[float | None, float | None]:
    """How often a request has the topic of its nearest request, and how often that of any other request."""
    said = topics != NO_TOPIC
    rows, topics = chosen[said], topics[said].astype(np.int64)
    sizes = np.bincount(topics)
    if np.count_nonzero(sizes) < 2:
        return None, None
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    nearness = rows @ rows.T
    np.fill_diagonal(nearness, -np.inf)
    chance = ((sizes - 1) * sizes).sum() / (len(topics) * (len(topics) - 1))
    return float((topics[nearness.argmax(axis=1)] == topics).mean()), float(chance)
