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
    map_coactivations,
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
    fields = asdict(statistics)
    for layer in fields["layers"]:
        if layer["max_over_median"] == float("inf"):
            layer["max_over_median"] = None
    return fields | {"distances": DISTANCES, "prediction": prediction and asdict(prediction)}


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
    description = f"routing of {statistics.model}, drawn by moesaic profile show"
    _write("--html", options.html, document(options.file.name, description, sections))


def _picture(profile: Profile, routes: Routes, statistics: Statistics, prediction: Prediction | None) -> str:
    middle = len(profile.layers) // 2
    pairs = map_coactivations(routes, middle, profile.num_experts)
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
        asked_requests, learned_requests = prediction.asked_requests, prediction.learned_requests
        rows["held out"] = f"{asked_requests:,} requests, predicted from the other {learned_requests:,}"
    requests_map = statistics.requests_map
    if (
        requests_map is not None
        and requests_map.neighbours is not None
        and requests_map.neighbours_by_chance is not None
    ):
        chance = f"{requests_map.neighbours_by_chance:.1%} by chance"
        rows["topics"] = f"the nearest request has the same topic in {requests_map.neighbours:.1%}, {chance}"
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _concentration(layers: Sequence[LayerStatistics]) -> Group:
    table = _table("layer", "F1", "top-k hotness", "hottest other", "kurtosis")
    for layer in layers:
        shares = [
            _format_quartiles(part, ".3f") for part in (layer.f1, layer.top_hotness, layer.rest_hotness)
        ]
        table.add_row(str(layer.layer), *shares, _format_quartiles(layer.kurtosis, ".1f"))
    return _add_title("Concentration of each token id's experts: p25/p50/p75", table)


def _company(layers: Sequence[LayerStatistics]) -> Group:
    table = _table("layer", "max / mean", "max / median", "partners", "by chance")
    for layer in layers:
        skew = (f"{layer.loads[0]:.2f}", f"{layer.max_over_median:.2f}")
        table.add_row(str(layer.layer), *skew, f"{layer.partners:.1%}", f"{layer.partners_by_chance:.1%}")
    return _add_title("Load skew, and choices together with an expert's most common partners", table)


def _repeats(layers: Sequence[LayerStatistics]) -> Group:
    distances = DISTANCES[: len(layers[0].repeated)]
    table = _table("layer", "by chance", *map(str, distances))
    rows = [(str(layer.layer), [layer.repeated_by_chance, *layer.repeated]) for layer in layers]
    title = "Experts that an earlier token also chose, by distance in tokens"
    return _add_title(title, _with_mean(table, rows))


def _experts(prediction: Prediction) -> Group:
    table = _table(
        "layer", "precision", "F1", "hits", *(f"by {layers_back}" for layers_back in range(LAYERS_BACK + 1))
    )
    rows = [
        (str(part.layer), [part.static.precision, part.static.f1, part.static.hits, *part.look_back])
        for part in prediction.layers
    ]
    title = f"Experts predicted from the token id, and from 0 to {LAYERS_BACK} earlier layers"
    return _add_title(title, _with_mean(table, rows))


def _ranks(prediction: Prediction) -> Group:
    table = _table("layer", "busiest", "token", "2-gram", "both", "most")
    rows = [(str(part.layer), list(asdict(part.ranks).values())) for part in prediction.layers]
    title = f"Local pairs on the predicted rank: {prediction.ranks} ranks, vanilla placement"
    return _add_title(title, _with_mean(table, rows))


def _with_mean(table: Table, rows: Sequence[tuple[str, Sequence[float]]]) -> Table:
    """`table` with the rows as percentages, and a last row of their means over all layers with a value."""
    longest = max(len(values) for _, values in rows)
    for name, values in rows:
        table.add_row(name, *(f"{value:.1%}" for value in values))
    columns = [[values[i] for _, values in rows if i < len(values)] for i in range(longest)]
    table.add_section()
    table.add_row("mean", *(f"{sum(column) / len(column):.1%}" for column in columns))
    return table


def _format_quartiles(quartiles: Quartiles, format_spec: str) -> str:
    return "/".join(format(value, format_spec) for value in (quartiles.p25, quartiles.p50, quartiles.p75))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _add_title(title: str, table: Table) -> Group:
    return Group(f"[bold]{title}[/]", table)
