"""Placement solvers on requests that they have not seen: how local, how even, how fast, how near the bound.

    python benchmarks/placements.py                                   # made-up and uniform routing
    python benchmarks/placements.py --experts 64 --ranks 8 --solvers metis kmeans speculative ours
    python benchmarks/placements.py --routing --prompts a.jsonl b.jsonl   # the demo's alone, and its transfer

Each routing is split by requests: 20 % are the profile that a solver sees, the other 80 % are measured. A row
is a solver on a number of ranks, its numbers means over layers, then over --seeds (of the made-up routing, of
the split and of the solver):

    token            local activation rate with each token on its id's rank (attention-TP)
    request, rounds  the same with each request on the rank that --dispatch affinity gives it (attention-DP),
                     and on that of affinity-rounds, which is Algorithm 2 of Sem-MoE itself
    of bound         `token` over the upper bound on the held-out requests' own counts: no placement whose
                     ranks hold equally many experts, with one rank for each token id, gets above it there
    fitted, of bound the same on the 20 % that the solver saw: what is missing there is the search's, or the
                     bound's (see placement_bounds/bounds.py), and not the prediction's
    mean/max,        pairs that ranks compute, 1 is perfect; with one copy of each expert they are the same at
    max/median       both levels
    tokens           mean/max of the tokens on each rank, at token level

Routings: those of routings.py for 64 experts top-6 and 128 top-8, and uniform ones, where nothing can be
predicted. Each file of --prompts is a domain: the model's own routing of all of them together is one more
routing, and the transfer table has placements that were solved on 20 % of one domain and measured on 80 % of
each, as in Semantic Parallelism, appendix C.1. Without --prompts there is none of this.

Solvers run one after another in this process. --quick is a look at whether it works.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import placement_tables
import routings
from countdown import Clock
from placement_bounds.bounds import upper_bound
from rich.console import Console

from moesaic.config import ModelConfig
from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile, Routes
from moesaic.jobs.profiling import run as profiling
from moesaic.jobs.profiling.options import ProfileOptions
from moesaic.models import files
from moesaic.models.embedding import nearest_known
from moesaic.policy.placement import held_out
from moesaic.policy.placement.locality import balancedness, homes_of, request_level, token_level
from moesaic.policy.placement.solvers import SOLVERS

KINDS = ("made-up", "uniform")
BOUND = "bound"
"""Takes the place of a solver's name while bounds are computed."""

Row = dict[str, Any]
Learn = Callable[[Profile], Profile]
"""A function that completes the profile of some requests."""
Make = Callable[[int], Profile]
"""A function from a seed to a profile of all requests."""
Source = tuple[str, Make, Learn]


# ---- what is measured


def trial(solver: str, learned: Profile, others: Routes, ranks: int, seed: int, show: Any = None) -> Row:
    """One solver's figures on `others`. show: is called with (done, total)."""
    begun = time.perf_counter()
    clusters = SOLVERS[solver](learned, ranks, seed, show)
    seconds = time.perf_counter() - begun
    placement = clusters.placement(learned.layers, learned.model)
    found = held_out.measure_placement(learned, clusters, placement, others)
    return {
        "solver": solver,
        "seconds": seconds,
        "token": found.token.rate,
        "request": found.request.rate,
        "rounds": request_level(learned, homes_of(clusters), ranks, others, "rounds").rate,
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
    parts = {"token_bound": learned.with_routes(others), "fitted_bound": learned}
    return {
        name: float(upper_bound(part, ranks, rounds=rounds, progress=show).mean())
        for name, part in parts.items()
    }


def cell(
    learned: Profile, others: Routes, ranks: int, seed: int, arguments: argparse.Namespace, clock: Clock
) -> Iterator[Row]:
    """One row for each solver."""
    limits = clock.timed(BOUND, partial(bounds, learned, others, ranks, arguments.bound_rounds))
    for solver in arguments.solvers:
        found = clock.timed(solver, partial(trial, solver, learned, others, ranks, seed))
        yield {"ranks": ranks, "seed": seed, **found, **limits}


# ---- routings


def made_up(arguments: argparse.Namespace) -> Iterator[tuple[str, Make]]:
    shapes = [shape for shape in routings.SHAPES if shape.experts in arguments.experts]
    sizes = {"layers": arguments.layers, "requests": arguments.requests}
    for kind, shape in product(arguments.routing, shapes):
        make = _uniform if kind == "uniform" else _generated
        yield f"{kind} {shape.experts} top-{shape.top_k}", partial(make, shape, sizes)


def _generated(shape: routings.Shape, sizes: dict[str, int], seed: int) -> Profile:
    return routings.generate(shape, seed=seed, **sizes)


def _uniform(shape: routings.Shape, sizes: dict[str, int], seed: int) -> Profile:
    return routings.uniform(shape.experts, shape.top_k, seed=seed, **sizes)


def recorded(arguments: argparse.Namespace) -> Profile:
    """The model's own routing of all prompts. Each file is a topic."""
    with tempfile.TemporaryDirectory(prefix="placements-") as folder:
        file = Path(folder) / "profile.npz"
        options = ProfileOptions(arguments.prompts, file, max_prompts=arguments.max_prompts)
        profiling.run(options, ModelConfig(arguments.model), lambda *_: None)
        return Profile.load(file)


def neighbours(model: str) -> Learn:
    """Completes a profile of some requests: ids that it does not know have neighbours in the embedding."""
    path = files.resolve(model, None)

    def learn(profile: Profile) -> Profile:
        return replace(profile, nearest=nearest_known(path, profile.counts[0].known_tokens.astype(np.int32)))

    return learn


def by_topic(profile: Profile, share: float, seed: int, learn: Learn) -> dict[str, tuple[Profile, Routes]]:
    """The requests of each topic with two at least, split: the profile of some, the routes of the others."""
    found = {}
    for number, topic in enumerate(profile.topics):
        mine = np.flatnonzero(profile.routes.topics == number)
        if len(mine) > 1:
            learned, others = held_out.split(profile.with_routes(profile.routes.select(mine)), share, seed)
            found[topic] = learn(learned), others
    return found


def transfer(
    parts: dict[str, tuple[Profile, Routes]], arguments: argparse.Namespace, clock: Clock
) -> Iterator[Row]:
    """A row for each number of ranks, solver, and domain that was solved on; rates by domain measured on."""
    for ranks in arguments.ranks:
        for topic, (learned, _) in parts.items():
            clock.what = f"transfer from {topic}, {ranks} ranks"
            tests = {other: routes for other, (_, routes) in parts.items()}
            for solver in arguments.solvers:
                step = partial(carried_over, solver, learned, tests, ranks, arguments.seeds[0])
                yield {"ranks": ranks, "solved_on": topic, **clock.timed(solver, step)}


def carried_over(
    solver: str, learned: Profile, tests: dict[str, Routes], ranks: int, seed: int, show: Any = None
) -> Row:
    """Rates of one placement on the held-out requests of each domain."""
    clusters = SOLVERS[solver](learned, ranks, seed, show)
    placement = clusters.placement(learned.layers, learned.model)
    found = {
        name: held_out.measure_placement(learned, clusters, placement, routes)
        for name, routes in tests.items()
    }
    rates = {name: {"token": one.token.rate, "request": one.request.rate} for name, one in found.items()}
    return {"solver": solver, "on": rates}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows by routing, ranks, solver and seed; rows of the transfer table; sizes of what was measured."""
    sources: list[Source] = [(name, make, _as_it_is) for name, make in made_up(arguments)]
    parts: dict[str, tuple[Profile, Routes]] = {}
    if arguments.prompts:
        whole, learn = recorded(arguments), neighbours(arguments.model)
        sources.append((arguments.model, lambda _: whole, learn))
        parts = by_topic(whole, arguments.share, arguments.seeds[0], learn)
    found: dict[str, Any] = {"rows": [], "transfer": [], "sizes": {}}
    steps = len(sources) * len(arguments.seeds) * len(arguments.ranks) * [BOUND, *arguments.solvers]
    with Clock(steps + len(parts) * len(arguments.ranks) * arguments.solvers) as clock:
        for (name, make, complete), seed in product(sources, arguments.seeds):
            learned, others = held_out.split(make(seed), arguments.share, seed)
            learned = complete(learned)
            found["sizes"].setdefault(name, []).append(size_of(learned, others))
            for ranks in arguments.ranks:
                clock.what = f"{name}, seed {seed}, {ranks} ranks"
                for row in cell(learned, others, ranks, seed, arguments, clock):
                    found["rows"].append({"routing": name, **row})
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


# ---- command line


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sizes = [shape.experts for shape in routings.SHAPES]
    parser.add_argument("--routing", nargs="*", choices=KINDS, default=list(KINDS), help="what is made up")
    parser.add_argument("--experts", type=int, nargs="+", choices=sizes, default=sizes, help="of a layer")
    parser.add_argument("--layers", type=int, default=8, help="of made-up routing")
    parser.add_argument("--requests", type=int, default=800, help="of made-up routing")
    parser.add_argument("--prompts", type=Path, nargs="+", metavar="FILE", help="as in moesaic profile")
    parser.add_argument("--model", default="demo", help="whose routing of the prompts")
    parser.add_argument("--max-prompts", type=int, metavar="N", help="of each file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--solvers", nargs="+", choices=list(SOLVERS), default=list(SOLVERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--share", type=float, default=0.2, help="of the requests, that solvers see")
    parser.add_argument("--bound-rounds", type=int, default=400, help="more are nearer; 0: no bounds")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--quick", action="store_true", help="one small routing of each kind")
    return parser.parse_args()


def quick(arguments: argparse.Namespace) -> None:
    arguments.experts, arguments.layers, arguments.requests = arguments.experts[:1], 2, 100
    arguments.ranks, arguments.seeds, arguments.bound_rounds = [2, 8], arguments.seeds[:1], 10
    arguments.max_prompts = min(arguments.max_prompts or 100, 100)


def main() -> None:
    arguments = parse()
    if arguments.quick:
        quick(arguments)
    console = Console(width=140)
    if "metis" in arguments.solvers and find_spec("pymetis") is None:
        arguments.solvers.remove("metis")
        console.print("metis is left out: it needs the package pymetis")
    try:
        found = measure(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    placement_tables.show(found, console)
    if not arguments.prompts:
        console.print("no --prompts: nothing was measured of a model's own routing, nor of its transfer")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
