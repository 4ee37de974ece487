"""Measures a placement on requests that its solver did not see.

Speculative MoE and Sem-MoE profile 20 % of the requests and test on the other 80 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.policy.placement.locality import Locality, homes_in, measure, request_level, token_ranks


@dataclass(frozen=True)
class Measured:
    """The measures of a placement on held-out requests."""

    token: Locality
    """Attention-TP: each layer sends a token to the rank of its id."""
    request: Locality
    """Attention-DP: requests are dispatched in their order by the rule of `--dispatch affinity`."""


def split(profile: Profile, share: float, seed: int) -> tuple[Profile, Routes]:
    """A profile made of a random `share` of the recorded requests, and the routes of the others.

    The others come in random order: if they were recorded topic by topic, the requests of a round would all
    be alike. An id that only they have is looked up as itself, since the nearest one among fewer known ids
    is not known here. Raises ConfigError if one side is empty.
    """
    routes = profile.routes
    if routes.requests < 2:
        allowed = "2 or more, to hold some out: record more, or with more --max-memory (serve:"
        allowed += " --record-routing-memory), of which routes have what the counts leave"
        raise ConfigError.field("requests with recorded routes", routes.requests, allowed)
    learned, held_out = routes.split(share, seed)
    if not held_out.requests or not len(held_out.tokens) or not len(learned.tokens):
        allowed = f"a share that leaves some of the {routes.requests} requests with routes on each side"
        raise ConfigError.field("--share", share, allowed)
    rng = np.random.default_rng(seed)
    return profile.of(learned), held_out.of(rng.permutation(held_out.requests))


def unseen(learned: Profile, held_out: Routes) -> float:
    """Share of the held-out tokens whose ids `learned` does not know."""
    return float(1 - np.isin(held_out.tokens, learned.counts[0].known).mean())


def measured(learned: Profile, clusters: Coclusters, placement: Placement, held_out: Routes) -> Measured:
    """The measures. learned: the profile that `clusters` were made from. placement: that of the clusters,
    possibly with more copies."""
    homes, ranks = homes_in(placement, learned.layers), clusters.ranks
    own = token_ranks(clusters, held_out.tokens, learned.nearest)
    return Measured(
        token=measure(held_out.experts, homes, own, ranks),
        request=request_level(learned, homes, ranks, held_out),
    )
