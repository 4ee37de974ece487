"""Routes in the form of `llama-moe-trace`, which forks of llama.cpp take to choose experts for a GPU's cache.

A line of the CSV is a token in a layer: `position,layer,expert,expert,...`. Prompts have negative positions.
The tool `tools/moe-trace` of github.com/thecodacus/llama.cpp defines the form; its servers read it with
`--moe-cache-profile`. Files may be joined by appending one to the other.

Question: Which files with hot experts do other engines take, and how are they written?
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile
from moesaic.core.routing import RoutedModel
from moesaic.core.tokens import IntArray
from moesaic.jobs.profiling.routing_records import RoutingRecord

LINE = re.compile(r"-?[0-9]{1,18},[0-9]{1,9}(,[0-9]{1,9})+")


def trace_lines(profile: Profile) -> Iterator[str]:
    """The lines of a trace of the profile's recorded requests. Raises ConfigError if it has none."""
    routes = profile.routes
    if not len(routes.tokens):
        raise ConfigError.field("FILE", "a profile without routes of requests", "one that recorded some")
    positions = np.arange(len(routes.tokens)) - (routes.starts[:-1] + routes.prompts)[routes.owners]
    for position, rows in zip(positions.tolist(), routes.experts.tolist(), strict=True):
        for layer, experts in zip(profile.layers, rows, strict=True):
            yield f"{position},{layer},{','.join(map(str, experts))}\n"


def read(paths: list[Path], model: RoutedModel) -> list[RoutingRecord]:
    """The loads of the experts in traces. Raises ConfigError naming the file and line that cannot be used."""
    return [RoutingRecord(loads=_read(path, model)) for path in paths]


def _read(path: Path, model: RoutedModel) -> IntArray:
    """[layers, E] how often the lines of a file name each expert."""
    places = {layer: place for place, layer in enumerate(model.layers)}
    loads = np.zeros((len(model.layers), model.num_experts), dtype=np.int64)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not read: {error}") from error
    for number, line in enumerate(lines, start=1):
        label = f"{path}: line {number}"
        if not LINE.fullmatch(line):
            raise ConfigError.field(label, line[:80], "position,layer,expert,expert,... in whole numbers")
        _, layer, *experts = map(int, line.split(","))
        if layer not in places:
            allowed_layers = f"one with routed experts: {', '.join(map(str, places))}"
            raise ConfigError.field(f"{label}: layer", layer, allowed_layers)
        if max(experts) >= model.num_experts:
            raise ConfigError.field(f"{label}: expert", max(experts), f"0 to {model.num_experts - 1}")
        np.add.at(loads[places[layer]], experts, 1)
    return loads
