"""Asynchronous Expert Parallelism, figures 3, 4 and 9 to 13: `python benchmarks/papers/async_moe.py overall`.

Paper (section 5): Mixtral 8x7B with one key head on 8 GPUs, decoding only. AsyncMoE has attention on 4
GPUs and experts on 4. Its baseline SGLang has both on all 8. Requests arrive as a Poisson process.
Lengths of prompts and answers are uniform: short 30-70 and 70-130, medium 50-150 and 50-250, reasonable
100-300 and 100-500. The router chooses experts at random with shares that were fitted to an exponential
distribution.

    batch      figure 3, by roofline: an expert layer's throughput by batch
    stalls     figure 4, by counting: the busiest expert of an iteration, and the time that others wait for it
    overall    figure 9: throughput and time between tokens
    nodes      figure 10: 16 experts on two hosts with 8 GPUs each
    policies   figure 11: the queue policies at 80 % of the throughput
    arrivals   figure 12: requests that come and requests that end under FLFS
    breakdown  figure 13: what a step of 2.7 ms (attention) and 0.8 ms (experts) is made of
    sweep      the gain over the barrier by skew, by rows, and by the cost of an event: where 2.0 to 2.7 are

Here: the same counts of devices, lengths and shares. Each layer has its own popular experts. Systems:

    barrier, shared     a worker and a server on each device, in step: what SGLang does
    barrier, split      half of the devices for workers, half for servers, in step
    lockstep, split     each worker runs its own batch through the layers
    async, split        the paper's schedule: runs never wait, a queue for each expert, history 10 on
                        servers
    async, as served    the schedule with the thresholds of `moesaic serve`

Two sets of devices:

    as given    async_moe.toml. It assumes that the paper's 2.7 ms (attention) and 0.8 ms (experts) are
                those of up to 128 rows, by figure 3.
    by rate     The same 2.7 ms and 0.8 ms, for as many rows as the paper's own rate needs. Figure 11 has
                250 requests per second of 150 tokens at 80 % of the maximum. So 4 GPUs with 33 runs of
                2.7 ms for each token need 835 rows in a run, and experts 240. Nothing is fitted to 2.7,
                2.3 and 2.0.

`overall`, `nodes` and `policies` have clients that send a request once theirs is answered. With more clients
throughput and the time between tokens grow, as along the paper's curves. tokens/s = clients / time between
tokens (Little's law): a count would depend on how many steps end in the measured time.

`policies` has 8 of 32 layers. `arrivals` has 4, the short workload, and Poisson arrivals at 0.8 of the
tokens/s that defrag reaches with 8192 clients: so requests end in the simulated time. With a quarter of the
layers a token takes about a quarter of the time, and rates are four times as high. Queues have no urgency in
both, as in the paper's text. Its code runs rows that waited for 0.1 s first: "flfs with urgency".

`sweep` has `--layers` of 32 layers, devices by rate and zipf shares. `--seconds` are those of the first
number of clients with 8 layers. Others have theirs in proportion, so that each computes about as many tokens.
A worker's process takes `event_us` for each event: a step of the barrier has two, async has two for each run
of a layer. "limit" is what the schedule could gain at most without any other cost: the time of a layer with
barriers, over the larger one of 4 devices' attention and the mean of 4 devices' experts.

`partial_runs` is the share of the workers' runs that computed only some of their rows. Where it is 0 no row
went on without the others, and what differs from the barrier is that workers do not wait for each other.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, Row, main

from moesaic.cost import ops, roofline
from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import PUBLISHED_MODELS, GroupedQuery
from moesaic.planning.sim import routes
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.figures import Figures
from moesaic.planning.sim.scenario import parse

HERE = Path(__file__).parent
MODEL = PUBLISHED_MODELS["mixtral-8x7b"]
WORKLOADS = {
    "short": ([30, 70], [70, 130]),
    "medium": ([50, 150], [50, 250]),
    "reasonable": ([100, 300], [100, 500]),
}
STATED = {("short", 1): 2.7, ("medium", 1): 2.3, ("reasonable", 1): 2.0}
"""The ratios that the paper states."""
LINK = {"latency_us": 5.0, "gb_per_s": 600.0}
BY_RATE = {
    "source": "durations of figure 13 for the rows that the rate of figure 11 needs",
    "attention": {"points_ms": [[835, 2.7], [1670, 5.4]]},
    "experts": {"points_ms": [[240, 0.8], [480, 1.6]]},
    "link": LINK,
}
DEVICES: dict[str, Any] = {"as given": "async_moe.toml", "by rate": BY_RATE}
ZIPF = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Exponents of made-up shares."""
PAPER = {"kind": "async", "run_rows": 0, "queue_urgency": 0.1}
PAPER_SERVERS = {"batch_pairs": 1, "by_expert": True, "queue_history": 10}
SHARED = "barrier, shared"
SYSTEMS: dict[str, dict[str, Any]] = {
    SHARED: {"schedule": {"kind": "barrier"}, "servers": {"beside_workers": True}},
    "barrier, split": {"schedule": {"kind": "barrier"}},
    "lockstep, split": {"schedule": {"kind": "lockstep"}},
    "async, split": {"schedule": PAPER, "servers": PAPER_SERVERS},
    "async, as served": {"schedule": {"kind": "async"}},
}
HOSTS = """
[links]
latency_us = 20.0
gb_per_s = 50.0
inside_latency_us = 5.0
inside_gb_per_s = 600.0
[[hosts]]
name = "a"
workers = {0}
servers = {0}
[[hosts]]
name = "b"
workers = {1}
servers = {1}
"""
"""Two hosts of table 2: NVSwitch inside, 4 x 100 Gbit/s between them. Assumed: latencies."""
LAYERS = {"policies": 8, "arrivals": 4}
"""Simulated layers of 32."""
MANY = 8192
"""Clients with whose throughput `arrivals` begins."""
LOAD = 0.8
URGENT = " with urgency"
POLICIES = ("defrag", "mtfs", "flfs", "flfs" + URGENT)
WINDOWS = 4
"""Parts of the time of `arrivals`."""


def cluster(
    devices: str,
    system: str,
    options: argparse.Namespace,
    workload: str = "medium",
    top_k: int = 1,
    gpus: int = 8,
    layers: int = MODEL.layers,
    clients: int | None = None,
    rate: float | None = None,
    schedule: dict[str, Any] | None = None,
    servers: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
    event_us: float = 0.0,
    **more: Any,
) -> SimulatedCluster:
    """One system under one workload: of `clients`, or of `rate` requests per second."""
    prompt, answer = WORKLOADS[workload]
    shape = SYSTEMS[system]
    count = gpus if shape.get("servers", {}).get("beside_workers") else gpus // 2
    seats = (MANY if clients is None else clients) // count
    come = {"kind": "poisson", "rate": rate} if clients is None else {"kind": "closed", "clients": clients}
    tables = {
        "model": "mixtral-8x7b",
        "devices": DEVICES[devices],
        "seed": options.seed,
        "duration": options.seconds,
        "warm_up": options.seconds / 2,
        "links": {"number_bytes": 2},
        "workers": {
            "count": count,
            "max_num_seqs": seats,
            "max_num_batched_tokens": seats,
            "max_model_len": 1024,
            "event_us": event_us,
        },
        "servers": {"count": count, **(servers or shape.get("servers", {}))},
        "schedule": schedule or shape["schedule"],
        "workload": {"prompt": prompt, "answer": answer, "prefill": False, **come},
        "routing": {"kind": "exponential", "top_k": top_k, "experts": gpus} | (routing or {}),
    }
    model = replace(MODEL, layers=layers, moe_layers=layers)
    return SimulatedCluster(parse(tables | more, HERE), model)


def busy(figures: Figures, kind: str) -> float:
    """Mean busy share of the workers, of the servers, or of shared devices."""
    shares = [share for name, share in figures.utilisation.items() if name.startswith((kind, "device"))]
    return sum(shares) / len(shares)


def measured(found: Figures) -> Row:
    """The columns that every figure has."""
    return {
        "itl_ms": 1000 * found.itl.mean,
        "workers_busy": round(busy(found, "worker"), 2),
        "servers_busy": round(busy(found, "server"), 2),
        "rows_per_run": round(found.rows_per_run),
        "pairs_per_run": round(found.pairs_per_run),
        "partial_runs": None if found.partial_runs is None else round(found.partial_runs, 3),
    }


def batch(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 3."""
    del options
    level = MACHINES["a100-40"].fast
    for name in ("mixtral-8x7b", "mixtral-8x22b"):
        expert = replace(PUBLISHED_MODELS[name], experts=1, top_k=1)
        one = 1 / roofline.seconds(ops.routed_experts(expert, 1), level)
        for rows in (1, 8, 32, 64, 128, 256, 512, 1024):
            seconds = roofline.seconds(ops.routed_experts(expert, rows), level)
            row = {"model": name, "batch": rows, "ms": 1000 * seconds, "rows_per_s": rows / seconds}
            yield row | {"of_linear": round(rows / seconds / one / rows, 2)}


def stalls(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 4: one expert on each of 8 devices, and a barrier after each layer."""
    for devices, top_k, rows in product(options.devices, (1, 2), (64, 256, 1024, 4096)):
        for skew, shares in _skews(8).items():
            found = [_stall(devices, shares, rows, top_k, seed) for seed in range(options.seed, 32)]
            largest, stalled = (float(np.mean(column)) for column in zip(*found, strict=True))
            yield {
                "devices": devices,
                "top_k": top_k,
                "rows": rows,
                "skew": skew,
                "largest_over_mean": round(largest, 2),
                "stall": round(stalled, 2),
                "stated": "up to 0.7" if skew == "exponential" and top_k == 2 else None,
            }


def _skews(experts: int) -> dict[str, routes.FloatArray]:
    """Shares of the experts by name."""
    even = {f"zipf {exponent:g}": routes.zipf(experts, exponent) for exponent in ZIPF}
    return even | {"exponential": routes.exponential(experts)}


def _stall(devices: str, shares: routes.FloatArray, rows: int, top_k: int, seed: int) -> tuple[float, float]:
    """The largest load over the mean one, and the share of a layer's expert time in which devices wait."""
    chosen = routes.draw(shares, rows, top_k, np.random.default_rng(seed))
    loads = np.bincount(chosen.reshape(-1), minlength=len(shares))
    seconds = np.array([_seconds(devices, "experts", load) for load in loads])
    return float(loads.max() / loads.mean()), float(1 - seconds.mean() / seconds.max())


@lru_cache
def tables(devices: str) -> dict[str, Any]:
    """The tables of a set of devices, as a file of `--paced` has them."""
    given = DEVICES[devices]
    return given if isinstance(given, dict) else tomllib.loads((HERE / given).read_text())


def _seconds(devices: str, kind: str, rows: float) -> float:
    """Seconds of a run of `attention` or `experts`: level up to the first point, then in proportion."""
    if not rows:
        return 0.0
    (first, low), (last, high) = tables(devices)[kind]["points_ms"]
    return float(1e-3 * max(low, low + (rows - first) * (high - low) / (last - first)))


def sweep(options: argparse.Namespace) -> Iterator[Row]:
    """The gain by skew, rows and cost of an event."""
    for exponent, clients, event_us in product(options.zipf, options.clients, options.event_us):
        routing = {"kind": "zipf", "exponent": exponent}
        seconds = options.seconds * max(1.0, clients / options.clients[0]) * options.layers / 8
        given = argparse.Namespace(**{**vars(options), "seconds": seconds})
        base = None
        for system in (SHARED, "lockstep, split", "async, split", "async, as served"):
            found = cluster(
                "by rate",
                system,
                given,
                clients=clients,
                layers=options.layers,
                routing=routing,
                event_us=event_us,
            ).run()
            rate = clients / found.itl.mean
            base = base or rate
            yield {
                "hottest_share": round(float(routes.zipf(8, exponent)[0]), 2),
                "clients": clients,
                "event_us": event_us,
                "system": system,
                "gain": round(rate / base, 2),
                "limit": round(_limit(exponent, clients), 2),
                "rows_per_run": round(found.rows_per_run),
                "partial_runs": measured(found)["partial_runs"],
            }


def _limit(exponent: float, clients: int) -> float:
    """The most that the schedule can gain, by the devices' durations alone."""
    hottest = float(routes.zipf(8, exponent)[0])
    barrier = _seconds("by rate", "attention", clients / 8) + _seconds(
        "by rate", "experts", hottest * clients
    )
    apart = max(_seconds("by rate", kind, clients / 4) for kind in ("attention", "experts"))
    return barrier / apart


def overall(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 9."""
    cases = product(options.devices, options.top_k, options.workloads, options.clients)
    for devices, top_k, workload, clients in cases:
        base = None
        for system in options.systems:
            found = cluster(devices, system, options, workload, top_k, clients=clients).run()
            rate = clients / found.itl.mean
            base = base or rate
            yield {
                "devices": devices,
                "top_k": top_k,
                "workload": workload,
                "clients": clients,
                "system": system,
                "tokens_per_s": rate,
                "ratio": round(rate / base, 2),
                "stated": STATED.get((workload, top_k)) if system == "async, split" else None,
                **measured(found),
            }


def nodes(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 10."""
    for devices, clients in product(options.devices, options.clients):
        shared: dict[int, float] = {}
        for system in (SHARED, "async, split", "async, as served"):
            one = None
            for gpus in (8, 16):
                found = _on_hosts(devices, system, gpus, clients * gpus // 8, options).run()
                rate = clients * gpus / 8 / found.itl.mean
                one = one or rate
                shared.setdefault(gpus, rate)
                yield {
                    "devices": devices,
                    "system": system,
                    "gpus": gpus,
                    "clients": clients * gpus // 8,
                    "tokens_per_s": rate,
                    "of_8": round(rate / one, 2),
                    "stated": None if gpus == 8 else 1.0 if system == SHARED else 1.92,
                    "of_shared": round(rate / shared[gpus], 2),
                    "stated_of_shared": 3.0 if gpus == 16 and system != SHARED else None,
                    **measured(found),
                }


def _on_hosts(
    devices: str, system: str, gpus: int, clients: int, options: argparse.Namespace
) -> SimulatedCluster:
    """8 GPUs on one host, or 16 on two that have half of the workers and half of the servers each."""
    if gpus == 8:
        return cluster(devices, system, options, gpus=gpus, clients=clients)
    count = gpus if system == SHARED else gpus // 2
    halves = list(range(count // 2)), list(range(count // 2, count))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hosts.toml"
        file.write_text(HOSTS.format(*halves))
        links = {"topology": str(file), "number_bytes": 2}
        return cluster(devices, system, options, gpus=gpus, clients=clients, links=links)


def policies(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 11."""
    cases = product(options.devices, options.top_k, options.clients, options.event_us)
    for devices, top_k, clients, event_us in cases:
        rates: dict[str, list[float]] = {}
        for policy, seed in product(options.policies, options.seeds):
            given = argparse.Namespace(**{**vars(options), "seed": seed})
            more: dict[str, Any] = {"clients": clients, "event_us": event_us}
            found = _queued(devices, top_k, policy, given, LAYERS["policies"], **more).run()
            rates.setdefault(policy, []).append(clients / found.itl.mean)
            if seed != options.seeds[-1]:
                continue
            pairs = zip(rates[policy], rates[options.policies[0]], strict=True)
            ratios = [one / first for one, first in pairs]
            row = {"devices": devices, "top_k": top_k, "clients": clients, "event_us": event_us}
            row |= {"policy": policy, "tokens_per_s": float(np.mean(rates[policy]))}
            row |= {"of_first": round(float(np.median(ratios)), 2), "from": round(min(ratios), 2)}
            yield row | {"to": round(max(ratios), 2), **measured(found)}


def arrivals(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 12."""
    for devices, top_k in product(options.devices, options.top_k):
        layers, answer = LAYERS["arrivals"], sum(WORKLOADS["short"][1]) / 2
        full = _queued(devices, top_k, "defrag", options, layers, "short", clients=MANY).run()
        rate = LOAD * MANY / full.itl.mean / answer
        for policy in options.policies:
            one = _queued(devices, top_k, policy, options, layers, "short", rate=rate)
            one.run()
            lives, part = one.front.lives, options.seconds / WINDOWS
            for window in range(WINDOWS):
                begin, end = window * part, (window + 1) * part
                inside = [sum(begin < time <= end for time in life.times) for life in lives]
                gone = sum(life.has_ended and begin < life.times[-1] <= end for life in lives)
                yield {
                    "devices": devices,
                    "top_k": top_k,
                    "policy": policy,
                    "to_s": end,
                    "come_per_s": sum(begin < life.request.arrival <= end for life in lives) / part,
                    "end_per_s": gone / part,
                    "tokens_per_s": sum(inside) / part,
                    "open": sum(life.request.arrival <= end for life in lives)
                    - sum(life.has_ended and life.times[-1] <= end for life in lives),
                }


def _queued(
    devices: str,
    top_k: int,
    policy: str,
    options: argparse.Namespace,
    layers: int,
    workload: str = "medium",
    **load: Any,
) -> SimulatedCluster:
    """The paper's schedule with one of POLICIES."""
    urgency = 0.1 if policy.endswith(URGENT) else 0.0
    schedule = {**PAPER, "queue_policy": policy.removesuffix(URGENT), "queue_urgency": urgency}
    servers = PAPER_SERVERS if policy == "defrag" else {**PAPER_SERVERS, "queue_history": 0}
    return cluster(
        devices,
        "async, split",
        options,
        workload,
        top_k,
        layers=layers,
        schedule=schedule,
        servers=servers,
        **load,
    )


def breakdown(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 13: what of a step is left for everything but the kernels, by the A100's roofline."""
    del options
    level = MACHINES["a100-80"].fast
    one_head = replace(MODEL, attention=GroupedQuery(32, 1, 128))
    context = 175  # tokens, in the middle of an answer, medium
    for devices, rows, pairs in (("as given", 128, 128), ("by rate", 835, 240)):
        products = ops.query_key_value(one_head, rows) + ops.output_projection(one_head, rows)
        work = products + ops.attention(one_head, rows, context, 2.0) + ops.gate(one_head, rows)
        expert = replace(MODEL, experts=1, top_k=1)
        for what, stated, count, all_of_it in (
            ("attention", 2.7, rows, work),
            ("experts", 0.8, pairs, ops.routed_experts(expert, pairs)),
        ):
            least = 1000 * roofline.seconds(all_of_it, level)
            row = {"devices": devices, "step": what, "rows": count, "stated_ms": stated, "roofline_ms": least}
            yield row | {"beside_kernels": round(1 - least / stated, 2)}


FIGURES = {
    "batch": Figure(
        "figure 3",
        batch,
        "throughput grows almost linearly up to 128 rows. The text has no numbers.",
        "The roofline is a lower bound of a run's time, so ours is linear up to 202 rows.",
    ),
    "stalls": Figure(
        "figure 4",
        stalls,
        "up to 70 % of the GPU time, with Mixtral 8x7B at 100 requests/s.",
        "The shares are made up. A device stalls for 1 - mean / largest time, so 70 % need a largest load of "
        "3.3 times the mean. Attention and exchanges are not counted here; with them the share is smaller.",
    ),
    "overall": Figure(
        "figure 9",
        overall,
        "2.7, 2.3 and 2.0 times SGLang's throughput with top-1, and less with top-2.",
        "Durations do not depend on a request's context, so workloads differ by their ends alone. The host "
        "time of both systems is not modelled. The paper's ratios would need an SGLang that is slower by it.",
    ),
    "nodes": Figure(
        "figure 10",
        nodes,
        "SGLang's throughput does not grow from 8 to 16 GPUs, AsyncMoE's does 1.92 times. With 16 GPUs "
        "AsyncMoE has 3 times SGLang's.",
        "The most popular of 16 experts has a smaller share than that of 8 here, so SGLang grows. It would "
        "not if both shares were equal. So at 16 GPUs async has hardly more than the barrier's throughput as "
        "given, and the paper's 3 times is not there. Memory for keys and values does not end here, so "
        "latency does not level off.",
    ),
    "policies": Figure(
        "figure 11",
        policies,
        "Defrag has lower latency and higher throughput than MTFS and FLFS. The text has no numbers.",
        "The load is given by clients and not by a rate. Columns of ratios are the median, the least and the "
        "largest over the seeds, each to the first policy with the same seed. No policy is ahead everywhere.",
    ),
    "arrivals": Figure(
        "figure 12",
        arrivals,
        "Under FLFS at 250 requests/s fewer requests end than come. The text has no numbers.",
        "Nothing is in flight at the beginning here, so requests begin to end only later.",
    ),
    "breakdown": Figure(
        "figure 13",
        breakdown,
        "2.7 ms and 0.8 ms. Page tables and copies are large parts of attention, kernels most of experts.",
        "Both times are what our devices are made of. Stages of host and kernels are not modelled: "
        "beside_kernels is the share that a roofline leaves for them.",
    ),
    "sweep": Figure(
        "the gain of figure 9 by its assumptions",
        sweep,
        "2.7, 2.3 and 2.0 times SGLang's throughput. Shares, rows of a run and host time are not stated.",
        "limit says from which skew on the schedule could give these gains, with no host time at all.",
    ),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(DEVICES))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument(
        "--clients", nargs="+", type=int, default=[2048, 8192, 32768], help="of 8 GPUs; twice as many of 16"
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--top-k", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=8.0, help="simulated; the second half is measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="of policies")
    parser.add_argument("--event-us", nargs="+", type=float, default=[0.0], help="of policies and sweep")
    parser.add_argument("--layers", type=int, default=8, help="of sweep")
    parser.add_argument("--zipf", nargs="+", type=float, default=list(ZIPF), help="of sweep")


if __name__ == "__main__":
    main(__doc__, FIGURES, add)
