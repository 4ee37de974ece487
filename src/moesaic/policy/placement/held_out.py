"""Measures a placement on requests that its solver has not seen.

Speculative MoE and Sem-MoE profile 20 % of the requests and test on the other 80 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.policy.placement.link_prices import HostMap, LinkLoads, link_loads
from moesaic.policy.placement.locality import (
    FloatArray,
    Locality,
    homes_in,
    hosts,
    measure,
    request_level,
    request_owners,
    token_ranks,
)


@dataclass(frozen=True)
class Measured:
    """The measures of a placement on held-out requests."""

    token: Locality
    """Locality with attention-TP: each layer sends a token to the rank of its id."""
    request: Locality
    """Locality with attention-DP: requests arrive in order and are dispatched as by `--dispatch affinity`."""


def split(profile: Profile, share: float, seed: int) -> tuple[Profile, Routes]:
    """Split a profile: a profile of a random `share` of its recorded requests, and the routes of the
    others.

    The others come in random order. If they were recorded topic by topic, all requests of a round would be
    alike. A token id that only the others have is looked up as itself, since its nearest id among fewer
    known ones has not been computed. Raises ConfigError if one side is empty.
    """
    routes = profile.routes
    if routes.requests < 2:
        allowed = "2 or more, so that some can be held out. Record more requests, or raise --max-memory"
        allowed += " (serve: --record-routing-memory): routes get the memory that counts leave free"
        raise ConfigError.field("requests with recorded routes", routes.requests, allowed)
    learned, held_out = routes.split(share, seed)
    if not held_out.requests or not len(held_out.tokens) or not len(learned.tokens):
        allowed = f"a share that leaves some of the {routes.requests} requests with routes on each side"
        raise ConfigError.field("--share", share, allowed)
    rng = np.random.default_rng(seed)
    return profile.with_routes(learned), held_out.select(rng.permutation(held_out.requests))


def unseen(learned: Profile, held_out: Routes) -> float:
    """Share of the held-out tokens with ids that `learned` does not know."""
    return float(1 - np.isin(held_out.tokens, learned.counts[0].known_tokens).mean())


def measure_placement(
    learned: Profile,
    clusters: Coclusters,
    placement: Placement,
    held_out: Routes,
    prices: FloatArray | None = None,
) -> Measured:
    """Measure a placement on the held-out requests.

    learned: the profile that `clusters` were made from. placement: that of the clusters, possibly with more
    copies. prices: [R, R] of the links, by which replicas are chosen and requests are dispatched. None: all
    links are alike.
    """
    homes, ranks = homes_in(placement, learned.layers), clusters.ranks
    own = token_ranks(clusters, held_out.tokens, learned.nearest)
    return Measured(
        token=measure(held_out.experts, homes, own, ranks, prices),
        request=request_level(learned, homes, ranks, held_out, prices=prices),
    )


def measure_links(
    learned: Profile, placement: Placement, held_out: Routes, there: HostMap, aware: bool
) -> LinkLoads:
    """What a token of the held-out requests sends from host to host, with attention-DP.

    aware: replicas are chosen and requests are dispatched by the links of `there`. Otherwise all links count
    alike. Workers without a server of their own then take requests in turn.
    """
    homes, ranks, workers = homes_in(placement, learned.layers), len(there.servers), len(there.workers)
    prices = there.prices if aware else None
    if aware or there.beside:
        own = request_owners(learned, homes, ranks, held_out, prices=prices)
    else:
        own = (held_out.owners % workers).astype(np.int16)
    each = np.broadcast_to(own[:, None], held_out.experts.shape[:2])
    blind = prices if there.beside else np.ones((workers, ranks))
    found = hosts(held_out.experts, homes, each, there.prices if aware else blind)
    return link_loads(found, each, there)
