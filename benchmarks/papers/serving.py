"""Serving with attention-DP in virtual time, for figure 4 and tables 5 and 6 of Semantic Parallelism.

Paper: 8 GPUs, each with the attention of its own requests and a part of the experts, in step at every layer.
Prompts and answers have fixed lengths, which are not stated. The throughput is the highest one with a mean
latency of at most 5 times that under the lightest load.

Here: 8 workers with a server beside each, H100s by their roofline. A worker waits for its own rows (schedule
lockstep, as `eaas.py load`), and not for all ranks in every layer. Rows choose the experts of a recorded
request (routed.py), so requests have an affinity that placements and dispatch can use. A number of clients
send a request once theirs is answered. Throughput and latencies follow from that number, and the throughput
at an objective is interpolated between two numbers. Lengths are half to one and a half times their mean:
with equal ones all requests run in phase, and throughput depends on that more than on anything else. Systems:

    sglang    consecutive experts, requests in turn
    moetuner  the solver moetuner, requests in turn
    sem-moe   the solver sem-moe, requests as in its Algorithm 2 (affinity-rounds)
    control   sglang again, with other lengths of requests: what differs between two equal systems

Only 2 of the layers are simulated, since all take the same time; latencies are of that part, and ratios
comparable. Two links:

    stated    400 GB/s, as stated
    figure 1  so slow that in SGLang's step the exchanges take 59.2 % of the experts and exchanges together,
              as in the paper's figure 1, at the rows of a full step

Moonlight-16B has the sizes of DeepSeek-V2-Lite but for its vocabulary and one dense layer: so it is simulated
as that, with prompts of other lengths (assumed) for the paper's three data sets.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import routed
from figures import Row

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Routes as Recorded
from moesaic.core.tokens import IntArray
from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import PUBLISHED_MODELS, ModelSizes
from moesaic.planning.sim import durations
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.routes import Routes, Rows
from moesaic.planning.sim.scenario import parse
from moesaic.policy.placement import holdout
from moesaic.policy.placement.dispatch import WorkerLoad
from moesaic.policy.placement.locality import homes_of, measure, request_owners
from moesaic.policy.placement.solvers import SOLVERS

RANKS, LAYERS = 8, 2
STATED = 400.0
"""GB/s that a GPU sends."""
EXCHANGED = 0.592
"""Share of an MoE layer that its exchanges take (figure 1)."""
OBJECTIVE = 5
"""Times the latency under the lightest load."""
STEP_ROWS = 512
"""Maximum rows of a worker's step."""
SYSTEMS = {"sglang": "vanilla", "moetuner": "moetuner", "sem-moe": "sem-moe"}
PAPER = {
    "deepseek-v2-lite": {"sglang": (1.31, 3.21), "moetuner": (1.32, 3.78)},
    "qwen3-30b-a3b": {"sglang": (1.98, 1.11), "moetuner": (1.35, 1.32)},
}
"""Model -> times the throughput of each baseline, for the first token and for the whole answer (figure 4)."""
PUBLISHED = {"deepseek-v2-lite": 0.4649, "qwen3-30b-a3b": 0.4688}
PUBLISHED_RANKS = 4
"""Model -> local activation rate of tables 3 and 4, on these ranks."""
SETS = {
    "MMLU": (128, {"sglang": (1.20, 1.02), "moetuner": (1.28, 1.10)}),
    "Lmsys-Chat-1M": (256, {"sglang": (1.18, 1.04), "moetuner": (1.35, 1.09)}),
    "ShareGPT": (1024, {"sglang": (1.00, 1.23), "moetuner": (1.02, 1.23)}),
}
"""Data set -> tokens of a prompt (assumed), and as PAPER (tables 5 and 6)."""
DIFFERS = (
    "Neither host time nor queues that never end are modelled: with clients that wait for their answer, no "
    "baseline runs away as the paper's do. exchange_needed is the share of a step that SGLang's exchanges "
    "would have to take for the stated gain by Sem-MoE's local pairs alone; above 1 they cannot give it. "
    "by_tables_3_4 is the same with the paper's own rates on 4 ranks."
)


@dataclass(eq=False)
class LocatedRoutes(Routes):
    """Rows choose the experts of a recorded request: simulated request i those of request i modulo all."""

    recorded: Recorded | None = None

    def choose_experts(self, layer: int, rows: Rows, now: float) -> IntArray:
        """See `Routes`. A request that is longer than the recorded one begins it again."""
        assert self.recorded is not None
        starts = self.recorded.starts
        request = (rows >> np.uint64(24)).astype(np.int64) % self.recorded.requests
        place = (rows & np.uint64((1 << 24) - 1)).astype(np.int64)
        token = starts[request] + place % (starts[request + 1] - starts[request])
        found: IntArray = self.recorded.experts[token, layer].astype(np.int64)
        return found


@dataclass
class AsRecorded:
    """Sends simulated request i to the rank of recorded request i modulo all."""

    ranks: IntArray
    """[r] of the recorded requests."""
    sent: int = 0

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        """See `Dispatch`."""
        self.sent += 1
        return int(self.ranks[(self.sent - 1) % len(self.ranks)])


@dataclass(frozen=True)
class System:
    """A placement and the rank of each recorded request."""

    placement: Placement
    ranks: IntArray
    """[r] of the recorded requests."""
    local: float
    """Share of pairs on the request's own rank."""
    others: float
    """Mean number of other ranks that a row is sent to."""


@lru_cache(maxsize=16)
def system(name: str, experts: int) -> tuple[System, Recorded]:
    """A system and the requests that it serves, which its solver has not seen."""
    learned, others = holdout.split(routed.routing(experts, LAYERS), routed.SHARE, 0)
    clusters = SOLVERS[SYSTEMS[name]](learned, RANKS, 0, None)
    homes = homes_of(clusters)
    if name == "sem-moe":
        owners = request_owners(learned, homes, RANKS, others, "rounds")
        ranks = owners[others.starts[:-1]].astype(np.int64)
    else:
        ranks = np.arange(others.requests) % RANKS
    found = measure(others.experts, homes, ranks[others.owners].astype(np.int16), RANKS)
    place = clusters.placement(tuple(range(LAYERS)), learned.model)
    return System(place, ranks, found.rate, float(found.distinct.mean())), others


def bandwidth(model: ModelSizes, links: str) -> float:
    """GB/s that a GPU sends. See the module's text."""
    if links == "stated":
        return STATED
    one, _ = system("sglang", routed.EXPERTS[model.name])
    pairs = round(STEP_ROWS * model.top_k)
    computed = durations.build_machine_devices(model, MACHINES["h100"], 0).experts.seconds(
        pairs, model.experts // RANKS
    )
    sent = 2 * STEP_ROWS * one.others * model.hidden * 2
    return 1e-9 * sent / (computed * EXCHANGED / (1 - EXCHANGED))


def point(
    model: ModelSizes,
    name: str,
    links: str,
    clients: int,
    prompt: int,
    options: argparse.Namespace,
    seed: int = 1,
) -> tuple[float, float, float]:
    """Requests per second, and mean seconds to the first and to the last token (by Little's law)."""
    one, recorded = system(name, routed.EXPERTS[model.name])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "placement.json"
        file.write_text(one.placement.to_json())
        tables = {
            "model": model.name,
            "devices": "h100",
            "seed": seed,
            "duration": options.seconds,
            "warm_up": options.seconds / 2,
            "links": {"latency_us": 5.0, "gb_per_s": bandwidth(model, links), "number_bytes": 2},
            "workers": {
                "count": RANKS,
                "max_num_seqs": max(1, clients),
                "max_num_batched_tokens": STEP_ROWS,
                "max_model_len": 4096,
            },
            "servers": {"count": RANKS, "beside_workers": True},
            "placement": {"kind": "file", "file": str(file)},
            "schedule": {"kind": "lockstep", "combine": "partial"},
            "workload": {
                "kind": "closed",
                "clients": clients,
                "prompt": [prompt // 2, 3 * prompt // 2],
                "answer": [options.answer // 2, 3 * options.answer // 2],
            },
        }
        part = replace(model, layers=LAYERS, moe_layers=LAYERS)
        shares = np.full((LAYERS, model.experts), 1 / model.experts)
        routes = LocatedRoutes(shares, round(model.top_k), 1, recorded=recorded)
        run = SimulatedCluster(parse(tables), part, routes=routes, dispatch=AsRecorded(one.ranks))
        found = run.run()
    if not found.tokens or not found.ttft.count:
        allowed = f"more, so that {clients} clients get answers"
        raise ConfigError.field("--seconds", options.seconds, allowed)
    rate = found.throughput / options.answer
    return rate, found.ttft.mean, clients / rate


def at_objective(rates: Sequence[float], latencies: Sequence[float], objective: float) -> float:
    """The rate at which a growing latency reaches the objective.

    It is 0 if the first latency is above it, and the last rate if none is.

    Example: rates 10 and 20, latencies 1 and 3, objective 2 -> 15.
    """
    if latencies[0] > objective:
        return 0.0
    for place in range(1, len(rates)):
        if latencies[place] > objective:
            low, high = latencies[place - 1], latencies[place]
            part = (objective - low) / (high - low)
            return rates[place - 1] + part * (rates[place] - rates[place - 1])
    return rates[-1]


def rows_at_objective(
    model: ModelSizes,
    points: dict[str, list[tuple[float, float, float]]],
    which: int,
    stated: dict[str, tuple[float, float]],
    links: str,
) -> Iterator[Row]:
    """Sem-MoE beside both baselines, and SGLang beside itself, at one objective.

    points: of each system, its rate and its two latencies for each number of clients. which: the latency.
    """
    objective = OBJECTIVE * points["sglang"][0][1 + which]
    reached = {
        name: at_objective([point[0] for point in curve], [point[1 + which] for point in curve], objective)
        for name, curve in points.items()
    }
    local = {name: system(name, routed.EXPERTS[model.name])[0].local for name in SYSTEMS}
    for base in ("sglang", "moetuner"):
        gain = stated[base][which]
        kept = (1 - local["sem-moe"]) / (1 - local[base])
        published = (1 - PUBLISHED[model.name]) / (1 - 1 / PUBLISHED_RANKS)
        yield {
            "gb_per_s": bandwidth(model, links),
            "beside": base,
            "requests_per_s": reached["sem-moe"],
            "ratio": round(reached["sem-moe"] / reached[base], 2),
            "stated": gain,
            "local": local["sem-moe"],
            "local_beside": local[base],
            "exchange_needed": round((1 - 1 / gain) / (1 - kept), 2),
            "by_tables_3_4": round((1 - 1 / gain) / (1 - published), 2),
        }
    yield {
        "beside": "sglang",
        "system": "control",
        "requests_per_s": reached["control"],
        "ratio": round(reached["control"] / reached["sglang"], 2),
    }


def compared(
    model: ModelSizes, prompt: int, stated: dict[str, tuple[float, float]], options: argparse.Namespace
) -> Iterator[Row]:
    """Sem-MoE beside both baselines, with both links and objectives."""
    for links in options.links:
        points = {
            name: [point(model, name, links, clients, prompt, options) for clients in options.clients]
            for name in SYSTEMS
        }
        points["control"] = [
            point(model, "sglang", links, clients, prompt, options, seed=2) for clients in options.clients
        ]
        for which, objective in enumerate(("first token", "whole answer")):
            for row in rows_at_objective(model, points, which, stated, links):
                yield {"model": model.name, "prompt": prompt, "links": links, "objective": objective, **row}


def throughput(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 4."""
    for name in options.models:
        yield from compared(PUBLISHED_MODELS[name], options.prompt, PAPER[name], options)


def moonlight(options: argparse.Namespace) -> Iterator[Row]:
    """Tables 5 and 6."""
    for name, (prompt, stated) in SETS.items():
        for row in compared(PUBLISHED_MODELS["deepseek-v2-lite"], prompt, stated, options):
            yield {"data": name, **row}


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of both."""
    parser.add_argument("--models", nargs="+", choices=list(PAPER), default=list(PAPER))
    parser.add_argument("--links", nargs="+", choices=["stated", "figure 1"], default=["stated", "figure 1"])
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 32, 128, 256, 512])
    parser.add_argument("--prompt", type=int, default=256, help="mean tokens")
    parser.add_argument("--answer", type=int, default=8, help="mean tokens")
    parser.add_argument("--seconds", type=float, default=0.08, help="simulated; the second half is measured")
