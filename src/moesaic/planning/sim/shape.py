"""What the simulation needs to know of a model: its routed layers, and how tokens choose experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.profile import Profile
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.sim import routes
from moesaic.planning.sim.fleet import build_layout
from moesaic.planning.sim.routes import Routes
from moesaic.planning.sim.scenario import Scenario


@dataclass(frozen=True)
class Shape:
    """The routed layers, counted from 0, and the choices of tokens there."""

    layout: ExpertLayout
    routes: Routes

    @classmethod
    def from_scenario(cls, scenario: Scenario, model: ModelSizes) -> Shape:
        """Raises ConfigError for a profile that cannot be read or does not fit the model."""
        table, layers = scenario.routing, model.moe_layers
        experts = table.experts or model.experts
        top_k = table.top_k or round(model.top_k)
        if not 1 <= top_k <= experts:
            raise ConfigError.field("routing.top_k", top_k, f"1 to {experts}, the experts of a layer")
        if table.file is None:
            shares = _distribution_shares(scenario, layers, experts)
        else:
            shares = _profile_shares(Profile.load(scenario.path(table.file)), layers, experts)
        layout = build_layout(layers, experts, top_k, model.hidden, model.expert_width)
        return cls(layout, Routes(shares, top_k, scenario.seed, table.moves_every))


def _profile_shares(profile: Profile, layers: int, experts: int) -> routes.FloatArray:
    """[layers, E] the shares of a profile. An expert that no token chose gets a very small one."""
    if (len(profile.layers), profile.num_experts) != (layers, experts):
        got = f"{len(profile.layers)} layers with {profile.num_experts} experts"
        raise ConfigError.field("routing.file", got, f"{layers} layers with {experts} experts")
    # A share of zero could leave a row with fewer than top-k experts to draw.
    return routes.normalize(profile.loads.astype(np.float64) + 1e-9)


def _distribution_shares(scenario: Scenario, layers: int, experts: int) -> routes.FloatArray:
    """[layers, E] the shares of a distribution."""
    table = scenario.routing
    if table.kind == "exponential":
        shares = routes.exponential(experts)
    elif table.kind == "zipf":
        shares = routes.zipf(experts, table.exponent)
    else:
        shares = np.full(experts, 1 / experts)
    if not table.shuffled:
        return np.tile(shares, (layers, 1))
    rng = np.random.default_rng([scenario.seed, 2])
    return np.stack([rng.permutation(shares) for _ in range(layers)])
