"""`moesaic place` for a profile that has loads of experts and no token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass

from moesaic.commands.options import Place
from moesaic.commands.place_formats import save, save_for_sglang
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.policy.placement import balance


@dataclass(frozen=True)
class _Balance:
    """How even the placement is, as means over the layers."""

    balancedness: float
    """Mean / max of the ranks' loads. 1 is perfect."""
    consecutive: float
    """The same for consecutive experts."""


def run(profile: Profile, options: Place, as_json: bool) -> int:
    """Write a placement that balances the loads, and print how even it is. Returns the exit code.

    There is nothing to hold out, so the figures are those of the profile itself. Raises ConfigError for
    options that need token ids.
    """
    _check(profile, options)
    assert options.output_file is not None
    ranks = dict.fromkeys(range(options.ranks), 1.0)
    placement = balance.place(
        profile.loads, profile.layers, ranks, options.redundant_experts, model=profile.model
    )
    consecutive = balance.place(profile.loads * 0, profile.layers, ranks, model=profile.model)
    if options.format == "sglang":
        save_for_sglang(placement, options.ranks, options.output_file)
    else:
        save(placement, None, options.output_file)
    figures = _Balance(_mean_balancedness(profile, placement), _mean_balancedness(profile, consecutive))
    print(_as_json(profile, options, figures) if as_json else _as_text(profile, options, figures))
    return 0


def _check(profile: Profile, options: Place) -> None:
    for flag, value in (
        ("--compare", options.compare),
        ("--plot", options.plot),
        ("--model", options.model),
        ("--topology", options.topology),
        ("--from", options.engine_map),
    ):
        if value:
            raise ConfigError(f"{flag}: {options.file} has loads of experts and no token ids")
    if options.solver not in (None, "eplb"):
        allowed_values = f"eplb: {options.file} has loads of experts and no token ids"
        raise ConfigError.field("--solver", options.solver, allowed_values)
    if options.ranks > profile.num_experts:
        allowed_values = f"1 to {profile.num_experts}, the experts of a layer"
        raise ConfigError.field("--ranks", options.ranks, allowed_values)
    max_copies = profile.num_experts * (options.ranks - 1)
    if options.redundant_experts > max_copies:
        allowed_values = f"0 to {max_copies}: each expert once on a rank"
        raise ConfigError.field("--redundant-experts", options.redundant_experts, allowed_values)


def _mean_balancedness(profile: Profile, placement: Placement) -> float:
    loads = balance.server_loads(profile.loads, placement, placement.servers)
    return float(balance.balancedness(loads).mean())


def _as_json(profile: Profile, options: Place, figures: _Balance) -> str:
    """The report as one line of JSON."""
    return json.dumps(
        {
            "profile": str(options.file),
            "model": profile.model,
            "ranks": options.ranks,
            "redundant_experts": options.redundant_experts,
            "balancedness": figures.balancedness,
            "balancedness_of_consecutive_experts": figures.consecutive,
            "written": {"solver": "eplb", "placement": str(options.output_file), "tables": None},
        }
    )


def _as_text(profile: Profile, options: Place, figures: _Balance) -> str:
    return (
        f"{profile.model}: loads of {profile.num_experts} experts in {len(profile.layers)} layers\n"
        f"mean/max load of {options.ranks} ranks: {figures.consecutive:.2f} with consecutive experts, "
        f"{figures.balancedness:.2f} placed by load (eplb), both on this profile\n"
        f"wrote {options.output_file}, without tables of tokens"
    )
