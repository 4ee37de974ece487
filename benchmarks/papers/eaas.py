"""Expert-as-a-Service, figures 8 to 13, in virtual time: `python benchmarks/papers/eaas.py scale`.

Paper (section 5): DeepSeek R1 on H800 GPUs, decoding only, as many clients (attention) as servers
(experts).

    scale  figure 11: with requests in proportion to GPUs, throughput grows nearly linearly from 32 to 64
           GPUs, by any number of GPUs. 64 GPUs have 4096 requests.
    kill   figure 10: ten of 64 GPUs are disabled one at a time, with experts on other servers too. The
           decoding throughput falls by less than 2 %.
    load   figures 8b and 9b: throughput and latency by requests, 16 + 16 GPUs beside 32 that each have
           attention and experts (SGLang with DeepEP). The text states no numbers.
    ablate figure 13, 4096 requests on 64 GPUs: without double batching throughput falls by 25.9 %, without
           CUDA graphs by 91.9 %, without compact groups by 14.9 %. Expert load balancing (EPLB) gives 2.4
           to 5.1 % more.
    trip   figure 12: a round trip of [512, 7168] numbers takes 49.6 % (2 + 2) and 34.7 % (1 + 3) less time
           than StepMesh's.

What would have to be true, where the model does not give a claim:

    load   The paper blames host time and its balance for SGLang's long tail. Neither is modelled, and GPUs
           wait only for those that they ask, not for all.
    ablate Copies of experts make servers read more weights here, so they lose. They would gain where rows
           are the limit of servers, and not reading as with a roofline in bf16. CUDA graphs: the lines give
           the loss by the host time of each event (event_us). Compact groups: the simulation has no empty
           groups. The line says how long one would have to take, as a part of an expert's mean time.
    trip   A link has latency and bandwidth here, and no host. The lines say what StepMesh's host and kernels
           add if the paper's library adds nothing. One client sends its rows to each of three servers.

Here: the sizes of DeepSeek V3 and the roofline of an H100 in bf16, which no GPU reaches. The paper's H800
computes in 8 bits. So only ratios are comparable. Two batches of a worker are in flight, and servers
answer sums, as in the paper. A server computes whatever is there. Routing is zipf with exponent 0.3. Only
8 of the 58 layers are simulated, since all take the same time. A token takes 58 / 8 times as long with
all. `kill` runs one kill, after a third of the time. It gives the rate before it, and from it to the end.
Its ways:

    dies      the process ends and connections break, so clients ask others at once
    vanishes  nobody is told: clients wait for their own timeout, which is at least 0.3 s here
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from figures import Figure, Row, main

from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.figures import Figures
from moesaic.planning.sim.scenario import parse

LAYERS = 8
MODEL = replace(PUBLISHED_MODELS["deepseek-v3"], layers=LAYERS, moe_layers=LAYERS)
REQUESTS = 64
"""Requests for each GPU: 4096 on 64."""


def cluster(attention: int, experts: int, seconds: float, **more: Any) -> SimulatedCluster:
    """Clients and servers with requests in proportion to both."""
    clients = REQUESTS * (attention + experts)
    each = -(-clients // attention)
    tables: dict[str, Any] = {
        "model": "deepseek-v3",
        "devices": "h100",
        "seed": 1,
        "duration": seconds,
        "links": {"latency_us": 10.0, "gb_per_s": 50.0, "number_bytes": 2},
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
    return SimulatedCluster(parse(tables | more), MODEL)


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
    """Figure 10: one kill."""
    half = options.gpus[0] // 2
    fault = {"at": options.seconds / 3, "server": half // 2, "kind": options.way}
    run = cluster(half, half, options.seconds, faults=[fault])
    found = run.run()
    third = options.seconds / 3
    pairs = [pair for life in run.front.lives for pair in pairwise(life.times)]
    gaps = {
        "before": [later - earlier for earlier, later in pairs if third / 2 < later <= third],
        "after": [later - earlier for earlier, later in pairs if later > third],
    }
    before, after = (len(gap) / sum(gap) * REQUESTS * 2 * half for gap in gaps.values())
    yield {
        "gpus": options.gpus[0],
        "way": options.way,
        "before": round(before),
        "after": round(after),
        "loss": round(1 - after / before, 4),
        "seconds_after": round(2 * third, 3),
        "longest_gap_s": round(max(gaps["after"]), 3),
        "itl_ms": round(1000 * found.itl.mean, 1),
        "failovers": found.failovers,
        "resent_pairs": found.resent_pairs,
    }


def load(options: argparse.Namespace) -> Iterator[Row]:
    """Figures 8b and 9b."""
    shapes: dict[str, dict[str, Any]] = {
        "services, 16 + 16": {"workers": 16, "servers": 16},
        "shared devices, 32": {
            "workers": 32,
            "servers": 32,
            "together": {"beside_workers": True},
            "schedule": {"kind": "lockstep", "combine": "partial"},
        },
    }
    for requests in options.requests:
        for name, shape in shapes.items():
            found = _loaded(requests, options.seconds, **shape).run()
            yield {"system": name, "requests": requests, **_speed(found, requests)}


def _loaded(
    requests: int,
    seconds: float,
    workers: int,
    servers: int,
    together: dict[str, Any] | None = None,
    event_us: float = 0.0,
    **more: Any,
) -> SimulatedCluster:
    """A cluster with this number of requests."""
    each = -(-requests // workers)
    seats = {"max_num_seqs": each, "max_num_batched_tokens": each, "max_model_len": 2048}
    tables = {
        "warm_up": seconds / 3,
        "workers": {"count": workers, "event_us": event_us, **seats},
        "servers": {"count": servers, "batch_pairs": None if together else 1, **(together or {})},
        "workload": {"kind": "closed", "clients": requests, "prompt": 200, "answer": 768, "prefill": False},
        "placement": {},
        **more,
    }
    tables["servers"] = {name: value for name, value in tables["servers"].items() if value is not None}
    return cluster(workers, servers, seconds, **tables)


def _speed(found: Figures, requests: int) -> dict[str, float]:
    """Tokens/s with all layers, and milliseconds between two tokens."""
    itl = found.itl.mean * PUBLISHED_MODELS["deepseek-v3"].moe_layers / LAYERS
    return {"tokens_per_second": round(requests / itl), "itl_ms": round(1000 * itl, 1)}


def ablate(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 13, on 32 GPUs with as many requests for each."""
    ranks, requests = 16, 32 * REQUESTS

    def rate(**more: Any) -> float:
        found = _loaded(requests, options.seconds, ranks, ranks, **more).run()
        return requests / found.itl.mean

    base = rate()

    def line(what: str, stated: str, found: float, **more: Any) -> Row:
        return {"what": what, "stated": stated, "change": round(found / base - 1, 3), **more}

    one = {"kind": "lockstep", "inflight_batches": 1, "combine": "partial"}
    yield line("without double batching", "-0.259", rate(schedule=one))
    for copies in (16, 32):
        yield line(
            f"{copies} redundant experts", "+0.024 to +0.051", rate(placement={"redundant_experts": copies})
        )
    for event_us in (50, 200, 800):
        found = rate(event_us=event_us)
        yield line("without CUDA graphs, if an event takes", "-0.919", found, event_us=event_us)
    held = MODEL.experts / ranks
    empty = round(0.149 / (1 - 0.149) / held, 4)
    yield line("without compact groups", "-0.149", base, empty_group_of_reading=empty)


def trip(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 12: the wire's time, and what host and kernels add if the paper's library adds nothing."""
    size = 512 * MODEL.hidden * 2
    for what, ends, saved in (("2 clients, 2 servers", 2, 0.496), ("1 client, 3 servers", 3, 0.347)):
        wire = 2 * (10e-6 + size / 50e9) if ends == 2 else 2 * (10e-6 + 3 * size / 50e9)
        theirs = wire / (1 - saved)
        yield {"what": what, "wire_us": round(1e6 * wire), "stepmesh_adds_us": round(1e6 * (theirs - wire))}


FIGURES = {
    "scale": Figure("figure 11", scale, "throughput grows nearly linearly, by any number of GPUs."),
    "kill": Figure("figure 10", kill, "ten kills cost less than 2 % of the decoding throughput."),
    "load": Figure("figures 8b and 9b", load, "the text has no numbers.", "See the script's own text."),
    "ablate": Figure("figure 13", ablate, "the column stated.", "See the script's own text."),
    "trip": Figure(
        "figure 12", trip, "49.6 % and 34.7 % less than StepMesh's.", "See the script's own text."
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
    parser.add_argument("--way", choices=["dies", "vanishes"], default="dies")


if __name__ == "__main__":
    main(__doc__, FIGURES, add)
