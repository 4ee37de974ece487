"""`moesaic profile show`: prints how skewed and how predictable a model's routing is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape as html_escape
from io import StringIO
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from moesaic.commands import routing_picture
from moesaic.commands.html_page import document
from moesaic.commands.options import ShowProfile
from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile, Routes
from moesaic.policy.placement.routing_prediction import LAYERS_BACK, Prediction, examine
from moesaic.policy.placement.routing_statistics import (
    DISTANCES,
    LayerStatistics,
    Quartiles,
    Statistics,
    describe,
    map_together,
    sample,
)


def show(options: ShowProfile, as_json: bool = False) -> int:
    """Print the statistics and, if wanted, draw them. Returns the exit code.

    Raises ConfigError for a file that is not a profile or has no tokens, and for a picture that cannot be
    written.
    """
    profile = Profile.load(options.file)
    if not profile.tokens:
        raise ConfigError(f"{options.file}: this profile counts no tokens")
    if not profile.token_ids:
        raise ConfigError(f"{options.file}: this profile has loads of experts and no token ids to examine")
    with Console(stderr=True).status("counting"):
        routes = sample(profile.routes, options.tokens, options.seed)
        statistics = describe(profile, routes)
        ranks = min(options.ranks, profile.num_experts)
        prediction = examine(profile, routes, options.profile_share, ranks, options.seed)
    if options.plot is not None:
        _draw(options, profile, routes, statistics, prediction)
    if options.html is not None:
        _write_page(options, profile, routes, statistics, prediction)
    if as_json:
        print(json.dumps(report(statistics, prediction)))
    else:
        _print(statistics, prediction, Console(highlight=False))
    return 0


def report(statistics: Statistics, prediction: Prediction | None) -> dict[str, object]:
    """The object that `--json` prints: the fields of both arguments, with null for infinite values."""
    found = asdict(statistics)
    for layer in found["layers"]:
        if layer["max_over_median"] == float("inf"):
            layer["max_over_median"] = None
    return found | {"distances": DISTANCES, "prediction": prediction and asdict(prediction)}


def _draw(
    options: ShowProfile,
    profile: Profile,
    routes: Routes,
    statistics: Statistics,
    prediction: Prediction | None,
) -> None:
    assert options.plot is not None
    _write("--plot", options.plot, _picture(profile, routes, statistics, prediction))


def _write_page(
    options: ShowProfile,
    profile: Profile,
    routes: Routes,
    statistics: Statistics,
    prediction: Prediction | None,
) -> None:
    assert options.html is not None
    tables = Console(file=StringIO(), width=120, highlight=False, force_terminal=False)
    _print(statistics, prediction, tables)
    assert isinstance(tables.file, StringIO)
    sections = [
        _picture(profile, routes, statistics, prediction),
        f"<pre>{html_escape(tables.file.getvalue())}</pre>",
    ]
    about = f"routing of {statistics.model}, drawn by moesaic profile show"
    _write("--html", options.html, document(options.file.name, about, sections))


def _picture(profile: Profile, routes: Routes, statistics: Statistics, prediction: Prediction | None) -> str:
    middle = len(profile.layers) // 2
    pairs = map_together(routes, middle, profile.num_experts)
    return routing_picture.draw(statistics, prediction, pairs, middle)


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error.strerror}") from error


# ---- for people


def _print(statistics: Statistics, prediction: Prediction | None, console: Console) -> None:
    console.print(_facts(statistics, prediction))
    console.print(_concentration(statistics.layers))
    console.print(_company(statistics.layers))
    console.print(_repeats(statistics.layers))
    if prediction is None:
        console.print("no predictions: they need at least two recorded requests")
        return
    console.print(_experts(prediction))
    console.print(_ranks(prediction))


def _facts(statistics: Statistics, prediction: Prediction | None) -> Table:
    rows = {
        "model": statistics.model,
        "tokens": f"{statistics.tokens:,}, with {statistics.token_ids:,} of {statistics.vocab_size:,} ids",
        "experts": f"top {statistics.top_k} of {statistics.num_experts} in {len(statistics.layers)} layers",
        "requests": f"{statistics.requests:,} examined",
    }
    if prediction is not None:
        asked, learned = prediction.asked_requests, prediction.learned_requests
        rows["held out"] = f"{asked:,} requests, predicted from the other {learned:,}"
    found = statistics.requests_map
    if found is not None and found.neighbours is not None and found.neighbours_by_chance is not None:
        chance = f"{found.neighbours_by_chance:.1%} by chance"
        rows["topics"] = f"the nearest request has the same topic in {found.neighbours:.1%}, {chance}"
    shown = Table(show_header=False, box=None)
    for name, value in rows.items():
        shown.add_row(name, escape(value))
    return shown


def _concentration(layers: Sequence[LayerStatistics]) -> Group:
    shown = _table("layer", "F1", "top-k hotness", "hottest other", "kurtosis")
    for layer in layers:
        shares = [_three(part, ".3f") for part in (layer.f1, layer.top_hotness, layer.rest_hotness)]
        shown.add_row(str(layer.layer), *shares, _three(layer.kurtosis, ".1f"))
    return _titled("Concentration of each token id's experts: p25/p50/p75", shown)


def _company(layers: Sequence[LayerStatistics]) -> Group:
    shown = _table("layer", "max / mean", "max / median", "partners", "by chance")
    for layer in layers:
        skew = (f"{layer.loads[0]:.2f}", f"{layer.max_over_median:.2f}")
        shown.add_row(str(layer.layer), *skew, f"{layer.partners:.1%}", f"{layer.partners_by_chance:.1%}")
    return _titled("Load skew, and choices together with an expert's most common partners", shown)


def _repeats(layers: Sequence[LayerStatistics]) -> Group:
    distances = DISTANCES[: len(layers[0].repeated)]
    shown = _table("layer", "by chance", *map(str, distances))
    rows = [(str(layer.layer), [layer.repeated_by_chance, *layer.repeated]) for layer in layers]
    title = "Experts that an earlier token also chose, by distance in tokens"
    return _titled(title, _with_mean(shown, rows))


def _experts(prediction: Prediction) -> Group:
    shown = _table("layer", "precision", "F1", "hits", *(f"by {back}" for back in range(LAYERS_BACK + 1)))
    rows = [
        (str(part.layer), [part.static.precision, part.static.f1, part.static.hits, *part.look_back])
        for part in prediction.layers
    ]
    title = f"Experts predicted from the token id, and from 0 to {LAYERS_BACK} earlier layers"
    return _titled(title, _with_mean(shown, rows))


def _ranks(prediction: Prediction) -> Group:
    shown = _table("layer", "busiest", "token", "2-gram", "both", "most")
    rows = [(str(part.layer), list(asdict(part.ranks).values())) for part in prediction.layers]
    title = f"Local pairs on the predicted rank: {prediction.ranks} ranks, vanilla placement"
    return _titled(title, _with_mean(shown, rows))


def _with_mean(shown: Table, rows: Sequence[tuple[str, Sequence[float]]]) -> Table:
    """`shown` with the rows as percentages, and a last row of their means over all layers with a value."""
    longest = max(len(values) for _, values in rows)
    for name, values in rows:
        shown.add_row(name, *(f"{value:.1%}" for value in values))
    columns = [[values[i] for _, values in rows if i < len(values)] for i in range(longest)]
    shown.add_section()
    shown.add_row("mean", *(f"{sum(column) / len(column):.1%}" for column in columns))
    return shown


def _three(quartiles: Quartiles, how: str) -> str:
    return "/".join(format(value, how) for value in (quartiles.p25, quartiles.p50, quartiles.p75))


def _table(*columns: str) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        shown.add_column(name, justify="right")
    return shown


def _titled(title: str, shown: Table) -> Group:
    return Group(f"[bold]{title}[/]", shown)
