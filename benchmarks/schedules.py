"""Which schedule is fastest where: `python benchmarks/schedules.py`, in virtual time.

Every cell of `schedules.toml` (device x routing x load x model) runs under each schedule. Clients send a
request once theirs is answered. The columns: tokens/s of each schedule, rows and pairs of a run, and the
share of partial runs. tokens/s = clients / time between tokens
(Little's law): a count would depend on how many steps end in the measured time.

    python benchmarks/schedules.py --jobs 2 --json > cells.jsonl
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from moesaic.core import paced
from moesaic.cost.sizes import KNOWN, ModelSizes
from moesaic.sim import durations
from moesaic.sim.cluster import SimulatedCluster
from moesaic.sim.scenario import parse

HERE = Path(__file__).parent
CELLS: dict[str, Any] = tomllib.loads((HERE / "schedules.toml").read_text(encoding="utf-8"))
FIXED = ("barrier", "lockstep", "async")
SCHEDULES = FIXED
AXES = ("device", "routing", "load", "model")
Cell = tuple[str, str, str, str]
"""(device, routing, load, model)"""


def cells(only: dict[str, list[str]]) -> list[Cell]:
    """All cells, or those with these names."""
    named = (CELLS["devices"], CELLS["routings"], CELLS["loads"], CELLS["models"])
    kept = [
        [name for name in names if name in (only.get(axis) or names)]
        for axis, names in zip(AXES, named, strict=True)
    ]
    return [(a, b, c, d) for a, b, c, d in product(*kept)]


def model_of(name: str) -> ModelSizes:
    """The model with fewer layers."""
    return replace(KNOWN[name], layers=CELLS["layers"], moe_layers=CELLS["layers"])


def devices_of(table: dict[str, Any], model: ModelSizes) -> dict[str, Any] | str:
    """The field `devices` of a scenario."""
    if "file" in table:
        return str(HERE / table["file"])
    if "machine" in table:
        return str(table["machine"])
    read = model.expert_bytes / table["gb_per_s"] * 1e-6
    """Milliseconds to read an expert."""
    others = (model.outside - model.embeddings) * model.number / model.layers / table["gb_per_s"] * 1e-6
    run, rows = 1e-3 * table["run_us"], table["rows"]
    return {
        "source": "two cores",
        "attention": {"points_ms": [[0, run + others], [rows, run + 2 * others]]},
        "experts": {"points_ms": [[0, run], [rows, run + read]], "per_expert_ms": read},
        "link": table["link"],
    }


def seconds_of(found: paced.PacedDevices, table: dict[str, Any], rows: int, model: ModelSizes) -> float:
    """Seconds of a step in which no two runs overlap: so long a step takes at most, in lockstep."""
    pairs, held = rows * model.top_k / table["servers"], model.experts / table["servers"]
    served = found.experts.seconds(pairs, held * (1 - (1 - 1 / held) ** pairs))
    layers: int = CELLS["layers"]
    return float(layers * (found.attention.seconds(rows) + table["workers"] * served))


def cluster(cell: Cell, kind: str, **more: Any) -> SimulatedCluster:
    """The cluster of a cell under a schedule. more: fields of the scenario's table `schedule`."""
    device, routing, load, name = cell
    table, work, model = CELLS["devices"][device], CELLS["loads"][load], model_of(name)
    routes = dict(CELLS["routings"][routing])
    moves = routes.pop("moves", None)
    count, rows = table["workers"], work["rows"]
    tables: dict[str, Any] = {
        "model": name,
        "devices": devices_of(table, model),
        "seed": CELLS["seed"],
        "links": {"number_bytes": 2, **(table["link"] if "machine" in table else {})},
        "workers": {
            "count": count,
            "max_num_seqs": rows,
            "max_num_batched_tokens": max(512, 2 * rows),
            "max_model_len": 512,
        },
        "servers": {"count": table["servers"], "beside_workers": table.get("shared", False)},
        "schedule": {"kind": kind, **more},
        "workload": {"kind": "closed", "clients": count * rows}
        | {key: work[key] for key in ("prompt", "answer", "prefill")},
        "routing": routes,
    }
    step = seconds_of(durations.of_scenario(parse(tables), model), table, rows, model)
    if work["prefill"]:
        step *= 1.5
    tables["duration"], tables["warm_up"] = CELLS["steps"] * step, CELLS["warm_up"] * step
    if moves is not None:
        tables["routing"] = {**routes, "moves_every": CELLS["steps"] * step / (moves + 1)}
    return SimulatedCluster(parse(tables), model)


def measure(job: tuple[Cell, str]) -> dict[str, Any]:
    """tokens/s of a cell under a schedule, and what else is told of it."""
    cell, kind = job
    given = {"kind": "async", "run_rows": int(kind[5:])} if kind.startswith("rows ") else {"kind": kind}
    found = cluster(cell, **given).run()
    clients = CELLS["devices"][cell[0]]["workers"] * CELLS["loads"][cell[2]]["rows"]
    return {
        **dict(zip(AXES, cell, strict=True)),
        "schedule": kind,
        "tokens_per_second": round(clients / found.itl.mean, 1) if found.itl.count else 0.0,
        "counted_per_second": round(found.throughput, 1),
        "rows_per_run": round(found.rows_per_run, 1),
        "pairs_per_run": round(found.pairs_per_run, 1),
        "partial_runs": None if found.partial_runs is None else round(found.partial_runs, 3),
        "busy": {
            kind: round(sum(b) / len(b), 2)
            for kind in ("worker", "server", "device")
            if (b := [share for name, share in found.utilisation.items() if name.startswith(kind)])
        },
    }


def results(jobs: list[tuple[Cell, str]], processes: int) -> Iterator[dict[str, Any]]:
    """What `measure` finds, in the order of the jobs."""
    if processes == 1:
        yield from map(measure, jobs)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(measure, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = dict(
        zip(AXES, (CELLS["devices"], CELLS["routings"], CELLS["loads"], CELLS["models"]), strict=True)
    )
    for axis, choices in names.items():
        parser.add_argument(f"--{axis}", nargs="+", choices=list(choices), help="without it: all")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), help="also: 'rows N' for async")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    only = {axis: getattr(options, axis) for axis in AXES}
    jobs = list(product(cells(only), options.schedules))
    for one in results(jobs, options.jobs):
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
