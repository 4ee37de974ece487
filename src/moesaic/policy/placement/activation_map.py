"""The data of an activation map: a picture with the token ids as rows and the experts as columns, sorted by
rank.

Speculative MoE (figure 8a) and Sem-MoE (figure 6b) draw how often each token id chooses each expert. If
tokens and experts that belong together are sorted together, the choices form blocks on the diagonal. These
choices stay on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ActivationMap:
    """Some token ids and all experts of a layer."""

    tokens: tuple[int, ...]
    """[n] ids, those of rank 0 first; within a rank those with the largest local share first."""
    experts: tuple[int, ...]
    """[E] logical ids, those of rank 0 first."""
    tokens_of: tuple[int, ...]
    """[R] number of ids on each rank."""
    experts_of: tuple[int, ...]
    """[R] number of experts on each rank."""
    shares: tuple[tuple[float, ...], ...]
    """[n, E] share of an id's tokens that chose the expert, 0 to 1."""
    local: float
    """Share of these tokens' (token, expert) pairs whose expert is on the rank of the token."""


def commonest(profile: Profile, index: int, most: int) -> IntArray:
    """The `most` token ids that were seen most often in layer `index`, ascending.

    Of equally frequent ones the lower is taken.
    """
    counts = profile.counts[index]
    seen = _pairs(counts)
    return np.sort(np.argsort(-seen, kind="stable")[: min(most, len(counts.known))]).astype(np.int64)


def activation_map(profile: Profile, clusters: Coclusters, index: int, tokens: IntArray) -> ActivationMap:
    """The map of layer `index`, counted from 0, for token ids [n] that the profile knows.

    Example: k = 1, token 5 chose expert 2 four times, token 6 expert 0 three times and expert 2 once;
    expert 2 and token 5 are on rank 0, the others on rank 1: rows 5, 6, columns 2, 0, 1, shares (1, 0, 0)
    and (0.25, 0.75, 0), local 7/8.
    """
    homes, own = clusters.experts[index], clusters.tokens[index][tokens]
    pairs = _rows(profile.counts[index], tokens, profile.num_experts)
    local = np.where(homes == own[:, None], pairs, 0).sum(axis=1)
    total = pairs.sum(axis=1)
    down = np.lexsort((tokens, -local / total, own))
    across = np.argsort(homes, kind="stable")
    shares = (pairs * profile.top_k / total[:, None])[down][:, across]
    return ActivationMap(
        tokens=tuple(tokens[down].tolist()),
        experts=tuple(across.tolist()),
        tokens_of=tuple(np.bincount(own, minlength=clusters.ranks).tolist()),
        experts_of=tuple(np.bincount(homes, minlength=clusters.ranks).tolist()),
        shares=tuple(tuple(row) for row in shares.tolist()),
        local=float(local.sum() / total.sum()),
    )


def dealt(clusters: Coclusters, tokens: IntArray) -> Coclusters:
    """The same experts, with `tokens` [n] in equal consecutive parts on the ranks, whatever they choose.

    Example: tokens 5, 6, 7, 8 on two ranks: 5 and 6 on rank 0, 7 and 8 on rank 1.
    """
    labels = clusters.tokens.copy()
    labels[:, tokens] = np.arange(len(tokens)) * clusters.ranks // max(len(tokens), 1)
    return replace(clusters, tokens=labels)


def _pairs(counts: Counts) -> FloatArray:
    """[V] choices of each token id."""
    found = np.bincount(counts.tokens, counts.counts, minlength=len(counts.starts) - 1)
    return found.astype(np.float64)


def _rows(counts: Counts, tokens: IntArray, num_experts: int) -> FloatArray:
    """[n, E] choices of these token ids."""
    found = np.zeros((len(tokens), num_experts))
    for row, token in enumerate(tokens.tolist()):
        entries = slice(counts.starts[token], counts.starts[token + 1])
        found[row, counts.experts[entries]] = counts.counts[entries]
    return found
