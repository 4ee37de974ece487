"""Placement solvers on requests that they have not seen: how local, how even, how fast, how near the bound.

    python benchmarks/placements.py                                   # made-up and uniform routing
    python benchmarks/placements.py --experts 64 --ranks 8 --solvers metis kmeans speculative ours
    python benchmarks/placements.py --experts --prompts a.jsonl b.jsonl   # the demo's alone, and its transfer

Each routing is split by requests: 20 % are the profile that a solver sees, the other 80 % are measured. A row
is a solver on a number of ranks, its numbers means over layers, then over --seeds (of the made-up routing, of
the split and of the solver):

    token, request   local activation rate with each token on its id's rank (attention-TP), and with each
                     request on the rank that Algorithm 2 of Sem-MoE gives it (attention-DP)
    of bound         `token` over the upper bound on the held-out requests' own counts: no placement whose
                     ranks hold equally many experts, with one rank for each token id, gets above it there
    fitted, of bound the same on the 20 % that the solver saw: what is missing there is the search's, or the
                     bound's (see policy/cocluster/bounds.py), and not the prediction's
    mean/max,        pairs that ranks compute, 1 is perfect; with one copy of each expert they are the same at
    max/median       both levels
    tokens           mean/max of the tokens on each rank, at token level

Routings: routings.py's for 64 experts top-6 and 128 top-8, and `uniform`, where nothing can be predicted. Each
file of --prompts is a domain: the model's own routing of all of them together is one more routing, and the
transfer table has placements that were solved on 20 % of one domain and measured on 80 % of each, as in
Semantic Parallelism, appendix C.1. Without --prompts there is none of this.

Solvers run one after another in this process. --quick is a look at whether it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import routings
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from moesaic.config import ModelConfig
from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile, Routes
from moesaic.models import files
from moesaic.models.embedding import nearest_known
from moesaic.policy import held_out
from moesaic.policy.cocluster import SOLVERS
from moesaic.policy.cocluster.bounds import upper_bound
from moesaic.policy.locality import balancedness, token_level
from moesaic.profiling import run as profiling
from moesaic.profiling.options import ProfileOptions

BOUND = "bound"
"""What takes the place of a solver's name while bounds are computed."""
LEVELS = ("token", "request")
GOALS = {"speculative": (("metis", "kmeans"), 1.14), "sem-moe": (("moetuner",), 1.15)}
"""Solver -> whom it is compared with, the better one counting, and the margin that is aimed at."""
TIE = 1e-9

Row = dict[str, Any]
Learn = Callable[[Profile], Profile]
"""Completes the profile of some requests."""


# ---- what is measured


def trial(solver: str, learned: Profile, others: Routes, ranks: int, seed: int, show: Any = None) -> Row:
    """A solver's numbers on `others`. show: is told its progress (done, total)."""
    begun = time.perf_counter()
    clusters = SOLVERS[solver](learned, ranks, seed, show)
    seconds = time.perf_counter() - begun
    placement = clusters.placement(learned.layers, learned.model)
    found = held_out.measured(learned, clusters, placement, others)
    return {
        "solver": solver,
        "seconds": seconds,
        "token": found.token.rate,
        "request": found.request.rate,
        "fitted": token_level(clusters, learned.routes, learned.nearest).rate,
        "mean_over_max": found.token.balancedness,
        "max_over_median": found.token.max_over_median,
        "tokens_mean_over_max": float(balancedness(found.token.tokens).mean()),
        "notes": list(clusters.notes),
    }


def bounds(learned: Profile, others: Routes, ranks: int, rounds: int, show: Any = None) -> Row:
    """Upper bounds of token-level rates, means over layers: on `others`, and on what was learned."""
    if not rounds:
        return {}
    parts = {"token_bound": learned.of(others), "fitted_bound": learned}
    return {name: float(upper_bound(part, ranks, rounds, None, show).mean()) for name, part in parts.items()}


def cell(
    learned: Profile, others: Routes, ranks: int, seed: int, arguments: argparse.Namespace, clock: Clock
) -> Iterator[Row]:
    """A row for each solver."""
    limits = clock.timed(BOUND, partial(bounds, learned, others, ranks, arguments.bound_rounds))
    for solver in arguments.solvers:
        try:
            found = clock.timed(solver, partial(trial, solver, learned, others, ranks, seed))
        except ConfigError as error:
            if solver != "metis":  # it needs a package that few have
                raise
            clock.say(f"metis is left out: {error}")
            continue
        yield {"ranks": ranks, "seed": seed, **found, **limits}


class Clock:
    """What is being done, on the error stream: two bars, and the time that is left."""

    def __init__(self, steps: Sequence[str]) -> None:
        """steps: all that will be timed, in any order."""
        self._left = list(steps)
        self._done: list[tuple[str, float]] = []
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bars = Progress(*columns, TextColumn("{task.fields[left]}"), console=self._console)
        self._all = self._bars.add_task("all", total=len(steps), left="")
        self._one = self._bars.add_task("", total=None, left="")
        self.what = ""
        """Said before the name of each step."""

    def __enter__(self) -> Clock:
        self._bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.__exit__(*error)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def timed(self, name: str, step: Callable[[Any], Row]) -> Row:
        """Do a step; it is handed what to tell its progress to."""
        self._bars.reset(self._one, description=f"{self.what}, {name}", total=None)

        def show(done: int, total: int) -> None:
            self._bars.update(self._one, completed=done, total=total)

        begun = time.perf_counter()
        found = step(show)
        self._left.remove(name)
        self._done.append((name, time.perf_counter() - begun))
        left = f"{time_left(self._done, self._left):.0f} s left"
        self._bars.update(self._all, advance=1, left=left)
        if not self._console.is_terminal:
            numbers = " ".join(f"{level} {found[level]:.3f}" for level in LEVELS if level in found)
            self.say(f"{self.what}, {name} {numbers}: {self._done[-1][1]:.1f} s; {left}")
        return found


def time_left(done: Sequence[tuple[str, float]], left: Sequence[str]) -> float:
    """Seconds for `left`, each step as long as those of its name were, or as the mean step.

    Example: a took 1 and 3 s, b 8 s; left are a, b and c -> 2 + 8 + 4.
    """
    known: dict[str, list[float]] = {}
    for name, seconds in done:
        known.setdefault(name, []).append(seconds)
    mean = statistics.fmean(seconds for _, seconds in done)
    return sum(statistics.fmean(known[name]) if name in known else mean for name in left)


# ---- routings


def made_up(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[int], Profile]]]:
    """Names, and makers that take a seed."""
    shapes = [shape for shape in routings.SHAPES if shape.experts in arguments.experts]
    sizes = {"layers": arguments.layers, "requests": arguments.requests}
    for shape in shapes:
        yield f"{shape.experts} top-{shape.top_k}", partial(_generated, shape, sizes)
    for shape in shapes:
        yield f"uniform {shape.experts} top-{shape.top_k}", partial(_uniform, shape, sizes)


def _generated(shape: routings.Shape, sizes: dict[str, int], seed: int) -> Profile:
    return routings.generate(shape, seed=seed, **sizes)


def _uniform(shape: routings.Shape, sizes: dict[str, int], seed: int) -> Profile:
    return routings.uniform(shape.experts, shape.top_k, seed=seed, **sizes)


def recorded(arguments: argparse.Namespace) -> Profile:
    """The model's own routing of all prompts; each file is a topic."""
    with tempfile.TemporaryDirectory(prefix="placements-") as folder:
        file = Path(folder) / "profile.npz"
        options = ProfileOptions(arguments.prompts, file, max_prompts=arguments.max_prompts)
        profiling.run(options, ModelConfig(arguments.model), lambda *_: None)
        return Profile.load(file)


def neighbours(model: str) -> Learn:
    """Ids that a profile of some requests does not know stand for their neighbours in the model's embedding."""
    path = files.resolve(model, None)

    def learn(profile: Profile) -> Profile:
        return replace(profile, nearest=nearest_known(path, profile.counts[0].known.astype(np.int32)))

    return learn


def by_topic(profile: Profile, share: float, seed: int, learn: Learn) -> dict[str, tuple[Profile, Routes]]:
    """Each topic's requests, split: the profile of some, the routes of the others."""
    found = {}
    for number, topic in enumerate(profile.topics):
        mine = np.flatnonzero(profile.routes.topics == number)
        learned, others = held_out.split(profile.of(profile.routes.of(mine)), share, seed)
        found[topic] = learn(learned), others
    return found


def transfer(
    parts: dict[str, tuple[Profile, Routes]], arguments: argparse.Namespace, clock: Clock
) -> Iterator[Row]:
    """A row for each number of ranks, solver, and domain that was solved on; rates by domain measured on."""
    for ranks in arguments.ranks:
        for topic, (learned, _) in parts.items():
            clock.what = f"transfer from {topic}, {ranks} ranks"
            for solver in arguments.solvers:
                clusters = SOLVERS[solver](learned, ranks, arguments.seeds[0])
                placement = clusters.placement(learned.layers, learned.model)
                row: Row = {"ranks": ranks, "solver": solver, "solved_on": topic, "on": {}}
                for other, (_, routes) in parts.items():
                    found = held_out.measured(learned, clusters, placement, routes)
                    row["on"][other] = {"token": found.token.rate, "request": found.request.rate}
                yield row


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows by routing, ranks, solver and seed; rows of the transfer table; sizes of what was measured."""
    sources = [(name, seed, make, _as_it_is) for name, make in made_up(arguments) for seed in arguments.seeds]
    found: dict[str, Any] = {"rows": [], "transfer": [], "sizes": {}}
    if arguments.prompts:
        whole, learn = recorded(arguments), neighbours(arguments.model)
        sources += [(arguments.model, seed, lambda _: whole, learn) for seed in arguments.seeds]
    steps = len(sources) * len(arguments.ranks) * [BOUND, *arguments.solvers]
    with Clock(steps) as clock:
        for name, seed, make, completed in sources:
            learned, others = held_out.split(make(seed), arguments.share, seed)
            learned = completed(learned)
            found["sizes"].setdefault(name, []).append(size_of(learned, others))
            for ranks in arguments.ranks:
                clock.what = f"{name}, seed {seed}, {ranks} ranks"
                for row in cell(learned, others, ranks, seed, arguments, clock):
                    found["rows"].append({"routing": name, **row})
        if arguments.prompts and len(whole.topics) > 1:
            parts = by_topic(whole, arguments.share, arguments.seeds[0], learn)
            found["transfer"] += transfer(parts, arguments, clock)
    return found


def _as_it_is(profile: Profile) -> Profile:
    return profile


def size_of(learned: Profile, others: Routes) -> Row:
    return {
        "experts": learned.num_experts,
        "top_k": learned.top_k,
        "layers": len(learned.layers),
        "learned_requests": learned.routes.requests,
        "learned_tokens": learned.tokens,
        "held_out_requests": others.requests,
        "held_out_tokens": len(others.tokens),
        "unseen": held_out.unseen(learned, others),
    }
