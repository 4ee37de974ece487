"""`moesaic place`: measures solvers on held-out requests, writes one's placement, and draws it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from moesaic.commands import activation_picture
from moesaic.commands.place_options import TABLES, Place
from moesaic.commands.place_report import Report, Trial, Written, as_json, as_text
from moesaic.commands.progress import Show, progress
from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tables import Tables
from moesaic.policy.placement import held_out, redundancy
from moesaic.policy.placement.activation_map import activation_map, commonest, dealt
from moesaic.policy.placement.solvers import SOLVERS

Clock = Callable[[], float]
DRAWN = 160
"""Token ids in a picture."""


@dataclass(frozen=True)
class _Solving:
    """How solvers are called."""

    options: Place
    show: Show
    clock: Clock

    def solve(self, name: str, profile: Profile, what: str) -> tuple[Coclusters, Placement, float]:
        """Clusters, the placement with its copies, and the seconds that both took."""
        options, begun = self.options, self.clock()
        clusters = SOLVERS[name](profile, options.ranks, options.seed, partial(self.show, what))
        placement = redundancy.place(profile, clusters, options.redundant_experts)
        return clusters, placement, self.clock() - begun


def run(options: Place, json: bool, clock: Clock = time.monotonic) -> int:
    """Measure, write, and print what came out; returns the exit code.

    Raises ConfigError for a file that is no profile, for requests that cannot be split, for ranks and copies
    that the experts are too few for, for a --model or --plot-layer that is not the profile's, and for files
    that cannot be written.
    """
    profile = Profile.load(options.file)
    if not profile.tokens:
        raise ConfigError(f"{options.file}: this profile counts no tokens")
    _layer_drawn(profile, options)
    with progress(Console(stderr=True), clock, "steps/s") as show:
        if options.model is not None:
            from moesaic.profiling.nearest import with_nearest

            profile = with_nearest(profile, options.file, options.model, partial(show, "nearest tokens"))
        report = place(profile, options, _Solving(options, show, clock))
    print(as_json(report) if json else as_text(report))
    return 0


def place(profile: Profile, options: Place, solving: _Solving) -> Report:
    """What was asked for, done. The file is solved on all counts: what it is worth is measured before."""
    learned, others = held_out.split(profile, options.share, options.seed)
    trials: list[Trial] = []
    skipped: list[str] = []
    for name in options.measured:
        try:
            clusters, placement, seconds = solving.solve(name, learned, name)
        except ConfigError as error:
            if name != "metis" or not options.compare:  # it needs a package that few have
                raise
            skipped.append(f"metis is left out: {error}")
            continue
        found = held_out.measured(learned, clusters, placement, others)
        trials.append(Trial(name, seconds, found, clusters.notes))
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
    clusters, placement, seconds = solving.solve(name, profile, f"{name}, on everything")
    file = options.output_file.with_suffix(TABLES)
    tables = redundancy.tables_of(profile, clusters, placement)
    save(
        Placement(0, placement.num_experts, placement.held, placement.model, file.name),
        tables,
        options.output_file,
    )
    if options.plot is not None:
        _draw(options.plot, profile, options, name, clusters)
    return Written(name, options.output_file, file, seconds, tables.nbytes, clusters.notes)


def _layer_drawn(profile: Profile, options: Place) -> int:
    """Its index among the profile's layers. Raises ConfigError for a number that it has not."""
    if options.plot_layer is None:
        return len(profile.layers) // 2
    if options.plot_layer not in profile.layers:
        allowed = f"one with routed experts: {', '.join(map(str, profile.layers))}"
        raise ConfigError.field("--plot-layer", options.plot_layer, allowed)
    return profile.layers.index(options.plot_layer)


def _draw(path: Path, profile: Profile, options: Place, name: str, clusters: Coclusters) -> None:
    """The commonest token ids of a layer: dealt out in their order, then each where it is best off, with
    vanilla's experts and with those of `clusters`."""
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
    title = f"{profile.model}, layer {profile.layers[index]}: how often the {len(tokens)} commonest token ids"
    try:
        path.write_text(activation_picture.draw(f"{title} choose each expert", maps), encoding="utf-8")
    except OSError as error:
        raise ConfigError.field("--plot", str(path), f"a file to write into ({error.strerror})") from error


def save(placement: Placement, tables: Tables, path: Path) -> None:
    """Write the placement, and beside it the tables that it names: both or neither.

    Raises ConfigError where they cannot be written.
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
