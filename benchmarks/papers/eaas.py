"""Expert-as-a-Service, figures 8 to 13, in virtual time: `python benchmarks/papers/eaas.py scale`.

Paper (section 5): DeepSeek R1 on H800 GPUs, decoding only, as many clients (attention) as servers
(experts).

    scale  figure 11: with requests in proportion to GPUs, throughput grows nearly linearly from 32 to 64
           GPUs, by any number of GPUs. 64 GPUs have 4096 requests.
    kill   figure 10: ten of 64 GPUs are disabled one at a time, with experts on other servers too. The
           decoding throughput falls by less than 2 %.
    load   figures 8b and 9b: throughput and latency by requests, 16 + 16 GPUs beside 32 that each have
           attention and experts, and wait for each other in each layer (SGLang with DeepEP). The text
           states no numbers.
    beside the same at the last number of requests, by what is assumed of both
    saving section 5.3: 5120 requests on 64, 48 and 40 GPUs, beside 64 that have both, and beside 64 with
           8192 requests. It has 2 layers and no sampler. "of_shared" is throughput over that of devices
           that have both, "host_ms" what those would have to lose in a token to be as slow, and
           "of_full_itl" the time between tokens over that with 8192 requests
    day    the GPU-hours of a day's load, if GPUs come and go two at a time, beside a fixed number
    ablate figure 13, 4096 requests on 64 GPUs: without double batching throughput falls by 25.9 %, without
           CUDA graphs by 91.9 %, without compact groups by 14.9 %. Expert load balancing (EPLB) gives 2.4
           to 5.1 % more. Each is computed for several values of what decides it.
    trip   figure 12: a round trip of [512, 7168] numbers takes 49.6 % (2 + 2) and 34.7 % (1 + 3) less time
           than StepMesh's.

Here: the sizes of DeepSeek V3 and the roofline of an H100 in bf16, which no GPU reaches. The paper's H800
computes in 8 bits. So only ratios are comparable. Two batches of a worker are in flight, and servers
answer sums, as in the paper. A server computes whatever is there. Routing is zipf with exponent 0.3. Only
8 of the 58 layers are simulated, since all take the same time. A token takes 58 / 8 times as long with
all.

`kill` waits until the batches have settled, and then kills one process after another. Each is back before the
next one goes. The same run without faults stands beside it: "loss" is to its rate in the same seconds,
"lost_ms_a_kill" is that in milliseconds of all throughput,
"largest_loss" that of the worst kill until the next one, and "drift_without" how far its own rates in these
parts are apart. Its ways:

    server dies      the process ends and connections break, so clients ask others at once
    server vanishes  nobody is told: clients wait for their own timeout, as `serve` has it
    worker dies      its requests go on at other workers at once, and their keys and values are there
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from figures import Figure, Row, main

from moesaic.core.errors import ConfigError
from moesaic.cost.sizes import PUBLISHED_MODELS, ModelSizes
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.scenario import parse

LAYERS = 8
MODEL = replace(PUBLISHED_MODELS["deepseek-v3"], layers=LAYERS, moe_layers=LAYERS)
LINKS = {"latency_us": 10.0, "gb_per_s": 50.0, "number_bytes": 2}
EIGHT_BITS = replace(MODEL, expert_width=MODEL.expert_width // 2)
"""Half the bytes and half the time of an expert's products, as with 8 bits."""
SHARED, SERVICES = "shared devices, 32", "services, 16 + 16"
SHAPES: dict[str, dict[str, Any]] = {
    SHARED: {
        "workers": 32,
        "servers": 32,
        "together": {"beside_workers": True},
        "schedule": {"kind": "barrier", "combine": "partial"},
    },
    SERVICES: {"workers": 16, "servers": 16},
}
SAVINGS = {
    "bf16": (MODEL, 0.3),
    "experts in 8 bits": (EIGHT_BITS, 0.3),
    "8 bits, even routing": (EIGHT_BITS, 0.0),
    "8 bits, zipf 0.9": (EIGHT_BITS, 0.9),
}
"""What `saving` assumes -> the model, and the exponent of zipf."""
SMALLEST = 12
"""GPUs of the smallest cluster of a day."""
WAYS = ("server dies", "server vanishes", "worker dies")
REQUESTS = 64
"""Requests for each GPU: 4096 on 64."""


def cluster(
    attention: int, experts: int, seconds: float, model: ModelSizes = MODEL, **more: Any
) -> SimulatedCluster:
    """Clients and servers with requests in proportion to both."""
    clients = REQUESTS * (attention + experts)
    each = -(-clients // attention)
    tables: dict[str, Any] = {
        "model": "deepseek-v3",
        "devices": "h100",
        "seed": 1,
        "duration": seconds,
        "links": LINKS,
        "workers": {
            "count": attention,
            "max_num_seqs": each,
            "max_num_batched_tokens": each,
            "max_model_len": 2048,
        },
        "servers": {"count": experts, "batch_pairs": 1},
        "placement": {"min_replicas": 2},
        "schedule": {"kind": "lockstep", "inflight_batches": 2, "combine": "partial"},
        "workload": {"kind": "closed", "clients": clients, "prompt": 200, "answer": 768, "prefill": False},
        "routing": {"kind": "zipf", "exponent": 0.3},
    }
    return SimulatedCluster(parse(tables | more), model)


def scale(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 11."""
    base = None
    for gpus in options.gpus:
        workers = gpus // 2
        servers = gpus - workers
        found = cluster(workers, servers, options.seconds, warm_up=options.seconds / 3).run()
        rate = REQUESTS * gpus / found.itl.mean
        base = base or rate / gpus
        yield {
            "gpus": gpus,
            "workers": workers,
            "servers": servers,
            "tokens_per_second": round(rate),
            "per_gpu": round(rate / gpus, 1),
            "of_linear": round(rate / gpus / base, 3),
            "itl_ms": round(1000 * found.itl.mean, 1),
        }


def kill(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 10: kills one after another, beside the same run without them."""
    gpus = options.gpus[0]
    half, every, begin = gpus // 2, options.every, options.warm_up
    times = [begin + number * every for number in range(options.kills)]

    def run(way: str) -> SimulatedCluster:
        name, _, kind = way.partition(" ")
        faults = [
            {"at": at, name: (5 * number + 2) % half, "kind": kind, "back": options.back * every}
            for number, at in enumerate(times)
        ]
        seats = {"max_num_seqs": 4 * REQUESTS, "max_num_batched_tokens": 4 * REQUESTS, "max_model_len": 2048}
        more: dict[str, Any] = {"workers": {"count": half, **seats}, "faults": faults if kind else []}
        one = cluster(half, half, begin + options.kills * every, **more)
        one.run()
        return one

    control = run("none")
    parts = [_rate(control, at, at + every) for at in times]
    drift = max(parts) / min(parts) - 1
    for way in options.ways:
        one = run(way)
        losses = [1 - _rate(one, at, at + every) / part for at, part in zip(times, parts, strict=True)]
        after, whole = times[0], times[-1] + every
        stats = [worker.executor.experts.replicas.stats for worker in one.workers]
        yield {
            "gpus": gpus,
            "way": way,
            "kills": options.kills,
            "without": _rate(control, after, whole),
            "with": _rate(one, after, whole),
            "loss": round(1 - _rate(one, after, whole) / _rate(control, after, whole), 4),
            "lost_ms_a_kill": round(1000 * every * sum(losses) / len(losses), 1),
            "largest_loss": round(max(losses), 4),
            "drift_without": round(drift, 4),
            "longest_gap_s": round(max(later - earlier for earlier, later in _gaps(one, after, whole)), 3),
            "gap_without_s": round(
                max(later - earlier for earlier, later in _gaps(control, after, whole)), 3
            ),
            "failovers": sum(item.failovers for item in stats),
            "false_failovers": sum(item.false_failovers for item in stats),
        }


def _gaps(run: SimulatedCluster, begin: float, end: float) -> list[tuple[float, float]]:
    """When a token and the one before it came, of those that came in this time."""
    pairs = [pair for life in run.front.lives for pair in pairwise(life.times)]
    return [(earlier, later) for earlier, later in pairs if begin < later <= end]


def _rate(run: SimulatedCluster, begin: float, end: float) -> float:
    """Tokens/s: requests over the mean time between two tokens of one."""
    gaps = _gaps(run, begin, end)
    clients = run.scenario.workload.clients
    assert clients is not None
    return clients * len(gaps) / sum(later - earlier for earlier, later in gaps)


def load(options: argparse.Namespace) -> Iterator[Row]:
    """Figures 8b and 9b."""
    for requests in options.requests:
        found = {name: _speed(_loaded(requests, options.seconds, **shape)) for name, shape in SHAPES.items()}
        for name, speed in found.items():
            ratio = speed["tokens_per_second"] / found[SHARED]["tokens_per_second"]
            yield {"system": name, "requests": requests, **speed, "of_shared": round(ratio, 2)}


def _loaded(
    requests: int,
    seconds: float,
    workers: int,
    servers: int,
    together: dict[str, Any] | None = None,
    event_us: float = 0.0,
    model: ModelSizes = MODEL,
    sampler_ms: float | None = None,
    **more: Any,
) -> SimulatedCluster:
    """A cluster with this number of requests, which has run."""
    each = -(-requests // workers)
    seats = {"max_num_seqs": each, "max_num_batched_tokens": each, "max_model_len": 2048}
    tables = {
        "warm_up": seconds / 3,
        "workers": {"count": workers, "event_us": event_us, **seats}
        | ({} if sampler_ms is None else {"sampler_ms": sampler_ms}),
        "servers": {"count": servers, **(together or {"batch_pairs": 1})},
        "workload": {"kind": "closed", "clients": requests, "prompt": 200, "answer": 768, "prefill": False},
        "placement": {},
        **more,
    }
    return cluster(workers, servers, seconds, model, **tables)


def _speed(run: SimulatedCluster) -> dict[str, float]:
    """Tokens/s with all layers, and milliseconds between two tokens."""
    clients, itl = run.scenario.workload.clients, run.run().itl.mean
    assert clients is not None
    if not itl:
        raise ConfigError.field("--seconds", run.scenario.duration, "more, so that a request gets two tokens")
    itl *= PUBLISHED_MODELS["deepseek-v3"].moe_layers / len(run.shape.layout.layers)
    return {"tokens_per_second": round(clients / itl), "itl_ms": round(1000 * itl, 1)}


def ablate(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 13, on 32 GPUs with as many requests for each."""
    ranks, requests = 16, 32 * REQUESTS

    def change(given: dict[str, Any], **more: Any) -> float:
        """What `more` changes beside `given`."""
        before, after = (
            _loaded(requests, options.seconds, ranks, ranks, **tables).run().itl.mean
            for tables in (given, given | more)
        )
        return round(before / after - 1, 3)

    def line(what: str, stated: str, assumed: str, found: float) -> Row:
        return {"without_or_with": what, "stated": stated, "assumed": assumed, "change": found}

    one = {"kind": "lockstep", "inflight_batches": 1, "combine": "partial"}
    for latency in (10, 50, 100, 200, 400):
        given: dict[str, Any] = {"links": {**LINKS, "latency_us": float(latency)}}
        found = change(given, schedule=one)
        yield line("without double batching", "-0.259", f"{latency} us one way", found)
    for exponent, copies in product((0.3, 0.6, 0.9), (16, 32)):
        given = {"routing": {"kind": "zipf", "exponent": exponent}}
        found = change(given, placement={"redundant_experts": copies})
        yield line(f"{copies} redundant experts", "+0.024 to +0.051", f"zipf {exponent:g}", found)
    for event_us in (50.0, 200.0, 800.0, 3200.0):
        found = change({}, event_us=event_us)
        yield line("without CUDA graphs", "-0.919", f"{event_us:g} us an event", found)
    empty = round(0.149 / (1 - 0.149) / (MODEL.experts / ranks), 4)
    yield line("without compact groups", "-0.149", f"an empty group takes {empty:g} of reading one", -0.149)


def beside(options: argparse.Namespace) -> Iterator[Row]:
    """What decides figure 8b: services beside shared devices, at one number of requests."""
    requests = options.requests[-1]
    base = {"links": LINKS, "model": MODEL, "event_us": 0.0}
    lockstep = {"schedule": {"kind": "lockstep", "combine": "partial"}}
    eight = {"model": EIGHT_BITS}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("as in load", {}, {}),
        ("experts in 8 bits", eight, eight),
        ("shared devices wait for some runs only", {}, lockstep),
        ("the same, experts in 8 bits", eight, eight | lockstep),
        *(
            (f"shared devices' host takes {us:g} us an event", {}, {"event_us": us})
            for us in (500.0, 1000.0, 2000.0, 4000.0)
        ),
    ]
    for what, services, shared in cases:
        ours, theirs = (
            _speed(_loaded(requests, options.seconds, **{**base, **SHAPES[name], **more}))
            for name, more in ((SERVICES, services), (SHARED, shared))
        )
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        yield {
            "assumed": what,
            "requests": requests,
            "services": ours["tokens_per_second"],
            "shared": theirs["tokens_per_second"],
            "of_shared": round(ratio, 2),
        }


def saving(options: argparse.Namespace) -> Iterator[Row]:
    """Section 5.3: 5,120 requests on fewer GPUs than 64 that each have attention and experts."""
    most, requests = options.traffic
    for what in options.assume:
        model, exponent = SAVINGS[what]
        given: dict[str, Any] = {
            "links": LINKS,
            "sampler_ms": 0.0,
            "model": replace(model, layers=options.layers, moe_layers=options.layers),
            "routing": {"kind": "zipf", "exponent": exponent},
        }
        first = sum(options.sizes[0])

        def speed(clients: int, shape: dict[str, Any], given: dict[str, Any] = given) -> dict[str, float]:
            return _speed(_loaded(clients, options.seconds, **(given | shape)))

        shared = speed(requests, {**SHAPES[SHARED], "workers": first, "servers": first})
        row: Row = {"assumed": what, "requests": requests}
        yield row | {"system": f"shared devices, {first}", **shared, "of_shared": 1.0}
        full = speed(most, dict(zip(("workers", "servers"), options.sizes[0], strict=True)))
        yield {
            "assumed": what,
            "requests": most,
            "system": _named(options.sizes[0]),
            **full,
            "of_full_itl": 1.0,
        }
        for split in options.sizes:
            found = speed(requests, dict(zip(("workers", "servers"), split, strict=True)))
            yield row | {
                "system": _named(split),
                **found,
                "of_shared": round(found["tokens_per_second"] / shared["tokens_per_second"], 2),
                "host_ms": round(found["itl_ms"] - shared["itl_ms"], 1),
                "of_full_itl": round(found["itl_ms"] / full["itl_ms"], 2),
            }


def _named(split: tuple[int, int]) -> str:
    return f"services, {split[0]} + {split[1]}"


def _split(text: str) -> tuple[int, int]:
    """GPUs of clients and of servers: "20+20" -> (20, 20). Raises ValueError."""
    clients, servers = text.split("+")
    return int(clients), int(servers)


def day(options: argparse.Namespace) -> Iterator[Row]:
    """A day's load on 32 GPUs: as many as the objective needs each hour, beside all of them."""
    most = options.gpus[0]
    peak = REQUESTS * most
    for what, model in (("bf16", MODEL), ("experts in 8 bits", EIGHT_BITS)):

        @lru_cache
        def itl(requests: int, gpus: int, model: ModelSizes = model) -> float:
            return _loaded(requests, options.seconds, gpus // 2, gpus // 2, model=model).run().itl.mean

        objective, gpus, used = options.slack * itl(peak, most), SMALLEST, 0
        for hour in range(13):
            requests = round(peak * (0.625 - 0.375 * math.cos(2 * math.pi * hour / 24)) / 64) * 64
            while gpus < most and itl(requests, gpus) > objective:
                gpus += 2
            used += gpus * (1 if hour in (0, 12) else 2)
            row = {"assumed": what, "hour": hour, "requests": requests, "gpus": gpus}
            yield row | {"of_objective": round(itl(requests, gpus) / objective, 2)}
        yield {
            "assumed": what,
            "hour": "the day",
            "gpu_hours": used,
            "gpu_hours_fixed": 24 * most,
            "saved": round(1 - used / (24 * most), 3),
            "stated": "0.375 at one load",
        }


def trip(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 12: what a CPU between wire and GPU would have to take for each message."""
    del options
    size = 512 * MODEL.hidden * 2
    cases = (("2 clients, 2 servers", 1, 0.496), ("1 client, 3 servers", 3, 0.347))
    for (what, sends, stated), host in product(cases, (10, 20, 50, 100, 200, 500)):
        wire = 2 * (10e-6 + sends * size / 50e9)
        saved = 2 * host * 1e-6 / (wire + 2 * host * 1e-6)
        row = {"what": what, "wire_us": round(1e6 * wire), "host_us_a_message": host}
        yield row | {"saved": round(saved, 3), "stated": stated}


FIGURES = {
    "scale": Figure("figure 11", scale, "throughput grows nearly linearly, by any number of GPUs."),
    "kill": Figure("figure 10", kill, "ten kills cost less than 2 % of the decoding throughput."),
    "load": Figure(
        "figures 8b and 9b",
        load,
        "the text has no numbers; services keep up with 32 GPUs that have both.",
        "Half of the GPUs read all experts here, so services lose where reading is the limit. "
        "The paper blames host time and its balance for SGLang's long tail. Neither is modelled: see beside.",
    ),
    "beside": Figure(
        "figure 8b by its assumptions",
        beside,
        "services are about as fast as 32 GPUs that have both.",
        "Where of_shared reaches 1 both are as fast: that much the baseline's host would have to take.",
    ),
    "saving": Figure(
        "section 5.3",
        saving,
        "5,120 requests have on 40 GPUs the throughput that the baselines have on 64: 37.5 % fewer.",
        "Fewer GPUs read and compute for longer, so a token takes longer with any roofline. It would not "
        "where time that does not depend on the number of GPUs is most of a step, such as a host's.",
    ),
    "day": Figure(
        "section 5.3, a day",
        day,
        "up to 37.5 % of the GPUs, where traffic falls from 8,192 to 5,120 requests.",
        "The load is a cosine from a quarter of the peak to the peak. GPUs come and go by two each hour, "
        "which takes no time. The objective is --slack times the time between tokens at the peak. Hours 13 "
        "to 23 are those before noon backwards.",
    ),
    "ablate": Figure(
        "figure 13",
        ablate,
        "the column stated.",
        "Each line has what it assumes. A copy of an expert is read twice, so copies gain only where "
        "skew is large. The simulation has no empty groups: the last line is put in and not computed.",
    ),
    "trip": Figure(
        "figure 12",
        trip,
        "49.6 % and 34.7 % less than StepMesh's.",
        "A link has latency and bandwidth here, and no host. saved is what a host's time for each of the two "
        "messages adds to that, so the paper's figures are an assumption here and not a result.",
    ),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus", nargs="+", type=int, default=[*range(32, 65)], help="kill takes the first one"
    )
    parser.add_argument("--seconds", type=float, default=0.1, help="simulated")
    parser.add_argument(
        "--requests", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096], help="of load"
    )
    sizes = [(32, 32), (24, 24), (20, 20), (14, 26)]
    parser.add_argument(
        "--sizes", nargs="+", type=_split, default=sizes, help="of saving: GPUs of clients + servers"
    )
    parser.add_argument(
        "--traffic", nargs=2, type=int, default=[8192, 5120], help="of saving: requests before and now"
    )
    parser.add_argument("--assume", nargs="+", choices=list(SAVINGS), default=list(SAVINGS), help="of saving")
    parser.add_argument("--layers", type=int, default=2, help="of saving")
    parser.add_argument(
        "--slack", type=float, default=1.1, help="of day: the objective over that at the peak"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="of kill")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=float, default=0.1, help="seconds between two kills")
    parser.add_argument("--back", type=float, default=0.5, help="part of that time after which it is back")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds before the first kill")


if __name__ == "__main__":
    main(__doc__, FIGURES, add)
