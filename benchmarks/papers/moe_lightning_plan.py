"""The published searches of MoE-Lightning and FlexGen: `python benchmarks/papers/moe_lightning_plan.py`.

It finds the published policies of both anew, and prints every input and the measured throughput beside them.
It also prices Table 5 of MoE-Lightning, and shows what moesaic's own planner chooses for the same machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import moe_lightning_search
from moe_lightning_settings import FLEXGEN, Published, settings

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import Hardware
from moesaic.cost.machines import machine
from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.policy.offloading import planner
from moesaic.policy.offloading.pipeline import Schedule
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.pricing import Price, Pricing


@dataclass(frozen=True)
class Row:
    """A setting: what was published, what the same search finds, and what moesaic's planner chooses."""

    setting: Published
    found: moe_lightning_search.Priced
    last: int
    """The largest number of micro-batches with the same predicted throughput."""
    whole: float
    """Tokens/s including prefill, predicted by the published model. The policy is the published one if it
    is known."""
    ours: Price | None
    """The policy of moesaic's planner for the same numbers, or None if none fits."""

    @property
    def verdict(self) -> str:
        """How the published policy relates to the one that the search finds."""
        wanted, found = self.setting, self.found
        if wanted.batch is None:
            return "not known"
        if wanted.batch == found.batch and wanted.micro_batch in (None, found.micro_batch):
            return "equal"
        highest = found.micro_batch * self.last
        on_it = found.batch <= wanted.batch <= highest and wanted.batch % found.micro_batch == 0
        if on_it and wanted.micro_batch in (None, found.micro_batch):
            return "equal throughput"
        return "differs"


@dataclass(frozen=True)
class FlexGenRow:
    """A setting of FlexGen. Policies are (micro-batch size, number of micro-batches)."""

    gpu: str
    prompt: int
    generate: int
    published: tuple[int, int]
    found: tuple[int, int]
    published_prediction: float
    prediction: float


@dataclass(frozen=True)
class Cross:
    """A cell of Table 5: one policy under one schedule, priced by its list of tasks."""

    policy: str
    schedule: Schedule
    micro_batch: int
    batch: int
    peaks: float
    """Tokens/s with the T4's peak numbers."""
    fitted: float
    """Tokens/s with the link and the prefill speed that the paper's results imply."""
    measured: float | None


@dataclass(frozen=True)
class Paper:
    """All results of the report."""

    rows: Sequence[Row]
    flexgen: Sequence[FlexGenRow]
    cross: Sequence[Cross]


def reproduce() -> Paper:
    """Repeat all published searches."""
    rows = [_row(one) for one in settings()]
    flexgen = []
    for wanted in FLEXGEN:
        found = wanted.search()
        flexgen.append(
            FlexGenRow(
                wanted.gpu,
                wanted.prompt,
                wanted.generate,
                (wanted.micro_batch, wanted.micro_batches),
                (found.micro_batch, found.micro_batches),
                wanted.predicted,
                found.throughput,
            )
        )
    return Paper(rows, flexgen, list(cross()))


def _row(one: Published) -> Row:
    given = one.setting
    found = moe_lightning_search.search(given)
    hardware, workload = given.hardware.parallel(given.gpus), Workload(given.prompt, given.generate)
    try:
        ours = planner.search(given.model, hardware, workload)
    except ConfigError:
        ours = None
    run = found
    if one.micro_batch and one.micro_batches:
        run = moe_lightning_search.price(given, one.micro_batch, one.micro_batches)
    whole = moe_lightning_search.with_prefill(given, run)
    return Row(one, found, moe_lightning_search.plateau(given, found), whole, ours)


TABLE_5: tuple[tuple[str, int, int, float, float | None], ...] = (
    ("FlexGen's", 8, 139, 9.5, None),
    ("MoE-Lightning's", 36, 14, 16.816, 30.12),
    ("MoE-Lightning's, larger N", 36, 31, 20.654, None),
)
"""Policy, micro-batch size and number, and tokens/s measured with S4 and with CGOPipe, for MTBench on a T4
with n = 128."""


def cross() -> Iterator[Cross]:
    """The cells of Table 5."""
    model, workload = PUBLISHED_MODELS["mixtral-8x7b"], Workload(418, 128)

    def priced(hardware: Hardware, policy: Policy) -> float:
        return Pricing(model, hardware, workload).price(policy).throughput

    for name, mu, count, s4, cgopipe in TABLE_5:
        schedules: tuple[tuple[Schedule, float | None], ...] = (("s4", s4), ("cgopipe", cgopipe))
        for schedule, measured in schedules:
            policy = Policy(schedule, mu, count, slow_attention=schedule == "cgopipe")
            peaks, fitted = (priced(machine(gpu), policy) for gpu in ("t4", "t4-measured"))
            yield Cross(name, schedule, mu, policy.batch, peaks, fitted, measured)


# ---- for people and for machines

HEADER = (
    f"{'setting':30} {'published':>12} {'found':>12} {'':17} {'decode':>7} {'+prefill':>8} {'measured':>8} "
    f"{'ratio':>5}   {'our planner':>12} {'predicts':>8}"
)


def as_text(paper: Paper) -> str:
    """The report as three tables. A setting's inputs are on the line below it."""
    lines = [
        "MoE-Lightning's own search (GiB, GiB/s; tokens/s). decode: prediction for the policy found;",
        "+prefill: prediction for the published policy with prefill; ratio: +prefill / measured.",
        "",
        HEADER,
    ]
    for row in paper.rows:
        lines += [_line(row), f"    {row.setting.inputs}"]
        lines += [f"    {row.setting.note}"] if row.setting.note else []
    lines += [
        "",
        "Among policies with equal predictions this search takes the first, the published code a later one.",
        "If the GPU is the limit (S8, n 32; S2 summarization), its policy may have more micro-batches.",
        "",
        "FlexGen's own search, with constants fitted by MoE-Lightning's authors (16 GiB T4, 24 GiB L4)",
        "",
    ]
    lines.append(
        f"{'GPU':4} {'s':>5} {'n':>4} {'published':>10} {'found':>10} {'':8} {'predicted':>9} {'found':>7}"
    )
    lines += [_flexgen_line(row) for row in paper.flexgen]
    lines += [
        "",
        "Table 5: each policy with both schedules, MTBench padded on the T4, n 128, priced as task lists",
        "",
    ]
    lines.append(
        f"{'policy':26} {'schedule':9} {'mu':>3} {'N':>5} {'by peaks':>9} {'by fitted':>9} {'measured':>9}"
    )
    lines += [_cross_line(row) for row in paper.cross]
    return "\n".join(lines)


def _line(row: Row) -> str:
    one, found = row.setting, row.found
    policy = f"{one.micro_batch} x {one.micro_batches}" if one.micro_batch else f"N {one.batch or '?'}"
    ratio = "" if one.measured is None else f"{row.whole / one.measured:5.1f}"
    ours = row.ours
    planned = "" if ours is None else f"{ours.policy.micro_batch} x {ours.policy.micro_batches}"
    predicted = "does not fit" if ours is None else f"{ours.throughput:8.1f}"
    return (
        f"{one.name:30} {policy:>12} {f'{found.micro_batch} x {found.micro_batches}':>12} {row.verdict:17} "
        f"{found.throughput:7.1f} {row.whole:8.1f} {one.measured or 0:8.1f} {ratio:>5}   "
        f"{planned:>12} {predicted:>8}"
    )


def _flexgen_line(row: FlexGenRow) -> str:
    before, after = (f"{mu} x {count}" for mu, count in (row.published, row.found))
    verdict = "equal" if before == after else "differs"
    return (
        f"{row.gpu:4} {row.prompt:5} {row.generate:4} {before:>10} {after:>10} {verdict:8} "
        f"{row.published_prediction:9.2f} {row.prediction:7.2f}"
    )


def _cross_line(row: Cross) -> str:
    measured = "" if row.measured is None else f"{row.measured:9.2f}"
    return (
        f"{row.policy:26} {row.schedule:9} {row.micro_batch:3} {row.batch:5} {row.peaks:9.2f} "
        f"{row.fitted:9.2f} {measured:>9}"
    )


def as_json(paper: Paper) -> str:
    rows = [
        {
            "setting": row.setting.name,
            "inputs": row.setting.inputs,
            "published": [row.setting.micro_batch, row.setting.micro_batches, row.setting.batch],
            "found": [row.found.micro_batch, row.found.micro_batches, row.found.batch],
            "plateau_to": row.last,
            "verdict": row.verdict,
            "decode": row.found.throughput,
            "with_prefill": row.whole,
            "measured": row.setting.measured,
            "static": row.found.static,
            "layer_seconds": row.found.layer_seconds,
            "bottleneck": row.found.bottleneck,
            "gpu_bytes": row.found.gpu_bytes,
            "cpu_bytes": row.found.cpu_bytes,
            "note": row.setting.note,
            "planner": None if row.ours is None else _planned(row.ours),
        }
        for row in paper.rows
    ]
    others = {name: [vars(one) for one in getattr(paper, name)] for name in ("flexgen", "cross")}
    return json.dumps({"settings": rows} | others)


def _planned(price: Price) -> dict[str, object]:
    return {
        "schedule": price.policy.schedule,
        "micro_batch": price.policy.micro_batch,
        "micro_batches": price.policy.micro_batches,
        "static_experts": price.policy.static_experts,
        "throughput": price.throughput,
    }


def main() -> None:
    """Print the report, as tables or as one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    paper = reproduce()
    print(as_json(paper) if options.json else as_text(paper))


if __name__ == "__main__":
    main()
