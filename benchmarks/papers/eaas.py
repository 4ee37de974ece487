"""Expert-as-a-Service, figures 10 and 11, in virtual time: `python benchmarks/papers/eaas.py scale`.

Paper (section 5): DeepSeek R1 on H800 GPUs, decoding only, as many clients (attention) as servers
(experts).

    scale  figure 11: with requests in proportion to GPUs, throughput grows nearly linearly from 32 to 64
           GPUs, by any number of GPUs. 64 GPUs have 4096 requests.
    kill   figure 10: ten of 64 GPUs are disabled one at a time, with experts on other servers too. The
           decoding throughput falls by less than 2 %.

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
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

from moesaic.cost.sizes import KNOWN
from moesaic.sim.cluster import SimulatedCluster
from moesaic.sim.scenario import parse

LAYERS = 8
MODEL = replace(KNOWN["deepseek-v3"], layers=LAYERS, moe_layers=LAYERS)
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


def scale(options: argparse.Namespace) -> None:
    """Figure 11."""
    base = None
    for gpus in options.gpus:
        workers = gpus // 2
        servers = gpus - workers
        found = cluster(workers, servers, options.seconds, warm_up=options.seconds / 3).run()
        rate = REQUESTS * gpus / found.itl.mean
        base = base or rate / gpus
        row = {
            "gpus": gpus,
            "workers": workers,
            "servers": servers,
            "tokens_per_second": round(rate),
            "per_gpu": round(rate / gpus, 1),
            "of_linear": round(rate / gpus / base, 3),
            "itl_ms": round(1000 * found.itl.mean, 1),
        }
        print(json.dumps(row), flush=True)


def kill(options: argparse.Namespace) -> None:
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
    row = {
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
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=["scale", "kill"])
    parser.add_argument(
        "--gpus", nargs="+", type=int, default=[*range(32, 65)], help="kill takes the first one"
    )
    parser.add_argument("--seconds", type=float, default=0.1, help="simulated")
    parser.add_argument("--way", choices=["dies", "vanishes"], default="dies")
    options = parser.parse_args()
    (scale if options.figure == "scale" else kill)(options)


if __name__ == "__main__":
    main()
