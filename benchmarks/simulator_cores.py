"""Does the simulation give the throughput of real cores? It is asked about `disaggregation.py colocated`.

    python benchmarks/disaggregation.py colocated --checkpoints /tmp/two --shape mixtral-0.75b \\
        --routing uniform alternating --schedule barrier "lockstep 1" "async defrag" auto --json two.json
    python benchmarks/simulator_cores.py two.json --checkpoints /tmp/two --shape mixtral-0.75b

The first command measures two ranks on two cores. The second one measures a cluster of one rank on one core,
with lockstep and some numbers of requests. Another such cluster is busy on the other core meanwhile, since
both read from the same memory. From that it takes the curves of a device: what lies between the experts of
two layers by rows, and a run of experts by its pairs and by the experts whose weights it reads. Then it
simulates two ranks with these curves, the experts that the checkpoint chooses, and no time on links.

So nothing of what is compared was fitted: not how two ranks work together, nor the schedules, nor the skew.

    ratio   simulated / real tokens/s
    order   whether both have the same fastest schedule, of those that differ by more than 3 %
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from disaggregated import colocated
from disaggregated.serving import Served, halves, layout_of, random_prompts, serving, temporary
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moesaic import LLM, SamplingParams
from moesaic.commands.plan import find_model
from moesaic.config import ClusterConfig
from moesaic.jobs.profiling.options import ProfileOptions
from moesaic.jobs.profiling.run import Gatherer
from moesaic.models import files
from moesaic.models.registry import routed_model
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.scenario import parse

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
"""Requests at once of the rank that is measured. Each step has a row of each."""
NEW = 24
"""Tokens of each of them."""
SAME = 0.03
"""Difference below which two schedules count as equally fast."""


@dataclass(frozen=True)
class Step:
    """What one rank needed for a layer, as means over all layers and steps."""

    rows: float
    pairs: float
    experts: float
    """Experts whose weights a run read."""
    attention: float
    """Seconds of the worker, with its share of everything that happens once a step."""
    run: float
    """Seconds of the server's run."""


def one_rank(model: str, rounds: int) -> list[Step]:
    """Measure one rank on one core. The shortest of some rounds counts, since other work only adds."""
    shape = ClusterConfig(attention_workers=1, expert_servers=1, rebalance_interval=0)
    layers, found = len(layout_of(model).layers), []
    with ExitStack() as stack:
        served, other = (
            stack.enter_context(serving(name, model, 1, shape, max_num_seqs=max(REQUESTS)))
            for name in ("one rank", "the other core")
        )
        for core, one in enumerate((served, other)):
            one.pin([core])
            one.measured(random_prompts(8, 1, 1000), 4)
        for requests in track(REQUESTS, "one rank", console=Console(stderr=True)):
            with busy(other, requests):
                tried = [step(served, requests, layers, seed) for seed in range(rounds)]
            found.append(min(tried, key=lambda step: step.attention + step.run))
    return found


@contextmanager
def busy(served: Served, requests: int) -> Iterator[None]:
    """This cluster answers so many requests at a time, again and again."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            served.run(random_prompts(requests, 1, 1000), NEW)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def step(served: Served, requests: int, layers: int, seed: int) -> Step:
    """Measure one round of so many requests."""
    before = served.counters()
    run, took = served.measured(random_prompts(requests, 1, 1000, seed), NEW)
    after = served.counters()
    steps = after.worker.steps - before.worker.steps
    runs = sum(b.runs - a.runs for a, b in zip(before.servers, after.servers, strict=True))
    seconds = max(one[-1] for one in run.times) - sum(took.server_busy)
    return Step(
        requests * NEW / steps,
        took.pairs / runs,
        took.expert_runs / runs,
        seconds / (steps * layers),
        sum(took.server_busy) / runs,
    )


def curves(steps: Sequence[Step]) -> dict[str, Any]:
    """The table of a device: the attention by rows, the experts by least squares over pairs and experts."""
    given = np.array([[1.0, step.pairs, step.experts] for step in steps])
    took = np.array([step.run for step in steps])
    weights = 1.0 / took  # relative errors count
    start, pair, expert = np.linalg.lstsq(given * weights[:, None], took * weights, rcond=None)[0]
    start = max(0.0, float(start))
    most = max(step.pairs for step in steps)
    points = [[1, 1e3 * (start + pair)], [most, 1e3 * (start + pair * most)]]
    return {
        "source": "measured on one core",
        "attention": {"points_ms": [[step.rows, 1e3 * step.attention] for step in steps]},
        "experts": {"points_ms": points, "per_expert_ms": 1e3 * float(expert)},
    }


def record(model: str, file: Path) -> None:
    """Record which experts the tokens of such requests choose."""
    routed = routed_model(files.resolve(model, None))
    given = random_prompts(64, 4, 1000)
    gatherer = Gatherer(routed, ProfileOptions([Path(__file__)], file), [0] * len(given), lambda rows: None)
    llm = LLM(model, seed=0, routing=gatherer, enable_prefix_caching=False)
    llm.generate(given, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    gatherer.fold()
    gatherer.tally.profile(["random"]).save(file)


def simulated(device: dict[str, Any], row: dict[str, Any], model: str, folder: Path) -> float:
    """Tokens/s of a measured cell, in virtual time, while no request begins or ends."""
    schedule = dict(colocated.SCHEDULES[row["schedule"]])
    schedule["kind"] = schedule.pop("schedule")
    scenario = parse(
        {
            "model": model,
            "devices": {**device, "link": {"latency_us": 0.0, "gb_per_s": 1000.0}},
            "duration": 12.0,
            "warm_up": 2.0,
            "workers": {"count": 2, "max_num_seqs": max(64, row["concurrency"] // 2)},
            "servers": {"count": 2, "beside_workers": True},
            "placement": {"kind": "file", "file": "placement.json"},
            "schedule": schedule,
            "workload": {
                "kind": "closed",
                "clients": row["concurrency"],
                "prompt": [4, 4],
                "answer": [400, 400],
                "prefill": False,
            },
            "routing": {"kind": "profile", "file": f"{row['routing']}.npz"},
        },
        folder,
    )
    return SimulatedCluster(scenario, find_model(model)).run().throughput


def fastest(rates: dict[str, float]) -> set[str]:
    """The schedules that are as fast as the fastest one."""
    return {name for name, rate in rates.items() if rate >= (1 - SAME) * max(rates.values())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path, metavar="JSON", help="what `colocated --json` wrote")
    parser.add_argument("--checkpoints", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--shape", default="mixtral-0.75b")
    parser.add_argument("--share", type=float, default=0.75)
    parser.add_argument("--rounds", type=int, default=3, help="of the measured rank")
    parser.add_argument("--json", action="store_true", help="one JSON object a cell, after the curves")
    options = parser.parse_args()
    rows = json.loads(options.real.read_text())["rows"]
    table = Table("routing", "reqs", "schedule", "real tok/s", "simulated", "ratio", "fastest of both")
    with temporary() as name:
        folder, device = Path(name), None
        models = {}
        for routing in {row["routing"]: None for row in rows}:
            options.routing = routing
            models[routing] = str(colocated.checkpoint(options, routing))
            device = device or curves(one_rank(models[routing], options.rounds))
            record(models[routing], folder / f"{routing}.npz")
        print(json.dumps(device), file=sys.stdout if options.json else sys.stderr)
        cells: dict[tuple[str, int], list[tuple[dict[str, Any], float]]] = {}
        for row in rows:
            halves(models[row["routing"]], folder).replace(folder / "placement.json")
            rate = simulated(device or {}, row, models[row["routing"]], folder)
            cells.setdefault((row["routing"], row["concurrency"]), []).append((row, rate))
        for (routing, requests), found in cells.items():
            real = fastest({row["schedule"]: row["tokens_per_s"] for row, _ in found})
            alike = real & fastest({row["schedule"]: rate for row, rate in found})
            for row, rate in found:
                ratio = rate / row["tokens_per_s"]
                if options.json:
                    print(json.dumps({**row, "simulated": rate, "ratio": ratio, "fastest": sorted(alike)}))
                texts = (
                    f"{row['tokens_per_s']:.1f}",
                    f"{rate:.1f}",
                    f"{ratio:.2f}",
                    ", ".join(sorted(alike)),
                )
                table.add_row(routing, str(requests), row["schedule"], *texts)
    if not options.json:
        Console().print(table)


if __name__ == "__main__":
    main()
