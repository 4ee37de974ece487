"""Profiles whose clusters are known: every request has a topic, every topic its experts in every layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Profile, Routes
from moesaic.core.tokens import IntArray


def profile_of(
    experts: npt.NDArray[np.integer], starts: list[int], tokens: IntArray, vocab_size: int, size: int
) -> Profile:
    """A profile of requests with experts [t, layers, k]."""
    requests = len(starts) - 1
    routes = Routes(
        tokens=tokens.astype(np.int32),
        starts=np.array(starts, dtype=np.int64),
        prompts=np.diff(starts).astype(np.int32),
        topics=np.full(requests, -1, dtype=np.int16),
        experts=experts.astype(np.int16),
    )
    return Profile.from_routes("m", vocab_size, size, range(experts.shape[1]), routes)


def noise(seed: int, size: int, layers: int, k: int, requests: int = 12, length: int = 8) -> Profile:
    """Choices without any order. Some experts are hotter than others."""
    rng = np.random.default_rng(seed)
    heat = rng.normal(size=(layers, size))
    scores = heat + rng.gumbel(size=(requests * length, layers, size))
    experts = np.argsort(-scores, axis=2)[:, :, :k]
    starts = [length * i for i in range(requests + 1)]
    return profile_of(experts, starts, rng.integers(0, 20, requests * length), 20, size)


def planted(seed: int, size: int, ranks: int, layers: int = 3) -> tuple[Profile, IntArray]:
    """Requests that choose their topic's experts only, and the topics [layers, E] of the experts.

    Four token ids a topic, none shared; 6 requests of 10 tokens a topic; 2 experts a token.
    """
    rng = np.random.default_rng(seed)
    topics = np.stack([rng.permutation(np.arange(size) % ranks) for _ in range(layers)])
    owners = np.repeat(rng.permutation(6 * ranks) % ranks, 10)
    tokens = owners * 4 + rng.integers(0, 4, len(owners))
    mine = topics[None] == owners[:, None, None]
    scores = np.where(mine, 10.0, 0.0) + rng.random((len(owners), layers, size))
    experts = np.argsort(-scores, axis=2)[:, :, :2]
    starts = [10 * i for i in range(6 * ranks + 1)]
    return profile_of(experts, starts, tokens, 4 * ranks, size), topics


def same_clusters(one: IntArray, other: IntArray) -> bool:
    """Whether two labellings of the same items differ only in their numbers."""
    return bool(((one[:, None] == one) == (other[:, None] == other)).all())
