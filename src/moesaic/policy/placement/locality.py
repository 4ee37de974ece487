"""Measures how local a placement is: which rank computes each (token, expert) pair, and what ranks
exchange.

A pair is computed on the token's own rank if that rank has the expert, else on another one. `hosts` finds
that rank, and all measures are derived from it. Layers are counted from 0 over those with routed experts.
There are two levels:

    token level      attention-TP: each layer sends a token to its own best rank (`token_ranks`)
    request level    attention-DP: a request has one rank for all layers and all its tokens (`request_ranks`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes, SmallArray, TokenArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.dispatch import AHEAD, EXACT
from moesaic.policy.placement.link_prices import worth_of

FloatArray = npt.NDArray[np.float64]


# ---- where experts live


def homes_of(clusters: Coclusters) -> SmallArray:
    """[layers, E, 1] the rank of each expert."""
    return clusters.experts[:, :, None]


def homes_in(placement: Placement, layers: Sequence[int]) -> SmallArray:
    """[layers, E, copies] the ranks with a copy of each expert, padded with -1. layers: their numbers in
    the model."""
    tables = [placement.table(layer) for layer in layers]
    max_copies = max(table.shape[1] for table in tables)
    padded_tables = [np.pad(t, ((0, 0), (0, max_copies - t.shape[1])), constant_values=-1) for t in tables]
    return np.stack(padded_tables).astype(np.int16)


def hosts(
    experts: SmallArray, homes: SmallArray, own_ranks: SmallArray, prices: FloatArray | None = None
) -> SmallArray:
    """[t, layers, k] the rank that computes each pair: the token's own rank if it has a copy of the expert.

    Otherwise token i uses copy i modulo the number of copies, which divides tokens evenly. experts:
    [t, layers, k]. homes: [layers, E, copies], at least one copy of each expert. own_ranks: [t, layers]
    the rank
    of each token. prices: [R, R] of the link from each rank to each rank's server; only copies with the
    lowest price count then. With workers that are no ranks it is [W, R], and `own_ranks` names workers.
    None: all links are alike.
    """
    found = np.empty(experts.shape, dtype=np.int16)
    turns = np.arange(len(experts))[:, None]
    for layer, table in enumerate(homes):
        chosen = experts[:, layer]
        if table.shape[1] == 1:
            found[:, layer] = table[chosen, 0]
            continue
        if prices is not None:
            found[:, layer] = _cheapest(table[chosen], prices[own_ranks[:, layer]], turns)
            continue
        mine = own_ranks[:, layer, None]
        here = (table[chosen] == mine[:, :, None]).any(axis=2)
        copies = (table >= 0).sum(axis=1)
        found[:, layer] = np.where(here, mine, table[chosen, turns % copies[chosen]])
    return found


def _cheapest(copies: SmallArray, prices: FloatArray, turns: IntArray) -> SmallArray:
    """[t, k] the copy that computes each pair: copy i modulo their number, of those with the lowest price.

    copies: [t, k, copies] ranks, padded with -1. prices: [t, R] of each rank's server. turns: [t, 1] i.
    """
    cost = np.where(copies >= 0, np.take_along_axis(prices[:, None, :], copies.clip(min=0), axis=2), np.inf)
    open_ones = cost == cost.min(axis=2, keepdims=True)
    wanted = (turns % open_ones.sum(axis=2))[:, :, None]
    at = (open_ones & (open_ones.cumsum(axis=2) == wanted + 1)).argmax(axis=2)
    return np.take_along_axis(copies, at[:, :, None], axis=2)[:, :, 0]


# ---- where tokens live


def token_ranks(clusters: Coclusters, tokens: TokenArray, nearest: TokenArray | None = None) -> SmallArray:
    """[t, layers] the rank of each token in each layer: the label of its id.

    An id that the clusters' profile has never seen (confidence 0) takes the label of its nearest known id.
    `nearest` names that id, as in a profile. Without `nearest`, or if that id was not seen either, the id
    takes the solver's label.
    """
    labels = clusters.tokens
    if nearest is not None:
        there = (clusters.confidence == 0) & (clusters.confidence[:, nearest] > 0)
        labels = np.where(there, labels[:, nearest], labels)
    found: SmallArray = labels[:, tokens].T
    return found


def token_scores(profile: Profile, homes: SmallArray, ranks: int) -> FloatArray:
    """[V, ranks] share of each token id's choices with an expert on each rank, summed over layers.

    This is table T of Semantic Parallelism's Algorithm 2. Ids that the profile has never seen have the
    scores of their nearest known id, or 0 without one.
    """
    size = profile.vocab_size
    found = np.zeros((size, ranks))
    for counts, table in zip(profile.counts, homes, strict=True):
        total = np.bincount(counts.tokens, counts.counts, minlength=size)
        shares = counts.counts / total[counts.tokens]
        for copy in table.T:
            held = copy[counts.experts]
            there = held >= 0
            keys = counts.tokens[there] * ranks + held[there]
            found += np.bincount(keys, shares[there], minlength=size * ranks).reshape(size, ranks)
    if profile.nearest is not None:
        unseen = ~found.any(axis=1)
        found[unseen] = found[profile.nearest[unseen]]
    return found


def request_scores(scores: FloatArray, routes: Routes) -> FloatArray:
    """[r, ranks] sum of `scores` [V, ranks] over the tokens of each request's prompt.

    Its answer is not known yet.
    """
    places = np.arange(len(routes.tokens)) - routes.starts[routes.owners]
    prompt = places < routes.prompts[routes.owners]
    owners, tokens = routes.owners[prompt], routes.tokens[prompt]
    columns = [np.bincount(owners, column[tokens], minlength=routes.requests) for column in scores.T]
    return np.stack(columns, axis=1)


Rule = Literal["affinity", "rounds", "best"]


def request_ranks(
    scores: FloatArray, lengths: IntArray, rule: Rule = "affinity", worth: FloatArray | None = None
) -> SmallArray:
    """[r] the rank of each request, in order of arrival, chosen by scores [r, ranks].

    `affinity` and `rounds` are the rules of policy/placement/dispatch.py, as if no request ended before the
    last one arrives. `best` takes the rank with the best score and ignores balance. Ties go to the rank
    with fewer tokens so far. lengths: [r] tokens of each request. worth: [R, W] of `link_prices.worth_of`;
    the result is then the worker of each request. None: only pairs on the own rank count.

    Example with two ranks and scores 9 1, 8 2, 7 3, 1 5:

      - `rounds` gives 0, 1 (rank 0 had its turn), 0, 1.
      - `best` gives 0, 0, 0, 1.
      - `affinity` gives 0, 0, 1, 1. The third prompt has 70 % on rank 0, less than 73 %, the mean of 50, 90
        and 80 %.
    """
    values = center_scores(scores) if rule == "affinity" else scores
    values = values if worth is None else values @ worth
    ranks = values.shape[1]
    counts, tokens = np.zeros(ranks, dtype=np.int64), np.zeros(ranks)
    ahead = {"affinity": AHEAD, "rounds": 1, "best": len(scores) + 1}[rule]
    found = np.empty(len(scores), dtype=np.int16)
    for request, row in enumerate(values):
        allowed = np.where(counts < counts.min() + ahead, row, -np.inf)
        best = allowed.max()
        tied = np.flatnonzero(allowed >= best - EXACT * max(1.0, abs(best)))
        rank = found[request] = tied[tokens[tied].argmin()]
        counts[rank] += 1
        tokens[rank] += lengths[request]
    return found


def center_scores(scores: FloatArray) -> FloatArray:
    """[r, ranks] shares of each request minus the mean of an even request and those before; 0 without
    scores."""
    total, ranks = scores.sum(axis=1, keepdims=True), scores.shape[1]
    shares = np.divide(scores, total, out=np.zeros(scores.shape), where=total > 0)
    sums = np.cumsum(shares, axis=0) - shares + 1 / ranks
    prompts = np.cumsum(total > 0, axis=0) - (total > 0) + 1
    centred_shares: FloatArray = np.where(total > 0, shares - sums / prompts.reshape(-1, 1), 0.0)
    return centred_shares


# ---- measures


def local_activation_rate(hosts: SmallArray, own_ranks: SmallArray) -> FloatArray:
    """[layers] share of (token, expert) pairs that have the expert on the token's own rank.

    All layers have the same number of pairs, so the mean is the overall rate. hosts: [t, layers, k].
    own_ranks: [t, layers]. Raises ConfigError if there are no tokens.

    Example: a token on rank 1 with experts on ranks 1 1 0 0 -> 0.5.
    """
    if not len(own_ranks):
        raise ConfigError.field("requests to measure on", 0, "1 or more")
    rate: FloatArray = (hosts == own_ranks[:, :, None]).mean(axis=(0, 2))
    return rate


def rank_loads(hosts: SmallArray, ranks: int) -> IntArray:
    """[layers, ranks] number of pairs that each rank computes. hosts: [t, layers, k]."""
    rows = [np.bincount(hosts[:, layer].ravel(), minlength=ranks) for layer in range(hosts.shape[1])]
    return np.stack(rows).astype(np.int64)


def remote_ranks(hosts: SmallArray, own_ranks: SmallArray) -> FloatArray:
    """[layers] mean number of other ranks with experts of a token. Each rank counts once per token.

    Example: a token on rank 1 with experts on ranks 1 0 0 2 -> 2.
    """
    sorted_hosts = np.sort(hosts, axis=2)
    new = np.ones(sorted_hosts.shape, dtype=np.bool_)
    new[:, :, 1:] = sorted_hosts[:, :, 1:] != sorted_hosts[:, :, :-1]
    count: FloatArray = (new & (sorted_hosts != own_ranks[:, :, None])).sum(axis=2).mean(axis=0)
    return count


def balancedness(loads: IntArray) -> FloatArray:
    """[layers] mean / max of loads [layers, ranks]. 1 means perfectly even. Example: 3 1 -> 2 / 3."""
    peak = loads.max(axis=1)
    return np.where(peak > 0, loads.mean(axis=1) / np.maximum(peak, 1), 1.0)


def max_over_median(loads: IntArray) -> FloatArray:
    """[layers] max / median of loads [layers, ranks], the papers' measure of imbalance.

    1 means perfectly even. It is infinite if only the median is 0, and 1 without load. Example: 6 2 1 -> 3.
    """
    peak, median = loads.max(axis=1).astype(np.float64), np.median(loads, axis=1)
    ratio = np.full(len(loads), np.inf)
    np.divide(peak, median, out=ratio, where=median > 0)
    return np.where(peak > 0, ratio, 1.0)


@dataclass(frozen=True)
class Locality:
    """The measures of one placement at one level, for each layer. Properties are means over the layers."""

    activation: FloatArray
    """[layers] local activation rate: the share of pairs that a token's own rank computes."""
    loads: IntArray
    """[layers, ranks] number of pairs that each rank computes."""
    tokens: IntArray
    """[layers, ranks] tokens on each rank."""
    distinct: FloatArray
    """[layers] mean number of other ranks that a token is sent to."""
    top_k: int

    @property
    def rate(self) -> float:
        """Mean local activation rate."""
        return float(self.activation.mean())

    @property
    def balancedness(self) -> float:
        return float(balancedness(self.loads).mean())

    @property
    def max_over_median(self) -> float:
        return float(max_over_median(self.loads).mean())

    def remote_bytes(
        self, hidden_size: int, number_bytes: int, deduplicate: bool = False, partial: bool = False
    ) -> float:
        """Bytes that a token sends to other ranks and receives from them, over all layers.

        Only payload counts.

        number_bytes: bytes of one number. deduplicate: a token is sent once to each rank, not once for each
        pair. partial: each rank answers with one sum, not with a row for each pair.

        Example: 2 layers, each with 3 remote pairs on 2 ranks, and rows of 8 bytes -> 96, or 80 with
        deduplicate.
        """
        pairs = float((self.top_k * (1.0 - self.activation)).sum())
        once = float(self.distinct.sum())
        return ((once if deduplicate else pairs) + (once if partial else pairs)) * hidden_size * number_bytes


def measure(
    experts: SmallArray,
    homes: SmallArray,
    own_ranks: SmallArray,
    ranks: int,
    prices: FloatArray | None = None,
) -> Locality:
    """All measures of a placement for some tokens.

    experts: [t, layers, k] choices of each token. homes: [layers, E, copies] ranks of each expert. own_ranks:
    [t, layers] or [t] the rank of each token. prices: see `hosts`. Raises ConfigError if there are no tokens.
    """
    if own_ranks.ndim == 1:
        own_ranks = np.broadcast_to(own_ranks[:, None], experts.shape[:2])
    pair_ranks = hosts(experts, homes, own_ranks, prices)
    return Locality(
        activation=local_activation_rate(pair_ranks, own_ranks),
        loads=rank_loads(pair_ranks, ranks),
        tokens=rank_loads(own_ranks[:, :, None], ranks),
        distinct=remote_ranks(pair_ranks, own_ranks),
        top_k=experts.shape[2],
    )


def token_level(clusters: Coclusters, routes: Routes, nearest: TokenArray | None = None) -> Locality:
    """Locality with attention-TP. nearest: [V] from the profile that `clusters` were made from."""
    own = token_ranks(clusters, routes.tokens, nearest)
    return measure(routes.experts, homes_of(clusters), own, clusters.ranks)


def request_owners(
    profile: Profile,
    homes: SmallArray,
    ranks: int,
    routes: Routes,
    rule: Rule = "affinity",
    prices: FloatArray | None = None,
) -> SmallArray:
    """[t] the rank of each token with attention-DP. See `request_level`."""
    scores = request_scores(token_scores(profile, homes, ranks), routes)
    worth = None if prices is None else worth_of(prices)
    return request_ranks(scores, np.diff(routes.starts), rule, worth)[routes.owners]


def request_level(
    profile: Profile,
    homes: SmallArray,
    ranks: int,
    routes: Routes,
    rule: Rule = "affinity",
    prices: FloatArray | None = None,
) -> Locality:
    """Locality with attention-DP.

    `profile` scores the prompts. homes: [layers, E, copies] ranks of each expert. prices: see `hosts`.
    """
    own = request_owners(profile, homes, ranks, routes, rule, prices)
    return measure(routes.experts, homes, own, ranks, prices)
