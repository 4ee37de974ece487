"""`moesaic place`: measures solvers on held-out requests, writes the placement of one and draws it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from rich.console import Console

from moesaic.commands import activation_picture, place_by_load
from moesaic.commands.options import TABLES, Place
from moesaic.commands.place_formats import clusters_of, read_engine_map, save, save_for_sglang
from moesaic.commands.place_links import LinkReport
from moesaic.commands.place_report import (
    Report,
    Trial,
    WrittenPlacement,
    WrittenTables,
    as_json,
    as_text,
)
from moesaic.commands.progress import Show, progress
from moesaic.commands.writable import require_writable
from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.core.topology import Topology
from moesaic.core.topology import read as read_topology
from moesaic.policy.placement import holdout, redundancy
from moesaic.policy.placement.activation_map import activation_map, commonest, deal_tokens
from moesaic.policy.placement.link_prices import HostMap
from moesaic.policy.placement.locality import FloatArray
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.policy.placement.solvers.link_aware import solve_for_links

Clock = Callable[[], float]
DRAWN_TOKENS = 160
"""Number of token ids in a picture."""


@dataclass(frozen=True)
class _Solution:
    """The result of a solver."""

    clusters: Coclusters
    placement: Placement
    """The placement of the clusters, with copies of experts."""
    seconds: float
    """Seconds that the solver took, with the pricing of links."""
    unpriced_placement: Placement
    """The placement if all links were alike."""


@dataclass(frozen=True)
class _SolverRunner:
    """Calls solvers with the settings of a run."""

    options: Place
    show: Show
    clock: Clock
    topology: Topology | None = None

    @cached_property
    def host_map(self) -> HostMap | None:
        """Where workers and servers are. None without --topology."""
        topology, ranks = self.topology, self.options.ranks
        if topology is None:
            return None
        places = topology.worker_places(), topology.server_places(ranks), len(topology.hosts)
        return HostMap(topology.prices(ranks), *places, topology.has_ranks(ranks))

    @property
    def prices(self) -> FloatArray | None:
        """[W, R] seconds of a byte. None without --topology, and if one host has all processes."""
        return None if self.host_map is None or self.host_map.alike else self.host_map.prices

    @property
    def rank_prices(self) -> FloatArray | None:
        """The prices, where workers are ranks. Elsewhere no pair is on a token's own rank."""
        return self.prices if self.host_map is not None and self.host_map.workers_are_ranks else None

    def solve(self, name: str, profile: Profile, task: str) -> _Solution:
        """Run solver `name`. task: name of the progress bar."""
        options, start, copies = self.options, self.clock(), self.options.redundant_experts
        self.show(task, 0, 0)  # the first step may take long, and its time tells how long the others take
        clusters = SOLVERS[name](profile, options.ranks, options.seed, partial(self.show, task))
        placement = blind = redundancy.place(profile, clusters, copies)
        if (prices := self.prices) is not None:
            clusters = solve_for_links(
                profile, clusters, prices, options.seed, partial(self.show, f"{task}, links")
            )
            placement = redundancy.place(profile, clusters, copies, prices=self.rank_prices)
        return _Solution(clusters, placement, self.clock() - start, blind)

    def read(self, engine_map: Path, profile: Profile) -> _Solution:
        """The placement of a file, with tokens on the ranks that fit it. Links do not change it."""
        placement = read_engine_map(engine_map, profile, self.options.ranks)
        return _Solution(clusters_of(profile, placement, self.options.ranks), placement, 0.0, placement)

    def measure_links(
        self, learned_profile: Profile, solution: _Solution, held_out_routes: Routes
    ) -> LinkReport | None:
        """What the links carry before and after they are priced. None without --topology."""
        host_map = self.host_map
        if self.topology is None or host_map is None:
            return None
        unpriced_loads = holdout.measure_links(
            learned_profile, solution.unpriced_placement, held_out_routes, host_map, aware=False
        )
        priced_loads = holdout.measure_links(
            learned_profile, solution.placement, held_out_routes, host_map, aware=not host_map.alike
        )
        return LinkReport(self.topology, unpriced_loads, priced_loads, host_map.workers_are_ranks)


def run(options: Place, json: bool, clock: Clock = time.monotonic) -> int:
    """Measure solvers, write a placement, and print the report. Returns the exit code.

    Raises ConfigError for a file that is not a profile, for requests that cannot be split, and for files that
    cannot be written. The same holds for too many ranks or copies, and for a --model or --plot-layer that the
    profile does not have.
    """
    # A solver may take minutes, so a file that cannot be written is found out before.
    require_writable("--output-file", options.output_file)
    require_writable("--plot", options.plot)
    profile = Profile.load(options.file)
    if not profile.tokens:
        raise ConfigError(f"{options.file}: this profile counts no tokens")
    if not profile.token_ids:
        return place_by_load.run(profile, options, json)
    _find_drawn_layer(profile, options)
    topology = None if options.topology is None else read_topology(options.topology)
    if topology is not None:
        topology.check_ranks(options.ranks)
    with progress(Console(stderr=True), clock, "steps/s") as show:
        if options.model is not None:
            from moesaic.jobs.profiling.importing import with_nearest

            model = options.model, options.revision, options.hf_overrides
            profile = with_nearest(profile, options.file, model, partial(show, "nearest tokens"))
        report = place(profile, options, _SolverRunner(options, show, clock, topology))
    print(as_json(report) if json else as_text(report))
    return 0


def place(profile: Profile, options: Place, runner: _SolverRunner) -> Report:
    """Measure the wanted solvers on held-out requests, then write the chosen placement.

    The measured placements are solved on a share of the requests. The written one is solved on all of them.
    """
    learned_profile, held_out_routes = holdout.split(profile, options.share, options.seed)
    trials: list[Trial] = []
    skip_notes: list[str] = []

    def measure(name: str, solution: _Solution) -> None:
        measurement = holdout.measure_placement(
            learned_profile, solution.clusters, solution.placement, held_out_routes, runner.rank_prices
        )
        links = runner.measure_links(learned_profile, solution, held_out_routes)
        trials.append(Trial(name, solution.seconds, measurement, solution.clusters.notes, links))

    if options.engine_map is not None:
        measure(f"from {options.engine_map.name}", runner.read(options.engine_map, learned_profile))
    for name in options.solvers_to_measure:
        try:
            solution = runner.solve(name, learned_profile, name)
        except ConfigError as error:
            if name != "metis" or not options.compare:  # metis needs an optional package
                raise
            skip_notes.append(f"metis was skipped: {error}")
            continue
        measure(name, solution)
    return Report(
        options=options,
        profile=profile,
        learned_requests=learned_profile.routes.requests,
        held_out_routes=held_out_routes,
        unseen_share=holdout.measure_unseen(learned_profile, held_out_routes),
        trials=trials,
        skip_notes=skip_notes,
        written_placement=None
        if options.solver_to_write is None
        else _write(profile, options, options.solver_to_write, runner),
    )


def _write(profile: Profile, options: Place, name: str, runner: _SolverRunner) -> WrittenPlacement:
    assert options.output_file is not None
    solution = runner.solve(name, profile, f"{name}, on the whole profile")
    clusters, placement = solution.clusters, solution.placement
    written_tables = None
    if options.format == "sglang":
        save_for_sglang(placement, options.ranks, options.output_file)
    else:
        file = options.output_file.with_suffix(TABLES)
        tables = redundancy.tables_of(profile, clusters, placement)
        save(replace(placement, tables=file.name), tables, options.output_file)
        written_tables = WrittenTables(file, tables.nbytes)
    if options.plot is not None:
        _draw(options.plot, profile, options, name, clusters)
    return WrittenPlacement(name, options.output_file, written_tables, solution.seconds, clusters.notes)


def _find_drawn_layer(profile: Profile, options: Place) -> int:
    """The index of the drawn layer among the profile's layers.

    Raises ConfigError for a layer that the profile does not have.
    """
    if options.plot_layer is None:
        return len(profile.layers) // 2
    if options.plot_layer not in profile.layers:
        layers_text = f"one with routed experts: {', '.join(map(str, profile.layers))}"
        raise ConfigError.field("--plot-layer", options.plot_layer, layers_text)
    return profile.layers.index(options.plot_layer)


def _draw(path: Path, profile: Profile, options: Place, name: str, clusters: Coclusters) -> None:
    """Draw the activation maps of a layer for its most common token ids.

    The first map distributes the ids over the ranks in their order. The other two put each id on the rank
    with most of its experts: in the vanilla placement, and in that of `clusters`.
    """
    index = _find_drawn_layer(profile, options)
    tokens = commonest(profile, index, DRAWN_TOKENS)
    vanilla = SOLVERS["vanilla"](profile, options.ranks, options.seed)
    maps = [
        (label, activation_map(profile, clusters_of_map, index, tokens))
        for label, clusters_of_map in (
            ("vanilla placement, ids in their order", deal_tokens(vanilla, tokens)),
            ("vanilla placement, ids on their best rank", vanilla),
            (f"placed by {name}, ids on their best rank", clusters),
        )
    ]
    layer = f"{profile.model}, layer {profile.layers[index]}"
    title = f"{layer}: how often the {len(tokens)} most common token ids choose each expert"
    try:
        path.write_text(activation_picture.draw(title, maps), encoding="utf-8")
    except OSError as error:
        raise ConfigError.field("--plot", str(path), f"a file to write into ({error.strerror})") from error
