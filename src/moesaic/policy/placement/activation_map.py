"""Computes activation maps: how often each token id chooses each expert, with both sorted by rank.

Speculative MoE (figure 8a) and Sem-MoE (figure 6b) draw such pictures. Rows are token ids and columns are
experts. Where tokens and experts of one rank are sorted together, their choices form blocks on the
diagonal. These choices stay on their rank.
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
    """The activation map of some token ids and all experts of one layer."""

    tokens: tuple[int, ...]
    """[n] token ids. Those of rank 0 come first; within a rank, those with the largest local share."""
    experts: tuple[int, ...]
    """[E] logical ids of the experts. Those of rank 0 come first."""
    tokens_of: tuple[int, ...]
    """[R] number of these token ids on each rank."""
    experts_of: tuple[int, ...]
    """[R] number of experts on each rank."""
    shares: tuple[tuple[float, ...], ...]
    """[n, E] share of a token id's occurrences that chose the expert, 0 to 1."""
    local: float
    """Share of the (token, expert) pairs that have token and expert on the same rank."""


def commonest(profile: Profile, index: int, most: int) -> IntArray:
    """The `most` token ids that occur most often in layer `index`, ascending.

    Between equally frequent ids, the lower one is taken.
    """
    counts = profile.counts[index]
    seen = _pairs(counts)
    return np.sort(np.argsort(-seen, kind="stable")[: min(most, len(counts.known_tokens))]).astype(np.int64)


def activation_map(profile: Profile, clusters: Coclusters, index: int, tokens: IntArray) -> ActivationMap:
    """The activation map of layer `index` for some token ids.

    index: counted from 0 over the layers of the profile. tokens: [n] ids that the profile knows.

    Example with k = 1: token 5 chose expert 2 four times. Token 6 chose expert 0 three times and expert 2
    once. Expert 2 and token 5 are on rank 0, everything else is on rank 1. The map has rows 5, 6 and
    columns 2, 0, 1. Its shares are (1, 0, 0) and (0.25, 0.75, 0), and `local` is 7/8.
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
    """The same experts, but with `tokens` [n] divided over the ranks in equal consecutive parts.

    The parts ignore what the tokens choose. Example: with tokens 5, 6, 7, 8 and two ranks, rank 0 gets 5
    and 6, and rank 1 gets 7 and 8.
    """
    labels = clusters.tokens.copy()
    labels[:, tokens] = np.arange(len(tokens)) * clusters.ranks // max(len(tokens), 1)
    return replace(clusters, tokens=labels)


def _pairs(counts: Counts) -> FloatArray:
    """[V] number of choices of each token id."""
    found = np.bincount(counts.tokens, counts.counts, minlength=len(counts.starts) - 1)
    return found.astype(np.float64)


def _rows(counts: Counts, tokens: IntArray, num_experts: int) -> FloatArray:
    """[n, E] how often each of these token ids chose each expert."""
    found = np.zeros((len(tokens), num_experts))
    for row, token in enumerate(tokens.tolist()):
        entries = slice(counts.starts[token], counts.starts[token + 1])
        found[row, counts.experts[entries]] = counts.counts[entries]
    return found
