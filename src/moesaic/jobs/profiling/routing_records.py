"""What a file of another program says about a model's routing, and the profile of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.profile import NO_TOPIC, Counts, Profile, Routes, transitions
from moesaic.core.routing import RoutedModel, join_routes
from moesaic.core.tokens import IntArray

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class RoutingRecord:
    """The routing in one file: whole requests, tokens of unknown requests, or loads without tokens."""

    routes: Sequence[Routes] = ()
    """Requests, or parts of them."""
    tokens: Sequence[AnyArray] = ()
    """Arrays [t] of token ids whose requests are not known."""
    experts: Sequence[AnyArray] = ()
    """Arrays [t, layers, k] of the experts of `tokens`."""
    loads: IntArray | None = None
    """[layers, E] (token, expert) pairs of each expert, where no token ids were recorded."""
    left_out: int = 0
    """Tokens without an expert in some layer, for example from a cache of prefixes."""


def make_profile(model: RoutedModel, parts: Sequence[RoutingRecord]) -> Profile:
    """The profile of all parts together. Raises ConfigError if some have token ids and others do not.

    A profile of loads has them as counts of token id 0, and `token_ids` is False.
    """
    loads = [part.loads for part in parts if part.loads is not None]
    if loads and len(loads) < len(parts):
        raise ConfigError.field("FILES", "loads and tokens", "files of one recording mode")
    if loads:
        profile = Profile.from_routes(*_sizes(model), join_routes(model, []))
        return replace(
            profile,
            counts=_make_load_counts(sum(loads), model.vocab_size),
            hidden=model.hidden,
            token_ids=False,
        )
    routes = [route for part in parts for route in part.routes]
    profile = Profile.from_routes(*_sizes(model), join_routes(model, routes))
    tokens = [rows for part in parts for rows in part.tokens]
    if tokens:
        experts = np.concatenate([rows for part in parts for rows in part.experts])
        profile = _add_tokens(profile, np.concatenate(tokens), experts)
    return replace(profile, hidden=model.hidden)


def make_request_routes(tokens: AnyArray, experts: AnyArray, prompt: int) -> Routes:
    """The routes of one request. tokens: [t]. experts: [t, layers, k]. prompt: tokens of its prompt."""
    return Routes(
        tokens=tokens.astype(np.int32),
        starts=np.array([0, len(tokens)], dtype=np.int64),
        prompts=np.array([prompt], dtype=np.int64),
        topics=np.array([NO_TOPIC], dtype=np.int16),
        experts=np.ascontiguousarray(experts, dtype=np.int16),
    )


def select_routed_layers(array: AnyArray, model: RoutedModel, axis: int, label: str) -> AnyArray:
    """The layers of `array` with routed experts.

    axis: that of the layers, which are those with routed experts or all of the model. label: names the
    array. Raises ConfigError for another number of layers.

    Example: routed layers 1 and 2, and an array of 3 layers -> its layers 1 and 2. One of 2 stays as it is.
    """
    count, num_routed = array.shape[axis], len(model.layers)
    if count == num_routed:
        return array
    if count <= max(model.layers):
        allowed_values = f"{num_routed}, those with routed experts, or all layers of the model"
        raise ConfigError.field(f"{label}: layers", count, allowed_values)
    routed_layers: AnyArray = np.take(array, model.layers, axis=axis)
    return routed_layers


def check_ids(tokens: AnyArray, experts: AnyArray, model: RoutedModel, label: str) -> None:
    """Raise ConfigError for token ids or experts that the model does not have."""
    if experts.shape[1:] != (len(model.layers), model.top_k):
        allowed_values = f"{len(model.layers)} layers with {model.top_k} experts of each token"
        raise ConfigError.field(f"{label}: layers and experts", experts.shape[1:], allowed_values)
    for name, ids, limit in (
        ("token ids", tokens, model.vocab_size),
        ("experts", experts, model.num_experts),
    ):
        if ids.size and not 0 <= ids.min() <= ids.max() < limit:
            wrong = int(ids.max() if ids.max() >= limit else ids.min())
            raise ConfigError.field(f"{label}: {name}", wrong, f"0 to {limit - 1}, as in this model")


def _sizes(model: RoutedModel) -> tuple[str, int, int, tuple[int, ...]]:
    return model.model, model.vocab_size, model.num_experts, model.layers


def _add_tokens(profile: Profile, tokens: AnyArray, experts: AnyArray) -> Profile:
    """`profile` with more tokens counted, which belong to no known request."""
    new_counts = [
        Counts.from_pairs(tokens, experts[:, layer], profile.vocab_size, profile.num_experts)
        for layer in range(len(profile.layers))
    ]
    return replace(
        profile,
        counts=tuple(old + new for old, new in zip(profile.counts, new_counts, strict=True)),
        transitions=profile.transitions + transitions(experts, profile.num_experts),
    )


def _make_load_counts(loads: Any, vocab_size: int) -> tuple[Counts, ...]:
    """Counts of each layer that have these loads [layers, E] as choices of token id 0."""
    counts = []
    for row in loads:
        experts = np.flatnonzero(row)
        starts = np.full(vocab_size + 1, len(experts), dtype=np.int64)
        starts[0] = 0
        counts.append(Counts(starts, experts.astype(np.int16), row[experts].astype(np.int32)))
    return tuple(counts)
