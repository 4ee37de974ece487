"""Hit rates of policies for the experts in memory, and of read-ahead, on recorded routes.

    python training/smollm2_checkpoint.py smollm2 --form moe
    python benchmarks/offload.py replay demo smollm2 even

Each model answers the same prompts (`routes.py`), which takes minutes and is kept in a file with --routes.
`even` is no model: each token draws 4 of 24 experts in two layers, as it nearly does with random weights.
Requests go to clients in turn, and all clients are merged step by step: the experts of a step are those of
all its rows. As with `on-demand`, experts of steps with prompts are all loaded, and those of decode steps
only where they are not in memory. A hit is a chosen expert of a decode step that is in memory. One that is
not is loaded, and the policy says whether it stays in the place of another one. `best` is Belady's: of the
experts in memory and those that were loaded, the ones that are chosen again first stay.

`read-ahead`: which share of the misses a guess has covered before the gate of the layer chose, and which
share of the guessed experts was not chosen. All guesses may name as many experts as the next router names
that are not in memory; `policy` decides which ones are there. Routes are given, so no figure depends on time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from moesaic.policy.offloading.prefetch import ExpertPrefetch, order_guesses
from moesaic.policy.offloading.residency import HotExperts
from offloading.routes import Experts, Recording, Request, list_prompts, record

Ids = npt.NDArray[np.integer[Any]]
EVEN = "even"
NEVER = 1 << 40
IN_USE = "in use"
"""The guesses that `--fast-memory` loads."""
DRAFT = 3
"""Tokens that have to occur before for the next one to be drafted."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", help="a Hugging Face directory, demo or even")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--gen-len", type=int, default=96)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 0.75], help="of the experts")
    parser.add_argument("--routes", type=Path, help="folder for the recorded routes; those there are read")


def quick(arguments: argparse.Namespace) -> None:
    arguments.prompts, arguments.gen_len, arguments.clients, arguments.shares = 4, 8, [1, 2], [0.5]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, number of clients and share of the experts."""
    found = []
    for model in arguments.models:
        recording = _find(model, arguments)
        for clients in arguments.clients:
            steps = list(merge(recording.requests, clients))
            for share in arguments.shares:
                places = round(share * recording.num_experts)
                row = {"model": Path(model).name, "clients": clients, "places": places}
                found.append(row | {"experts": recording.num_experts} | replay(steps, recording, places))
    return found


def show(found: list[dict[str, Any]], console: Console) -> None:
    for title, group in (("hits", "hits"), ("misses covered / wasted", "ahead")):
        names = list(found[0][group])
        table = Table("model", "clients", "in memory", *names, title=title)
        for row in found:
            cells = [_text(row[group][name]) for name in names]
            table.add_row(row["model"], str(row["clients"]), f"{row['places']}/{row['experts']}", *cells)
        console.print(table)


def _text(value: float | Sequence[float]) -> str:
    return f"{value:.1%}" if isinstance(value, float) else " / ".join(f"{one:.1%}" for one in value)


def _find(model: str, arguments: argparse.Namespace) -> Recording:
    file = None if arguments.routes is None else arguments.routes / f"{Path(model).name}.npz"
    if file is not None and file.exists():
        return Recording.load(file)
    if model == EVEN:
        return _draw_evenly(arguments.prompts, arguments.gen_len)
    recording = record(model, list_prompts(arguments.prompts), arguments.gen_len)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        recording.save(file)
    return recording


def _draw_evenly(prompts: int, new_tokens: int) -> Recording:
    """Routes that nothing says anything about."""
    rng, length = np.random.default_rng(1), 100 + new_tokens
    requests = [
        Request(
            100,
            rng.integers(0, 4096, length).astype(np.int32),
            *(rng.random((2, length, 2, 24)).argsort(axis=3)[..., :4].astype(np.int16)),
        )
        for _ in range(prompts)
    ]
    return Recording(24, tuple(requests))


# ---- steps


@dataclass(frozen=True)
class Step:
    """One pass over the model, of all clients."""

    is_prompt: bool
    sequences: int
    experts: Experts
    """[n, layers, k]"""
    early: Experts
    """[n, layers, k] as in `Request`."""
    tokens: Ids
    """[n]"""
    drafts: Ids
    """[n] the token that was drafted for each row; -1: none."""


def merge(requests: Sequence[Request], clients: int) -> Iterator[Step]:
    """The steps of clients, each of which sends its requests one after the other."""
    streams = [
        [step for request in requests[client::clients] for step in _steps(request)]
        for client in range(clients)
    ]
    for number in range(max(map(len, streams))):
        parts = [stream[number] for stream in streams if number < len(stream)]
        yield Step(
            any(part.is_prompt for part in parts),
            len(parts),
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("experts", "early", "tokens", "drafts")
            ),
        )


def _steps(request: Request) -> Iterator[Step]:
    bounds = [0, *range(request.prompt, len(request.tokens) + 1)]
    drafts = _drafts(request.tokens)
    for begin, end in itertools.pairwise(bounds):
        rows = slice(begin, end)
        parts = request.experts[rows], request.early[rows], request.tokens[rows], drafts[rows]
        yield Step(begin == 0, 1, *parts)


def _drafts(tokens: Ids) -> Ids:
    """[t] the token that followed when the DRAFT tokens before each one occurred last."""
    known: dict[tuple[int, ...], int] = {}
    drafts = np.full(len(tokens), -1)
    for place in range(DRAFT, len(tokens)):
        last = tuple(tokens[place - DRAFT : place].tolist())
        drafts[place] = known.get(last, -1)
        known[last] = int(tokens[place])
    return drafts


# ---- which experts stay


class Policy(Protocol):
    """Of one layer."""

    def learn(self, pairs: Ids, steps: float) -> None:
        """Choices of a step, before `exchange`. steps: above 1 for a prompt of at least two tokens."""
        ...

    def exchange(self, stays: set[int], missing: list[int], chosen: set[int]) -> list[tuple[int, int]]:
        """Pairs of an expert that leaves and one that was loaded."""
        ...


class InUse(Policy):
    """The policy of `--fast-memory`."""

    def __init__(self, num_experts: int) -> None:
        self._hot = HotExperts(num_experts)

    def learn(self, pairs: Ids, steps: float) -> None:
        self._hot.learn(0, pairs, steps)

    def exchange(self, stays: set[int], missing: list[int], chosen: set[int]) -> list[tuple[int, int]]:
        return self._hot.exchanges(0, stays, missing, chosen)


class Counting(Policy):
    """The most frequent ones stay. fades: of a count with each decode step. hotter: as in `earlier`."""

    def __init__(self, num_experts: int, fades: float, hotter: float) -> None:
        self._counts, self._fades, self._hotter = np.zeros(num_experts), fades, hotter

    def learn(self, pairs: Ids, steps: float) -> None:
        if steps == 1:
            self._counts = self._fades * self._counts + np.bincount(pairs, minlength=len(self._counts))

    def exchange(self, stays: set[int], missing: list[int], chosen: set[int]) -> list[tuple[int, int]]:
        counts = self._counts
        coldest = sorted(stays - chosen, key=lambda expert: (counts[expert], expert))
        hottest = sorted(missing, key=lambda expert: (-counts[expert], expert))
        pairs = zip(coldest, hottest, strict=False)
        return [(out, new) for out, new in pairs if counts[new] > self._hotter * counts[out]]


class Recency(Policy):
    """Every expert that was loaded stays, for the one that was chosen the longest ago."""

    def __init__(self, num_experts: int) -> None:
        self._last, self._now = np.zeros(num_experts), 0

    def learn(self, pairs: Ids, steps: float) -> None:
        if steps == 1:
            self._now += 1
            self._last[pairs] = self._now

    def exchange(self, stays: set[int], missing: list[int], chosen: set[int]) -> list[tuple[int, int]]:
        oldest = sorted(stays - chosen, key=lambda expert: self._last[expert])
        return list(zip(oldest, missing, strict=False))


class Belady(Policy):
    """Knows all decode steps."""

    def __init__(self, num_experts: int, steps: Sequence[Ids]) -> None:
        """steps: the experts that each decode step chose."""
        self._next = np.full((len(steps) + 1, num_experts), NEVER)
        for number in range(len(steps) - 1, -1, -1):
            self._next[number] = self._next[number + 1]
            self._next[number][steps[number]] = number
        self._now = 0

    def learn(self, pairs: Ids, steps: float) -> None:
        self._now += steps == 1

    def exchange(self, stays: set[int], missing: list[int], chosen: set[int]) -> list[tuple[int, int]]:
        order = self._next[self._now]
        latest = sorted(stays, key=lambda expert: -order[expert])
        soonest = sorted(missing, key=lambda expert: order[expert])
        pairs = zip(latest, soonest, strict=False)
        return [(out, new) for out, new in pairs if order[new] < order[out]]


# ---- read-ahead


class Guesses:
    """What may be known of a layer's experts before its gate has chosen."""

    def __init__(self, num_experts: int) -> None:
        self._previous = ExpertPrefetch(num_experts)
        self._by_token: dict[int, Ids] = {}

    def rank(self, step: Step, layer: int, stays: set[int], most: int) -> dict[str, list[int]]:
        """Name -> experts, the most likely first. `in use` has only those that `--fast-memory` loads.

        stays: experts in memory. most: as many may be loaded ahead.
        """
        early = _early(step, layer)
        return {
            IN_USE: self._previous.experts(0, most, stays, early),
            "next router": early,
            "previous tokens": self._previous.rank_recent(0),
            "same token": order_guesses(self._experts_of(step.tokens)),
            "drafts": order_guesses(self._experts_of(step.drafts)),
        }

    def learn(self, step: Step, layer: int) -> None:
        """The gate has chosen."""
        if not step.is_prompt:
            self._previous.learn(0, step.experts[:, layer].ravel())
        self._by_token.update(zip(step.tokens.tolist(), step.experts[:, layer], strict=True))

    def _experts_of(self, tokens: Ids) -> list[Ids]:
        """The experts that each token chose when it came last."""
        return [self._by_token[token][None] for token in tokens.tolist() if token in self._by_token]


def _early(step: Step, layer: int) -> list[int]:
    return [expert for expert in order_guesses([step.early[:, layer]]) if expert >= 0]


# ---- replay


def replay(steps: Sequence[Step], recording: Recording, places: int) -> dict[str, Any]:
    """The hit rates of policies, and the coverage and waste of guesses. places: experts of a layer."""
    num_experts, layers = recording.num_experts, recording.requests[0].experts.shape[1]
    decodes = [step for step in steps if not step.is_prompt]
    policies: dict[str, Callable[[int], Policy]] = {
        "policy": lambda layer: InUse(num_experts),
        "earlier policy": lambda layer: Counting(num_experts, 0.98, 1.25),
        "LRU": lambda layer: Recency(num_experts),
        "LFU": lambda layer: Counting(num_experts, 1.0, 1.0),
        "best": lambda layer: Belady(num_experts, [np.unique(step.experts[:, layer]) for step in decodes]),
    }
    hits = dict.fromkeys(policies, 0)
    ahead: dict[str, list[int]] = {}
    chosen = exchanges = 0
    for layer in range(layers):
        for name, build in policies.items():
            run = Run(build(layer), places, layer, Guesses(num_experts) if name == "policy" else None)
            for step in steps:
                run.step(step)
            hits[name] += run.hits
            if run.guesses is not None:
                chosen, exchanges = chosen + run.chosen, exchanges + run.exchanges
                for guess, counts in run.ahead.items():
                    ahead[guess] = [sum(pair) for pair in zip(ahead.get(guess, [0, 0]), counts, strict=True)]
    misses = chosen - hits["policy"]
    return {
        "hits": {name: count / chosen for name, count in hits.items()},
        "exchanges": exchanges / chosen,
        "ahead": {
            name: (right / max(misses, 1), 1 - right / max(guessed, 1))
            for name, (right, guessed) in ahead.items()
        },
    }


class Run:
    """One layer under one policy."""

    def __init__(self, policy: Policy, places: int, layer: int, guesses: Guesses | None) -> None:
        self._policy, self._layer, self.guesses = policy, layer, guesses
        self._stays, self._most = set(range(places)), places
        self.chosen = self.hits = self.exchanges = 0
        self.ahead: dict[str, list[int]] = {}
        """Guess -> experts that were guessed and chosen, and all that were guessed."""

    def step(self, step: Step) -> None:
        """Go on with a step."""
        rows = step.experts[:, self._layer]
        if step.is_prompt:
            self._policy.learn(rows.ravel(), len(rows) / step.sequences)
        else:
            self._decode(step, rows)
        if self.guesses is not None:
            self.guesses.learn(step, self._layer)

    def _decode(self, step: Step, rows: Experts) -> None:
        chosen = set(rows.ravel().tolist())
        missing = sorted(chosen - self._stays)
        self._policy.learn(rows.ravel(), 1)
        self.chosen += len(chosen)
        self.hits += len(chosen) - len(missing)
        if self.guesses is not None:
            orders = self.guesses.rank(step, self._layer, self._stays, self._most)
            count = len(set(orders["next router"]) - self._stays)
            for name, order in orders.items():
                limit = self._most if name == IN_USE else count
                guessed = [expert for expert in order if expert not in self._stays][:limit]
                counts = self.ahead.setdefault(name, [0, 0])
                counts[0] += len(chosen & set(guessed))
                counts[1] += len(guessed)
        pairs = self._policy.exchange(self._stays, missing, chosen)
        self.exchanges += len(pairs)
        self._stays = self._stays - {out for out, _ in pairs} | {new for _, new in pairs}
