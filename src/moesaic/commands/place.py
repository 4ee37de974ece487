"""`moesaic place`: measures solvers on held-out requests, writes the placement of one and draws it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from rich.console import Console

from moesaic.commands import activation_picture, place_by_load
from moesaic.commands.options import TABLES, Place
from moesaic.commands.place_links import LinkReport
from moesaic.commands.place_report import Report, Trial, Written, as_json, as_text
from moesaic.commands.progress import Show, progress
from moesaic.commands.writable import require_writable
from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.core.tables import Tables
from moesaic.core.topology import Topology
from moesaic.core.topology import read as read_topology
from moesaic.policy.placement import held_out, redundancy
from moesaic.policy.placement.activation_map import activation_map, commonest, dealt
from moesaic.policy.placement.link_prices import HostMap
from moesaic.policy.placement.locality import FloatArray
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.policy.placement.solvers.priced import priced

Clock = Callable[[], float]
DRAWN = 160
"""Number of token ids in a picture."""


@dataclass(frozen=True)
class _Solved:
    """The result of a solver."""

    clusters: Coclusters
    placement: Placement
    """That of the clusters, with copies."""
    seconds: float
    """Seconds that both took."""
    blind: Placement
    """The placement if all links were alike."""


@dataclass(frozen=True)
class _Solving:
    """Calls solvers with the settings of a run."""

    options: Place
    show: Show
    clock: Clock
    topology: Topology | None = None

    @cached_property
    def there(self) -> HostMap | None:
        """Where workers and servers are. None without --topology."""
        topology, ranks = self.topology, self.options.ranks
        if topology is None:
            return None
        places = topology.worker_places(), topology.server_places(ranks), len(topology.hosts)
        return HostMap(topology.prices(ranks), *places, topology.beside(ranks))

    @property
    def prices(self) -> FloatArray | None:
        """[W, R] seconds of a byte. None without --topology, and if one host has all processes."""
        return None if self.there is None or self.there.alike else self.there.prices

    @property
    def rank_prices(self) -> FloatArray | None:
        """The prices, where workers are ranks. Elsewhere no pair is on a token's own rank."""
        return self.prices if self.there is not None and self.there.beside else None

    def solve(self, name: str, profile: Profile, what: str) -> _Solved:
        """Run solver `name`. what: name of the progress bar."""
        options, begun, copies = self.options, self.clock(), self.options.redundant_experts
        clusters = SOLVERS[name](profile, options.ranks, options.seed, partial(self.show, what))
        placement = blind = redundancy.place(profile, clusters, copies)
        if (prices := self.prices) is not None:
            clusters = priced(profile, clusters, prices, options.seed, partial(self.show, f"{what}, links"))
            placement = redundancy.place(profile, clusters, copies, prices=self.rank_prices)
        return _Solved(clusters, placement, self.clock() - begun, blind)

    def links(self, learned: Profile, solved: _Solved, others: Routes) -> LinkReport | None:
        """What the links carry before and after they are priced. None without --topology."""
        there = self.there
        if self.topology is None or there is None:
            return None
        before = held_out.measure_links(learned, solved.blind, others, there, aware=False)
        after = held_out.measure_links(learned, solved.placement, others, there, aware=not there.alike)
        return LinkReport(self.topology, before, after, there.beside)


def run(options: Place, json: bool, clock: Clock = time.monotonic) -> int:
    """Measure solvers, write a placement, and print the report. Returns the exit code.

    Raises ConfigError for a file that is not a profile, for requests that cannot be split, and for files that
    cannot be written. The same holds for too many ranks or copies, and for a --model or --plot-layer that the
    profile does not have.
    """
    require_writable("--output-file", options.output_file)
    require_writable("--plot", options.plot)
    profile = Profile.load(options.file)
    if not profile.tokens:
        raise ConfigError(f"{options.file}: this profile counts no tokens")
    if not profile.token_ids:
        return place_by_load.run(profile, options, json)
    _layer_drawn(profile, options)
    topology = None if options.topology is None else read_topology(options.topology)
    if topology is not None:
        topology.check_ranks(options.ranks)
    with progress(Console(stderr=True), clock, "steps/s") as show:
        if options.model is not None:
            from moesaic.jobs.profiling.importing import with_nearest

            profile = with_nearest(profile, options.file, options.model, partial(show, "nearest tokens"))
        report = place(profile, options, _Solving(options, show, clock, topology))
    print(as_json(report) if json else as_text(report))
    return 0


def place(profile: Profile, options: Place, solving: _Solving) -> Report:
    """Measure the wanted solvers on held-out requests, then write the chosen placement.

    The measured placements are solved on a share of the requests. The written one is solved on all of them.
    """
    learned, others = held_out.split(profile, options.share, options.seed)
    trials: list[Trial] = []
    skipped: list[str] = []
    for name in options.measured:
        try:
            solved = solving.solve(name, learned, name)
        except ConfigError as error:
            if name != "metis" or not options.compare:  # metis needs an optional package
                raise
            skipped.append(f"metis was skipped: {error}")
            continue
        found = held_out.measure_placement(
            learned, solved.clusters, solved.placement, others, solving.rank_prices
        )
        links = solving.links(learned, solved, others)
        trials.append(Trial(name, solved.seconds, found, solved.clusters.notes, links))
    return Report(
        options=options,
        profile=profile,
        learned_requests=learned.routes.requests,
        held_out=others,
        unseen=held_out.unseen(learned, others),
        trials=trials,
        skipped=skipped,
        written=None if options.chosen is None else _write(profile, options, options.chosen, solving),
    )


def _write(profile: Profile, options: Place, name: str, solving: _Solving) -> Written:
    assert options.output_file is not None
    solved = solving.solve(name, profile, f"{name}, on the whole profile")
    clusters, placement = solved.clusters, solved.placement
    file = options.output_file.with_suffix(TABLES)
    tables = redundancy.tables_of(profile, clusters, placement)
    save(
        Placement(0, placement.num_experts, placement.held, placement.model, file.name),
        tables,
        options.output_file,
    )
    if options.plot is not None:
        _draw(options.plot, profile, options, name, clusters)
    return Written(name, options.output_file, file, solved.seconds, tables.nbytes, clusters.notes)


def _layer_drawn(profile: Profile, options: Place) -> int:
    """The index of the drawn layer among the profile's layers.

    Raises ConfigError for a layer that the profile does not have.
    """
    if options.plot_layer is None:
        return len(profile.layers) // 2
    if options.plot_layer not in profile.layers:
        allowed = f"one with routed experts: {', '.join(map(str, profile.layers))}"
        raise ConfigError.field("--plot-layer", options.plot_layer, allowed)
    return profile.layers.index(options.plot_layer)


def _draw(path: Path, profile: Profile, options: Place, name: str, clusters: Coclusters) -> None:
    """Draw the activation maps of a layer for its most common token ids.

    The first map distributes the ids over the ranks in their order. The other two put each id on the rank
    with most of its experts: in the vanilla placement, and in that of `clusters`.
    """
    index = _layer_drawn(profile, options)
    tokens = commonest(profile, index, DRAWN)
    vanilla = SOLVERS["vanilla"](profile, options.ranks, options.seed)
    maps = [
        (label, activation_map(profile, found, index, tokens))
        for label, found in (
            ("vanilla placement, ids in their order", dealt(vanilla, tokens)),
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


def save(placement: Placement, tables: Tables, path: Path) -> None:
    """Write the placement, and next to it the tables that it names. Writes both files or neither.

    Raises ConfigError if they cannot be written.
    """
    beside = path.with_name(placement.tables)
    unfinished = [file.with_name(f"{file.name}.new") for file in (beside, path)]
    try:
        tables.save(unfinished[0])
        unfinished[1].write_text(placement.to_json(), encoding="utf-8")
        unfinished[0].replace(beside)
        unfinished[1].replace(path)
    except OSError as error:
        allowed = f"a file to write into ({error.strerror})"
        raise ConfigError.field("--output-file", str(path), allowed) from error
    finally:
        for file in unfinished:
            file.unlink(missing_ok=True)
