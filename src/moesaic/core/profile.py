"""A profile: which tokens of a model chose which experts, and its file.

A profile counts over all tokens that were recorded. It also keeps the routes of whole requests as a sample,
as many as memory allowed. Questions about several layers of one token, or the tokens of one request, are
answered from the sample.

The file is a NumPy archive (`.npz`) without pickled objects. Arrays of layer i have names that end in i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core import archive
from moesaic.core.archive import Arrays
from moesaic.core.placement import refuse_model
from moesaic.core.tokens import IntArray

SCHEMA = 1
NO_TOPIC = -1
"""The topic of a request whose topic is not known."""

SmallArray = npt.NDArray[np.int16]
TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Counts:
    """How often each token id chose each expert of one layer: a sparse [V, E] matrix in row order."""

    starts: IntArray
    """[V + 1] the entries of token id v are starts[v] : starts[v + 1]."""
    experts: SmallArray
    """[m] the expert of each entry, ascending inside a row."""
    counts: TokenArray
    """[m] the count of each entry, at least 1."""

    @classmethod
    def from_pairs(
        cls, tokens: npt.NDArray[Any], experts: npt.NDArray[Any], vocab_size: int, size: int
    ) -> Counts:
        """Count pairs of tokens [t] and their experts [t, k] of one layer, which has `size` experts.

        Example: tokens [5, 5], experts [[1, 0], [1, 2]] -> token 5 has experts 0, 1, 2 with counts 1, 2, 1.
        """
        keys = tokens.astype(np.int64)[:, None] * size + experts
        unique_keys, counts = np.unique(keys, return_counts=True)
        starts = np.searchsorted(unique_keys, np.arange(vocab_size + 1, dtype=np.int64) * size)
        return cls(starts.astype(np.int64), (unique_keys % size).astype(np.int16), counts.astype(np.int32))

    def __add__(self, other: Counts) -> Counts:
        """The sum of both counts. They must have the same V, but may contain different experts."""
        size = 1 + max((int(part.experts.max()) for part in (self, other) if len(part.experts)), default=0)
        keys = np.concatenate([part.tokens * size + part.experts for part in (self, other)])
        unique_keys, places = np.unique(keys, return_inverse=True)
        weights = np.concatenate([self.counts, other.counts])
        counts = np.bincount(places, weights=weights, minlength=len(unique_keys)).astype(np.int32)
        starts = np.searchsorted(unique_keys, np.arange(len(self.starts), dtype=np.int64) * size)
        return Counts(starts.astype(np.int64), (unique_keys % size).astype(np.int16), counts)

    @cached_property
    def tokens(self) -> IntArray:
        """[m] the token id of each entry."""
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int64), np.diff(self.starts))

    @cached_property
    def known_tokens(self) -> IntArray:
        """Token ids with an entry, ascending."""
        return np.flatnonzero(np.diff(self.starts)).astype(np.int64)

    def loads(self, num_experts: int) -> IntArray:
        """[E] (token, expert) pairs of each expert."""
        return np.bincount(self.experts, weights=self.counts, minlength=num_experts).astype(np.int64)


@dataclass(frozen=True)
class Routes:
    """The experts of every token of some requests, request after request."""

    tokens: TokenArray
    """[t] token ids."""
    starts: IntArray
    """[r + 1] request i has tokens starts[i] : starts[i + 1]."""
    prompts: IntArray
    """[r] how many of a request's tokens are its prompt. The others were generated."""
    topics: SmallArray
    """[r] index into the profile's topics, or NO_TOPIC."""
    experts: SmallArray
    """[t, layers, k] logical ids, best first."""

    @property
    def requests(self) -> int:
        return len(self.prompts)

    @cached_property
    def owners(self) -> IntArray:
        """[t] the request of each token."""
        return np.repeat(np.arange(self.requests, dtype=np.int64), np.diff(self.starts))

    def select(self, requests: Sequence[int] | IntArray) -> Routes:
        """The routes of these requests, in the order given."""
        indices = np.asarray(requests, dtype=np.int64)
        lengths = np.diff(self.starts)[indices]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = np.repeat(self.starts[indices] - starts[:-1], lengths) + np.arange(starts[-1])
        return Routes(
            self.tokens[rows], starts, self.prompts[indices], self.topics[indices], self.experts[rows]
        )

    def split(self, share: float, seed: int) -> tuple[Routes, Routes]:
        """Split the requests at random into a `share` (rounded, at least one) and the others.

        Both keep their order.
        """
        rng = np.random.default_rng(seed)
        order = rng.permutation(self.requests)
        cut = max(1, round(share * self.requests))
        return self.select(np.sort(order[:cut])), self.select(np.sort(order[cut:]))


@dataclass(frozen=True)
class Profile:
    """Routing statistics of one model."""

    model: str
    """Fingerprint of the model, as in a placement."""
    vocab_size: int
    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    """Indices of the layers with routed experts, ascending. The arrays below count these layers from 0."""
    counts: tuple[Counts, ...]
    """The counts of each of these layers."""
    transitions: IntArray
    """[layers - 1, E, E] tokens that chose expert e in layer i and expert f in layer i + 1."""
    routes: Routes
    """A sample of routes. It has no requests if none were kept."""
    topics: tuple[str, ...] = ()
    """Names of the requests' topics."""
    nearest: TokenArray | None = None
    """[V] the token id to look up for each token id, or None if it was not computed.

    That is the id itself for tokens that the profile contains. For others it is the nearest known token in
    embedding space (cosine).
    """
    hidden: int = 0
    """Size of the rows that an expert reads and writes, 0 if it is not known."""
    token_ids: bool = True
    """False: only the loads of experts are known. They are the counts of token id 0, and there are no
    routes and no transitions."""

    @classmethod
    def from_routes(
        cls,
        model: str,
        vocab_size: int,
        num_experts: int,
        layers: Sequence[int],
        routes: Routes,
        topics: Sequence[str] = (),
        nearest: TokenArray | None = None,
    ) -> Profile:
        """The profile that counts these routes and keeps all of them."""
        experts = routes.experts
        counts = tuple(
            Counts.from_pairs(routes.tokens, experts[:, i], vocab_size, num_experts)
            for i in range(len(layers))
        )
        return cls(
            model=model,
            vocab_size=vocab_size,
            num_experts=num_experts,
            top_k=experts.shape[2],
            layers=tuple(layers),
            counts=counts,
            transitions=transitions(experts, num_experts),
            routes=routes,
            topics=tuple(topics),
            nearest=nearest,
        )

    @cached_property
    def loads(self) -> IntArray:
        """[layers, E] (token, expert) pairs of each expert."""
        return np.stack([counts.loads(self.num_experts) for counts in self.counts])

    @property
    def tokens(self) -> int:
        """Number of tokens that were counted."""
        return int(self.loads[0].sum()) // self.top_k if self.counts else 0

    def with_routes(self, routes: Routes) -> Profile:
        """A profile of the same model made from these routes alone, for example one half of a split."""
        profile = Profile.from_routes(
            self.model, self.vocab_size, self.num_experts, self.layers, routes, self.topics
        )
        return replace(profile, nearest=self.nearest, hidden=self.hidden)

    def check(self, fingerprint: str, file: str) -> None:
        """Raise ConfigError if the profile was made for another model."""
        refuse_model(f"{file}: model", self.model, fingerprint)

    # ---- the file

    def save(self, path: Path, compress: bool = True) -> None:
        """Write the file. After a failure the old file is unchanged.

        compress: makes it about five times smaller, at some 20 MB/s.
        """
        arrays: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.model,
            "sizes": [self.vocab_size, self.num_experts, self.top_k],
            "layers": self.layers,
            "hidden": self.hidden,
            "transitions": self.transitions,
            "topics": np.array(self.topics, dtype=np.str_),
        }
        if self.nearest is not None:
            arrays["nearest"] = self.nearest
        if not self.token_ids:
            arrays["loads_only"] = 1
        for i, counts in enumerate(self.counts):
            arrays |= {f"{field.name}_{i}": getattr(counts, field.name) for field in fields(Counts)}
        arrays |= {f"routes_{field.name}": getattr(self.routes, field.name) for field in fields(Routes)}
        archive.save(path, arrays, compress)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file of `save`. Raises ConfigError with one line that names the file and the problem."""
        return archive.load(path, "a profile", cls._from_arrays)

    @classmethod
    def _from_arrays(cls, arrays: Arrays) -> Profile:
        """Raises KeyError and ValueError for arrays of another file."""
        if int(arrays["schema"]) != SCHEMA:
            raise ValueError(f"schema {arrays['schema']}, this version reads {SCHEMA}")
        for name in sorted(arrays.keys() - {"model", "topics"}):
            _check_numbers(name, arrays[name])
        vocab_size, num_experts, top_k = arrays["sizes"].tolist()
        layers = tuple(arrays["layers"].tolist())
        profile = cls(
            model=str(arrays["model"]),
            vocab_size=vocab_size,
            num_experts=num_experts,
            top_k=top_k,
            layers=layers,
            counts=tuple(
                Counts(**{field.name: arrays[f"{field.name}_{i}"] for field in fields(Counts)})
                for i in range(len(layers))
            ),
            transitions=arrays["transitions"],
            routes=Routes(**{field.name: arrays[f"routes_{field.name}"] for field in fields(Routes)}),
            topics=tuple(arrays["topics"].tolist()),
            nearest=arrays.get("nearest"),
            hidden=int(arrays.get("hidden", 0)),
            token_ids="loads_only" not in arrays,
        )
        _check(profile)
        return profile


def transitions(experts: SmallArray, num_experts: int) -> IntArray:
    """[layers - 1, E, E] pairs of choices in adjacent layers, counted from experts [t, layers, k]."""
    layers = experts.shape[1]
    pair_counts = np.zeros((max(0, layers - 1), num_experts, num_experts), dtype=np.int64)
    for layer in range(layers - 1):
        layer_experts = experts[:, layer].astype(np.int64)
        pairs = (layer_experts[:, :, None] * num_experts + experts[:, layer + 1][:, None, :]).reshape(-1)
        pair_counts[layer] = np.bincount(pairs, minlength=num_experts**2).reshape(num_experts, num_experts)
    return pair_counts


def _check_numbers(name: str, array: npt.NDArray[Any]) -> None:
    """Raise ValueError if an array of the file contains fractions, or numbers that are too low."""
    minimum = 1 if name.startswith("counts_") else NO_TOPIC if name == "routes_topics" else 0
    is_integer = array.dtype.kind in "iu"
    if array.size and (not is_integer or array.min() < minimum):
        got = array.min() if is_integer else array.dtype
        raise ValueError(f"{name}: got {got}; allowed: whole numbers from {minimum} on")


def _check(profile: Profile) -> None:
    """Raise ValueError where arrays do not fit each other, so that users of the profile need no checks."""
    if not (_counts_fit(profile) and _routes_fit(profile) and _ids_are_valid(profile)):
        raise ValueError("its arrays do not fit each other")


def _counts_fit(profile: Profile) -> bool:
    """Whether the counts and transitions have the sizes of the profile."""
    size = profile.num_experts
    transitions_shape = (max(0, len(profile.layers) - 1), size, size)
    counts_fit = all(
        len(part.starts) == profile.vocab_size + 1
        and part.starts[-1] == len(part.experts) == len(part.counts)
        and (np.diff(part.starts) >= 0).all()
        and part.starts[0] == 0
        for part in profile.counts
    )
    return counts_fit and profile.transitions.shape == transitions_shape


def _routes_fit(profile: Profile) -> bool:
    """Whether the routes and the nearest token ids have the sizes of the profile."""
    routes = profile.routes
    tokens, layers, k = routes.experts.shape
    return bool(
        (layers, k) == (len(profile.layers), profile.top_k)
        and (np.diff(profile.layers) > 0).all()
        and len(routes.starts) == len(routes.prompts) + 1 == len(routes.topics) + 1
        and routes.starts[0] == 0
        and routes.starts[-1] == tokens == len(routes.tokens)
        and (np.diff(routes.starts) >= routes.prompts).all()
        and (profile.nearest is None or profile.nearest.shape == (profile.vocab_size,))
    )


def _ids_are_valid(profile: Profile) -> bool:
    """Whether all ids of experts, tokens and topics are in range."""
    size, routes = profile.num_experts, profile.routes
    # NO_TOPIC is -1, so topics are checked with 1 added.
    limits: list[tuple[npt.NDArray[Any], int]] = [
        (routes.experts, size),
        (routes.tokens, profile.vocab_size),
        (routes.topics + 1, len(profile.topics) + 1),
        *((part.experts, size) for part in profile.counts),
    ]
    if profile.nearest is not None:
        limits.append((profile.nearest, profile.vocab_size))
    return all(not ids.size or 0 <= ids.min() <= ids.max() < limit for ids, limit in limits)
