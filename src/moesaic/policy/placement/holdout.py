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
class PlacementMeasures:
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
    train_routes, test_routes = routes.split(share, seed)
    if not test_routes.requests or not len(test_routes.tokens) or not len(train_routes.tokens):
        allowed = f"a share that leaves some of the {routes.requests} requests with routes on each side"
        raise ConfigError.field("--share", share, allowed)
    rng = np.random.default_rng(seed)
    return profile.with_routes(train_routes), test_routes.select(rng.permutation(test_routes.requests))


def measure_unseen(train_profile: Profile, test_routes: Routes) -> float:
    """Share of the held-out tokens with ids that `train_profile` does not know."""
    return float(1 - np.isin(test_routes.tokens, train_profile.counts[0].known_tokens).mean())


def measure_placement(
    train_profile: Profile,
    clusters: Coclusters,
    placement: Placement,
    test_routes: Routes,
    prices: FloatArray | None = None,
) -> PlacementMeasures:
    """Measure a placement on the held-out requests.

    train_profile: the profile that `clusters` were made from. placement: that of the clusters, possibly
    with more
    copies. prices: [R, R] of the links, by which replicas are chosen and requests are dispatched. None: all
    links are alike.
    """
    homes, ranks = homes_in(placement, train_profile.layers), clusters.ranks
    own_ranks = token_ranks(clusters, test_routes.tokens, train_profile.nearest)
    return PlacementMeasures(
        token=measure(test_routes.experts, homes, own_ranks, ranks, prices),
        request=request_level(train_profile, homes, ranks, test_routes, prices=prices),
    )


def measure_links(
    train_profile: Profile, placement: Placement, test_routes: Routes, host_map: HostMap, aware: bool
) -> LinkLoads:
    """What a token of the held-out requests sends from host to host, with attention-DP.

    aware: replicas are chosen and requests are dispatched by the links of `host_map`. Otherwise all links
    count alike. Workers without a server of their own then take requests in turn.
    """
    homes, ranks, workers = (
        homes_in(placement, train_profile.layers),
        len(host_map.servers),
        len(host_map.workers),
    )
    prices = host_map.prices if aware else None
    if aware or host_map.workers_are_ranks:
        own_ranks = request_owners(train_profile, homes, ranks, test_routes, prices=prices)
    else:
        own_ranks = (test_routes.owners % workers).astype(np.int16)
    ranks_by_layer = np.broadcast_to(own_ranks[:, None], test_routes.experts.shape[:2])
    blind = prices if host_map.workers_are_ranks else np.ones((workers, ranks))
    pair_servers = hosts(test_routes.experts, homes, ranks_by_layer, host_map.prices if aware else blind)
    return link_loads(pair_servers, ranks_by_layer, host_map)
