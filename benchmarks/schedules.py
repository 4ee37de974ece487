"""Which schedule is fastest where: `python benchmarks/schedules.py`, in virtual time.

Every cell of `schedules.toml` (device x routing x load x model) runs under each schedule. Clients send a
request once theirs is answered. The columns: tokens/s of each schedule, rows and pairs of a run, and the
share of partial runs. tokens/s = clients / time between tokens
(Little's law): a count would depend on how many steps end in the measured time.

    python benchmarks/schedules.py --jobs 2 --json > cells.jsonl
    python benchmarks/schedules.py --from cells.jsonl --plot docs/schedules.svg
    python benchmarks/schedules.py --flat 16 64 128 --model mixtral-8x7b --load few medium saturated

--plot draws the map: the fastest fixed schedule of each cell, with its distance to lockstep, and below it the
distance of auto. A cell without results of barrier, lockstep and auto stays empty.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from moesaic.core import paced_devices
from moesaic.cost.sizes import PUBLISHED_MODELS, ModelSizes
from moesaic.planning.sim import durations
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.scenario import parse

HERE = Path(__file__).parent
CELLS: dict[str, Any] = tomllib.loads((HERE / "schedules.toml").read_text(encoding="utf-8"))
FIXED = ("barrier", "lockstep", "async")
SCHEDULES = (*FIXED, "auto")
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
    return replace(PUBLISHED_MODELS[name], layers=CELLS["layers"], moe_layers=CELLS["layers"])


def devices_of(table: dict[str, Any], model: ModelSizes) -> dict[str, Any] | str:
    """The field `devices` of a scenario."""
    if "file" in table:
        return str(HERE / table["file"])
    if "machine" in table:
        return str(table["machine"])
    if "flat" in table:
        return flat_devices(table["flat"])
    read = model.expert_bytes / table["gb_per_s"] * 1e-6
    """Milliseconds to read an expert."""
    others = (
        (model.other_parameters - model.embeddings) * model.number / model.layers / table["gb_per_s"] * 1e-6
    )
    run, rows = 1e-3 * table["run_us"], table["rows"]
    return {
        "source": "two cores",
        "attention": {"points_ms": [[0, run + others], [rows, run + 2 * others]]},
        "experts": {"points_ms": [[0, run], [rows, run + read]], "per_expert_ms": read},
        "link": table["link"],
    }


def flat_devices(rows: int) -> dict[str, Any]:
    """The devices of Asynchronous Expert Parallelism, with runs that take as long up to `rows` rows."""
    tables = tomllib.loads((HERE / "papers" / "async_moe.toml").read_text(encoding="utf-8"))
    for kind in ("attention", "experts"):
        (_, low), (_, high) = tables[kind]["points_ms"]
        tables[kind]["points_ms"] = [[rows, low], [2 * rows, high]]
    return tables


def seconds_of(
    found: paced_devices.PacedDevices, table: dict[str, Any], rows: int, model: ModelSizes
) -> float:
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
    step = seconds_of(durations.build_scenario_devices(parse(tables), model), table, rows, model)
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


Table = dict[Cell, dict[str, dict[str, Any]]]
"""Cell -> schedule -> what `measure` found."""


def table_of(found: Iterable[dict[str, Any]]) -> Table:
    """The results by cell."""
    table: Table = {}
    for one in found:
        cell: Cell = (one["device"], one["routing"], one["load"], one["model"])
        table.setdefault(cell, {})[one["schedule"]] = one
    return table


def rates(by_schedule: dict[str, dict[str, Any]]) -> dict[str, float]:
    """tokens/s of each schedule over those of lockstep. Empty if a schedule other than async is missing."""
    if not {"barrier", "lockstep", "auto"} <= set(by_schedule):
        return {}
    base = by_schedule["lockstep"]["tokens_per_second"]
    return {kind: one["tokens_per_second"] / base for kind, one in by_schedule.items()}


def line(cell: Cell, by_schedule: dict[str, dict[str, Any]]) -> str:
    """A line of the table."""
    shown = " ".join(f"{name:16}" for name in cell)
    for kind, one in by_schedule.items():
        partial = "" if one["partial_runs"] is None else f" ({one['partial_runs']:.0%} partial)"
        shown += f"  {kind} {one['tokens_per_second']:,.1f}{partial}"
    found = rates(by_schedule)
    best = max((rate for kind, rate in found.items() if kind in FIXED), default=0.0)
    return shown + (f"  auto / best {found['auto'] / best:.2f}" if best else "")


WIDE, TALL, LEFT, TOP = 96, 34, 150, 66
"""Pixels of a cell of the map, and of its margins."""
COLOURS = {"barrier": "#bc4c00", "lockstep": "#57606a", "async": "#8250df"}


def picture(table: Table) -> str:
    """The map as an SVG."""
    columns = list(product(CELLS["routings"], CELLS["models"]))
    rows = list(product(CELLS["devices"], CELLS["loads"]))
    width, height = LEFT + WIDE * len(columns) + 8, TOP + TALL * len(rows) + 8
    texts = [(8, 18, "start", "Fastest fixed schedule over lockstep, and auto over lockstep")]
    boxes = []
    for x, (routing, model) in enumerate(columns):
        middle = LEFT + WIDE * x + WIDE // 2
        texts += [(middle, 42, "middle", routing), (middle, 57, "middle", model.rsplit("-", 1)[0])]
    for y, (device, load) in enumerate(rows):
        top = TOP + TALL * y
        texts.append((8, top + 21, "start", f"{device}, {load}"))
        for x, (routing, model) in enumerate(columns):
            found = rates(table.get((device, routing, load, model), {}))
            if not found:
                continue
            best = max(
                (kind for kind in FIXED if kind in found), key=lambda kind: (round(found[kind], 2), kind)
            )
            place = LEFT + WIDE * x
            boxes.append(
                f'<rect x="{place}" y="{top}" width="{WIDE - 2}" height="{TALL - 2}" fill="{COLOURS[best]}"/>'
            )
            texts.append((place + WIDE // 2, top + 14, "middle", f"{best} {found[best]:.2f}"))
            texts.append((place + WIDE // 2, top + 27, "middle", f"auto {found['auto']:.2f}"))
    drawn = [f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts]
    style = "<style>text{font:11px sans-serif;fill:#fff}</style>"
    ground = f'<rect width="{width}" height="{height}" fill="#24292f"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, style, ground, *boxes, *drawn, "</svg>"]) + "\n"


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
    parser.add_argument("--from", dest="files", nargs="+", type=Path, help="results of --json, not a new run")
    parser.add_argument("--plot", type=Path, help="draw the map into this SVG file")
    parser.add_argument("--flat", nargs="+", type=int, help="devices whose runs take as long up to N rows")
    options = parser.parse_args()
    if options.flat:
        CELLS["devices"] = {
            f"flat {rows}": {"workers": 4, "servers": 4, "flat": rows} for rows in options.flat
        }
    only = {axis: getattr(options, axis) for axis in AXES}
    if options.files:
        texts = [file.read_text(encoding="utf-8") for file in options.files]
        found: Iterable[dict[str, Any]] = (json.loads(one) for text in texts for one in text.splitlines())
    else:
        found = results(list(product(cells(only), options.schedules)), options.jobs)
    kept = []
    for one in found:
        kept.append(one)
        if options.json:
            print(json.dumps(one), flush=True)
    table = table_of(kept)
    if not options.json:
        print("\n".join(line(cell, table[cell]) for cell in cells(only) if cell in table))
    if options.plot:
        options.plot.write_text(picture(table), encoding="utf-8")


if __name__ == "__main__":
    main()
