"""Compares what other people published of their machines with what the planner says of them.

    python benchmarks/published_runs.py [--json] [--held-out] [--write]

It needs no network, no weights and none of the machines. `published_runs.toml` has the runs, and the rule by
which they were taken. Each machine becomes a `DataSheet`, on which the planner prices the model, as `moesaic
doctor` does: decode for one request, and prefill of its prompt. Figures are tokens/s, and a ratio is the
predicted figure over the measured one. *First* is the prediction by the rules before any comparison.

--held-out chooses two numbers of the rules for each machine by the runs on all other machines. If its errors
are larger, then the rules were fitted to these runs. --write puts the tables into docs/published-runs.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moesaic.core.weight_types import BLOCK_TYPES
from moesaic.cost.data_sheet import FIRST_RULES, DataSheet, Rules, predict_machine
from moesaic.cost.hardware import GIB, Hardware
from moesaic.cost.reading import read
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.plan import NEAR_SHARE
from moesaic.planning.search import Job, JobSearch
from moesaic.planning.sizes import ROW_BYTES, in_format, without_quantization
from moesaic.policy.offloading.planner import PolicySearch, SearchLimits
from moesaic.policy.offloading.policies import Workload
from moesaic.policy.offloading.pricing import Price, Pricing

Table = Mapping[str, Any]
HERE = Path(__file__).resolve().parent
RUNS = HERE / "published_runs.toml"
PAGE = HERE.parent / "docs" / "published-runs.md"
BEGIN, END = "<!-- benchmarks/published_runs.py wrote this -->", "<!-- end of what it wrote -->"
CONFIGS = HERE.parent / "tests" / "models" / "published"
EXPERTS = {
    "Q8_0": ("q8_0", "q8_0"),
    "Q6_K": ("q6_k", "q6_k"),
    "Q4_0": ("q4_0", "q4_0"),
    "Q4_K_S": ("q4_k", "q4_k"),
    "Q4_K_M": ("q4_k+q6_k", "q4_k"),
    "IQ4_XS": ("iq4_xs", "iq4_xs"),
    "IQ4_NL": ("iq4_nl", "iq4_nl"),
    "MXFP4": ("mxfp4_e8m0", "mxfp4_e8m0"),
}
"""Type of a file -> types of the experts in each half of its layers. Types that are left out have `bits`."""
OTHER_TYPES = {"MXFP4": "q8_0"}
"""Type of a file -> type of all but the experts, where that is another one: llama.cpp writes gpt-oss so."""
PLAIN = ("BF16", "F16")
CACHE_NUMBER = 2.0
"""Bytes of a cached number: these engines keep float16."""
GENERATE = 128
PREFILL_SHARES = {"ik_llama.cpp": 1.0, "llamafile": 1.0}
OTHER_PREFILL_SHARE = 0.53
"""Share of the kernels' rate that products of many rows reach in llama.cpp, and in programs around it.

It is the middle of what llama.cpp had beside moesaic's avx512_int8 on an EPYC and a Xeon: 161 and 249, 72 and
175 tokens/s (docs/lab, blocks as files have them). ik_llama.cpp has other products, made for many rows as
moesaic's are, and llamafile took them over in 2024.
"""
GRID = [
    Rules(read_share=share / 100, wait=wait * 1e-6)
    for share in (70, 75, 80, 85, 90)
    for wait in (0.0, 1.2, 2.4, 3.6)
]
"""The rules among which --held-out chooses."""
KEYS = ("median_error", "within_30")


@dataclass(frozen=True)
class Pair:
    """What was predicted of a run, and what was measured."""

    source: str
    date: str
    engine: str
    cpu: str
    memory: str
    stated: bool
    """Whether the source has the speed of the memory, and not only the data sheet."""
    model: str
    type: str
    threads: int
    disk: float | None
    what: str
    """"decode" or "prefill"."""
    first: float
    """What FIRST_RULES predict."""
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def load() -> dict[str, Any]:
    """The data file."""
    return tomllib.loads(RUNS.read_text(encoding="utf-8"))


def pairs(rules: Rules | None = None) -> list[Pair]:
    """Every run's predictions, decode before prefill. rules: those of data sheets. None: today's."""
    data = load()
    machines = {machine["id"]: machine for machine in data["machine"]}
    rules = rules or Rules()
    return [
        _compare(run, machines[run["machine"]], data["config"], what, rules)
        for what in ("decode", "prefill")
        for run in data["run"]
        if what in run
    ]


def _compare(run: Table, machine: Table, configs: Table, what: str, rules: Rules) -> Pair:
    sheet, model = sheet_of(run, machine), sizes_of(run, configs)
    predict = predict_decode if what == "decode" else predict_prefill
    first, predicted = (
        predict(run, model, predict_machine(sheet, run["type"] not in PLAIN, each_rules))
        for each_rules in (FIRST_RULES, rules)
    )
    return Pair(
        source=run["source"],
        date=run.get("date", ""),
        engine=run["engine"],
        cpu=machine["cpu"],
        memory=f"{machine.get('sockets', 1) * machine['channels']:g} x {machine['mt_per_s']}",
        stated="mt_per_s" not in machine.get("by_sheet", ()),
        model=run["model"],
        type=run["type"],
        threads=sheet.threads or sheet.active_cores,
        disk=run.get("disk"),
        what=what,
        first=first,
        predicted=predicted,
        measured=run[what],
    )


def sheet_of(run: Table, machine: Table) -> DataSheet:
    """The data sheet of a run's machine."""
    return DataSheet(
        machine["cpu"],
        machine["cores"],
        tuple(machine["ghz"]),
        machine["isa"],
        machine["channels"],
        machine["mt_per_s"],
        memory_gib=run.get("memory_gib", 4096.0),
        sockets=machine.get("sockets", 1),
        threads=run.get("threads"),
        disk_gb_per_s=run.get("disk"),
    )


def sizes_of(run: Table, configs: Table) -> ModelSizes:
    """The model as its file has it.

    Without the size of the file, and but for OTHER_TYPES, all matrices have the type of the experts.
    """
    name = run["config"]
    raw = configs.get(name) or json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    plain = without_quantization(raw)
    model = replace(read(plain, run["model"]), activation_number=ROW_BYTES)
    if run["type"] in PLAIN:
        return model
    expert = _expert_bytes(model, run)
    number = expert / model.expert
    if run["type"] in OTHER_TYPES:
        other = BLOCK_TYPES[OTHER_TYPES[run["type"]]]
        number = other.size / other.numbers
    if "file_gib" in run or "resident_gib" in run:
        experts = model.moe_layers * model.experts * expert
        rest = run["resident_gib"] * GIB if "resident_gib" in run else run["file_gib"] * GIB - experts
        number = rest / model.other_parameters
    return replace(model, number=number, mean_expert=expert, expert_biases=0)


def _expert_bytes(model: ModelSizes, run: Table) -> float:
    if "bits" in run:
        return model.expert * float(run["bits"]) / 8
    kinds = EXPERTS[run["type"]]
    if any(model.expert_width % BLOCK_TYPES[part].numbers for kind in kinds for part in kind.split("+")):
        kind = BLOCK_TYPES[kinds[1].split("+")[0]]  # llama.cpp takes another type of about as many bits
        return model.expert * kind.size / kind.numbers
    return statistics.mean(in_format(model, kind, gpu=False).expert_bytes for kind in kinds)


def predict_decode(run: Table, model: ModelSizes, hardware: Hardware) -> float:
    """Tokens/s of one request."""
    if "disk" in run:
        limits = SearchLimits(("on-demand",), largest_batch=1, requests=1, tolerance=NEAR_SHARE)
        job = Job(1, run.get("context", 64), GENERATE, run.get("context", 64) + GENERATE)
        result = JobSearch(model, hardware, job, CACHE_NUMBER, limits).find_policy(int(hardware.fast.room))
        assert result is not None, f"{run['model']} does not fit into the memory that its engine took"
        return result[1].decode_throughput
    prompt = max(1, run.get("context", GENERATE // 2) - GENERATE // 2)
    return _in_memory(model, hardware, prompt).decode_throughput


def predict_prefill(run: Table, model: ModelSizes, hardware: Hardware) -> float:
    """Prompt tokens/s of one request."""
    share = PREFILL_SHARES.get(run["engine"], OTHER_PREFILL_SHARE)
    processor = hardware.fast.processor
    assert processor is not None
    fast = replace(hardware.fast, processor=replace(processor, prefill=share))
    return _in_memory(model, replace(hardware, fast=fast), run.get("prompt", 512)).prefill_throughput


def _in_memory(model: ModelSizes, hardware: Hardware, prompt: int) -> Price:
    pricing = Pricing(model, hardware, Workload(prompt, GENERATE, CACHE_NUMBER))
    limits = SearchLimits(("cgopipe",), largest_batch=1, fast_only=True, micro_batch=1, micro_batches=1)
    price = PolicySearch(pricing, limits).best()
    assert price is not None, f"{model.name} does not fit in memory"
    return price


def held_out() -> list[Pair]:
    """Decode from memory, each machine by the two numbers of the rules that suit all other machines best."""
    pairs_by_rules = [[pair for pair in pairs(rules) if _is_decode(pair)] for rules in GRID]
    held_out_pairs = []
    for cpu in sorted({pair.cpu for pair in pairs_by_rules[0]}):
        others = [[pair for pair in group if pair.cpu != cpu] for group in pairs_by_rules]
        best = min(range(len(GRID)), key=lambda number: summary(others[number])["median_error"])
        held_out_pairs += [pair for pair in pairs_by_rules[best] if pair.cpu == cpu]
    return held_out_pairs


def _is_decode(pair: Pair) -> bool:
    return pair.what == "decode" and pair.disk is None


def summary(group: Sequence[Pair], first: bool = False) -> dict[str, float]:
    """Median error, where 2x and 0.5x count alike, and the share of pairs with ratios from 0.7 to 1.3.

    first: of the first predictions.
    """
    ratios = [(pair.first if first else pair.predicted) / pair.measured for pair in group]
    within = statistics.mean(0.7 <= ratio <= 1.3 for ratio in ratios)
    median = statistics.median(max(ratio, 1 / ratio) - 1 for ratio in ratios)
    return {"pairs": len(ratios), "median_error": median, "within_30": within}


def groups(all_pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """The groups whose errors are printed."""
    decode = [pair for pair in all_pairs if _is_decode(pair)]
    return {
        "decode from memory": decode,
        "of these, with the memory's speed in the source": [pair for pair in decode if pair.stated],
        "of these, with its speed by the data sheet": [pair for pair in decode if not pair.stated],
        "prefill": [pair for pair in all_pairs if pair.what == "prefill"],
        "decode with experts from a disk": [pair for pair in all_pairs if pair.disk is not None],
    }


def table(all_pairs: Sequence[Pair]) -> Iterator[str]:
    """The pairs as a table of Markdown."""
    yield "| CPU | memory, MT/s | threads | model | file | engine | | first | predicted | measured | ratio |"
    yield "|---|---|---:|---|---|---|---|---:|---:|---:|---:|"
    for pair in all_pairs:
        memory = pair.memory if pair.stated else f"*{pair.memory}*"
        memory += f", disk {pair.disk:g} GB/s" if pair.disk is not None else ""
        cells = [pair.cpu, memory, str(pair.threads), pair.model, pair.type]
        cells += [
            f"[{pair.engine}]({quote(pair.source, safe=':/')})",
            pair.what,
            f"{pair.first:.3g}",
            f"{pair.predicted:.3g}",
        ]
        yield f"| {' | '.join((*cells, f'{pair.measured:g}', f'{pair.ratio:.2f}'))} |"


def errors(all_pairs: Sequence[Pair]) -> Iterator[str]:
    """The errors of the groups as a table of Markdown."""
    yield "| pairs | number | first: median error | within 30 % | now: median error | within 30 % |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, group in groups(all_pairs).items():
        cells = [
            f"{summary_of_rules[key]:.0%}"
            for summary_of_rules in (summary(group, True), summary(group))
            for key in KEYS
        ]
        yield f"| {name} | {len(group)} | {' | '.join(cells)} |"


def replaced(page: str) -> str:
    """The page with the tables of today: errors, then pairs."""
    all_pairs = pairs()
    before, rest = page.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    tables = "\n".join((*errors(all_pairs), "", *table(all_pairs)))
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main() -> None:
    """Print the pairs and the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--held-out", action="store_true", help="choose the rules without the machine")
    parser.add_argument("--write", action="store_true", help=f"put the tables into docs/{PAGE.name}")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    all_pairs = pairs()
    report = {name: summary(group) for name, group in groups(all_pairs).items()}
    if options.held_out:
        report["held out"] = summary(held_out())
    if options.json:
        print(json.dumps({"pairs": [asdict(pair) | {"ratio": pair.ratio} for pair in all_pairs], **report}))
        return
    print("\n".join((*table(all_pairs), "", *errors(all_pairs))))
    if options.held_out:
        errors_held_out = report["held out"]
        error, within = errors_held_out["median_error"], errors_held_out["within_30"]
        print(f"\nheld out: median error {error:.0%}, {within:.0%} within 30 %")


if __name__ == "__main__":
    main()
