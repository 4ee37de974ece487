"""Draws the statistics of a profile as one page of charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesaic.commands.panels import Line, Panel, dots, heat, lines, page
from moesaic.policy.placement.routing_prediction import LAYERS_BACK, LayerPrediction, Prediction
from moesaic.policy.placement.routing_statistics import DISTANCES, LayerStatistics, Quartiles, Statistics

LOADS_CAPTION = "How often each expert of a layer is chosen. An even load is 1 everywhere."
TOGETHER_CAPTION = "How often two experts are chosen by the same token. Darker: more often."
SINGLE_CAPTION = "By quartile of the tokens: a quarter lies below p25, half below p50."
REPEATS_CAPTION = (
    "Share of a token's experts that the token so many places earlier chose, mean of all layers."
)
MAP_CAPTION = "Requests that choose similar experts lie close together. Colours are topics."
LEARNED_CAPTION = "Learned from some requests and tested on the others."


def draw(
    statistics: Statistics, prediction: Prediction | None, pairs: Sequence[Sequence[float]], middle: int
) -> str:
    """The charts as an SVG. pairs: [E, E] how often experts are chosen together in layer index `middle`."""
    layers = statistics.layers
    number = layers[middle].layer
    title = f"{statistics.model}: {statistics.tokens:,} tokens, {statistics.requests:,} requests"
    drawn_layers = sorted({0, middle, len(layers) - 1})
    skew = [Line(f"layer {layers[i].layer}", list(enumerate(layers[i].loads, 1))) for i in drawn_layers]
    panels = [
        lines(
            "Load of the experts, busiest first", "rank of the expert", "times the mean", skew, LOADS_CAPTION
        ),
        *(_quartiles(layers, title, y_label, select) for title, y_label, select in _CONCENTRATION),
        heat(f"Experts chosen together, layer {number}", "expert", "expert", pairs, TOGETHER_CAPTION),
        _repeats(statistics),
        _topics(statistics),
    ]
    if prediction is not None:
        panels += [_static(prediction), _look_back(prediction), _ranks(prediction)]
    return page(title, panels, columns=3)


_CONCENTRATION: tuple[tuple[str, str, Callable[[LayerStatistics], Quartiles]], ...] = (
    ("F1 of a token's experts and its id's top k", "share", lambda layer: layer.f1),
    ("Hotness of an id's top k together", "share", lambda layer: layer.top_hotness),
    ("Hotness of the hottest expert beside these", "share", lambda layer: layer.rest_hotness),
    ("Kurtosis of a token's counts", "kurtosis", lambda layer: layer.kurtosis),
)
"""Charts of single tokens: title, y axis and values. They show Table 1 of Sem-MoE and its appendix A.2."""
_STATIC: dict[str, Callable[[LayerPrediction], float]] = {
    "precision": lambda layer: layer.static.precision,
    "F1": lambda layer: layer.static.f1,
    "hits": lambda layer: layer.static.hits,
    "hits without the id": lambda layer: layer.look_back[0],
}
_RANKS: dict[str, Callable[[LayerPrediction], float]] = {
    "busiest": lambda layer: layer.ranks.guess,
    "token": lambda layer: layer.ranks.token,
    "2-gram": lambda layer: layer.ranks.two_gram,
    "both": lambda layer: layer.ranks.both,
    "most": lambda layer: layer.ranks.most,
}


def _quartiles(
    layers: Sequence[LayerStatistics],
    title: str,
    y_label: str,
    select: Callable[[LayerStatistics], Quartiles],
) -> Panel:
    series = [
        Line(name, [(layer.layer, getattr(select(layer), name)) for layer in layers])
        for name in ("p25", "p50", "p75")
    ]
    return lines(title, "layer", y_label, series, SINGLE_CAPTION)


def _repeats(statistics: Statistics) -> Panel:
    layers = statistics.layers
    distances = DISTANCES[: len(layers[0].repeated)]
    means = [sum(layer.repeated[i] for layer in layers) / len(layers) for i in range(len(distances))]
    chance = sum(layer.repeated_by_chance for layer in layers) / len(layers)
    series = [
        Line("as found", list(zip(distances, means, strict=True))),
        Line("by chance", [(distance, chance) for distance in distances]),
    ]
    return lines(
        "Experts that an earlier token chose, too", "tokens earlier", "share", series, REPEATS_CAPTION
    )


def _topics(statistics: Statistics) -> Panel:
    requests_map = statistics.requests_map
    groups: dict[int, list[tuple[float, float]]] = {}
    if requests_map is not None:
        for point, topic in zip(requests_map.points, requests_map.topics, strict=True):
            groups.setdefault(topic, []).append(point)
    names = dict(enumerate(statistics.topics))
    series = [Line(names.get(topic, "no topic"), groups[topic]) for topic in sorted(groups)]
    return dots("Requests by their experts", series, MAP_CAPTION)


def _static(prediction: Prediction) -> Panel:
    """The chart of predictions from the token id. hits: share of a token's experts that are predicted."""
    return _prediction_panel(prediction, "Experts predicted from the token id (its top k)", _STATIC)


def _look_back(prediction: Prediction) -> Panel:
    layers = prediction.layers
    series = [
        Line(
            f"by {layers_back}",
            [
                (layer.layer, layer.look_back[layers_back])
                for layer in layers
                if layers_back < len(layer.look_back)
            ],
        )
        for layers_back in range(LAYERS_BACK + 1)
    ]
    return lines(
        "Experts predicted by looking back some layers", "layer", "share right", series, LEARNED_CAPTION
    )


def _ranks(prediction: Prediction) -> Panel:
    title = f"Local pairs on the predicted rank ({prediction.ranks} ranks)"
    return _prediction_panel(prediction, title, _RANKS)


def _prediction_panel(
    prediction: Prediction, title: str, values: dict[str, Callable[[LayerPrediction], float]]
) -> Panel:
    series = [
        Line(name, [(layer.layer, select(layer)) for layer in prediction.layers])
        for name, select in values.items()
    ]
    return lines(title, "layer", "share", series, LEARNED_CAPTION)
