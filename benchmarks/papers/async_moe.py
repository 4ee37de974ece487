"""Asynchronous Expert Parallelism, figure 9, in virtual time: `python benchmarks/papers/async_moe.py`.

Paper (section 5): Mixtral 8x7B with one key head on 8 GPUs, decoding only. AsyncMoE has attention on 4
GPUs and experts on 4. Its baseline SGLang has both on all 8. Requests arrive as a Poisson process.
Lengths of prompts and answers are uniform: short 30-70 and 70-130, medium 50-150 and 50-250, reasonable
100-300 and 100-500. The router chooses experts at random with shares that were fitted to an exponential
distribution. AsyncMoE reaches 2.7, 2.3 and 2.0 times SGLang's throughput with top-1, and less with top-2.

Here: the same counts of devices, lengths and shares. Each layer has its own popular experts. A number of
clients send a request once theirs is answered. With more clients throughput and the time between tokens
grow, as along the paper's curves. Five systems:

    barrier, 8 shared   a worker and a server on each of 8 devices, in step: what SGLang does
    barrier, 4 + 4      4 workers and 4 servers, in step
    lockstep, 4 + 4     each worker runs its own batch through the layers
    async, 4 + 4        the paper's schedule: runs never wait, a queue for each expert, history 10 on
                        servers
    async, as served    the schedule with the thresholds of `moesaic serve`

Two sets of devices:

    as given    async_moe.toml. It assumes that the paper's 2.7 ms (attention) and 0.8 ms (experts) are
                those of up to 128 rows, by figure 3.
    by rate     The same 2.7 ms and 0.8 ms, for as many rows as the paper's own rate needs. Figure 11 has
                250 requests per second of 150 tokens at 80 % of the maximum. So 4 GPUs with 33 runs of
                2.7 ms for each token need 835 rows in a run, and experts 240. Nothing is fitted to 2.7,
                2.3 and 2.0.

The durations do not depend on a request's context, so the three workloads differ here by their ends
alone.

The columns: clients, tokens/s, their ratio to the first system, ms between tokens, busy share of workers
and of servers, rows of a worker's run, pairs of a server's run. tokens/s = clients / time between tokens
(Little's law): a count would depend on how many steps end in the measured time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from moesaic.cost.sizes import KNOWN
from moesaic.sim.cluster import SimulatedCluster
from moesaic.sim.figures import Figures
from moesaic.sim.scenario import parse

HERE = Path(__file__).parent
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
PAPER = {"kind": "async", "run_rows": 0, "queue_urgency": 0.1}
PAPER_SERVERS = {"batch_pairs": 1, "by_expert": True, "queue_history": 10}
SYSTEMS: dict[str, dict[str, Any]] = {
    "barrier, 8 shared": {"count": 8, "schedule": {"kind": "barrier"}, "servers": {"beside_workers": True}},
    "barrier, 4 + 4": {"count": 4, "schedule": {"kind": "barrier"}},
    "lockstep, 4 + 4": {"count": 4, "schedule": {"kind": "lockstep"}},
    "async, 4 + 4": {"count": 4, "schedule": PAPER, "servers": PAPER_SERVERS},
    "async, as served": {"count": 4, "schedule": {"kind": "async"}},
}


def simulate(
    devices: str, workload: str, top_k: int, clients: int, system: str, seconds: float, seed: int
) -> Figures:
    """One system under one workload."""
    prompt, answer = WORKLOADS[workload]
    shape = SYSTEMS[system]
    count = shape["count"]
    tables = {
        "model": "mixtral-8x7b",
        "devices": DEVICES[devices],
        "seed": seed,
        "duration": seconds,
        "warm_up": seconds / 2,
        "links": {"number_bytes": 2},
        "workers": {
            "count": count,
            "max_num_seqs": clients // count,
            "max_num_batched_tokens": clients // count,
            "max_model_len": 1024,
        },
        "servers": {"count": count, **shape.get("servers", {})},
        "schedule": shape["schedule"],
        "workload": {
            "kind": "closed",
            "clients": clients,
            "prompt": prompt,
            "answer": answer,
            "prefill": False,
        },
        "routing": {"kind": "exponential", "top_k": top_k},
    }
    return SimulatedCluster(parse(tables, HERE), KNOWN["mixtral-8x7b"]).run()


def busy(figures: Figures, kind: str) -> float:
    """Mean busy share of the workers, of the servers, or of shared devices."""
    shares = [share for name, share in figures.utilisation.items() if name.startswith((kind, "device"))]
    return sum(shares) / len(shares)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of the table."""
    cases = product(options.devices, options.top_k, options.workloads, options.clients)
    for devices, top_k, workload, clients in cases:
        base = None
        for system in options.systems:
            found = simulate(devices, workload, top_k, clients, system, options.seconds, options.seed)
            rate = clients / found.itl.mean
            base = base or rate
            yield {
                "devices": devices,
                "top_k": top_k,
                "workload": workload,
                "clients": clients,
                "system": system,
                "tokens_per_second": round(rate),
                "ratio": round(rate / base, 2),
                "stated": STATED.get((workload, top_k)) if system == "async, 4 + 4" else None,
                "itl_ms": round(1000 * found.itl.mean, 1),
                "workers_busy": round(busy(found, "worker"), 2),
                "servers_busy": round(busy(found, "server"), 2),
                "rows_per_run": round(found.rows_per_run),
                "pairs_per_run": round(found.pairs_per_run),
                "partial_runs": found.partial_runs and round(found.partial_runs, 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(DEVICES))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--clients", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--top-k", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=8.0, help="simulated; the second half is measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    for row in rows(options):
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        stated = f"  paper: {row['stated']}" if row["stated"] else ""
        print(
            f"{row['devices']:9} top-{row['top_k']} {row['workload']:11} {row['clients']:6}"
            f" {row['system']:18}{row['tokens_per_second']:8,} tokens/s {row['ratio']:5.2f}x"
            f" {row['itl_ms']:8.1f} ms"
            f"  busy {row['workers_busy']:.2f} {row['servers_busy']:.2f}"
            f"  rows {row['rows_per_run']:5} {row['pairs_per_run']:5}{stated}",
            flush=True,
        )


if __name__ == "__main__":
    main()
