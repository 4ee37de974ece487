"""Runs that other people published beside the prices of their machines: `python benchmarks/published_runs.py`.

It needs no network, no weights and none of the machines. `published_runs.toml` has the runs, and by which rule
they were taken. Each machine becomes a `DataSheet`, and the planner prices the model on it, as `moesaic doctor`
does: decode of one request, prefill of its prompt. Figures are tokens/s, ratios are predicted over measured.
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

from moesaic.core.weight_types import BLOCK_TYPES
from moesaic.cost.data_sheet import DataSheet, predict_machine
from moesaic.cost.hardware import GIB, Hardware
from moesaic.cost.reading import read
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.plan import NEAR_SHARE
from moesaic.planning.search import Job, JobSearch
from moesaic.planning.sizes import ROW_BYTES, in_format, without_quantization
from moesaic.policy.offloading.planner import PolicySearch, SearchLimits
from moesaic.policy.offloading.policies import Workload
from moesaic.policy.offloading.pricing import Price, Pricing

HERE = Path(__file__).resolve().parent
RUNS = HERE / "published_runs.toml"
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
PLAIN = ("BF16", "F16")
CACHE_NUMBER = 2.0
"""Bytes of a cached number: these engines keep float16."""
GENERATE = 128
PREFILL_SHARES = {"ik_llama.cpp": 1.0, "colibri": 1.0}
OTHER_PREFILL_SHARE = 0.53
"""Share of the kernels' rate that llama.cpp's products of many rows reach, and those of programs around it: the
middle of what it had beside moesaic's avx512_int8 on an EPYC and a Xeon (docs/lab, blocks as files have them:
161 and 249, 72 and 175 tokens/s). ik_llama.cpp has other products, made for many rows as moesaic's are."""


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
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def load() -> dict[str, Any]:
    """The data file."""
    return tomllib.loads(RUNS.read_text(encoding="utf-8"))


def pairs(data: Mapping[str, Any] | None = None) -> list[Pair]:
    """Every run's predictions, decode before prefill."""
    data = load() if data is None else data
    machines = {one["id"]: one for one in data["machine"]}
    found = [pair for run in data["run"] for pair in _pairs_of(run, machines[run["machine"]], data["config"])]
    return sorted(found, key=lambda pair: pair.what)


def _pairs_of(
    run: Mapping[str, Any], machine: Mapping[str, Any], configs: Mapping[str, Any]
) -> Iterator[Pair]:
    sheet = sheet_of(run, machine)
    model, hardware = sizes_of(run, configs), predict_machine(sheet, run["type"] not in PLAIN)
    predictions = {"decode": lambda: predict_decode(run, model, hardware)}
    predictions["prefill"] = lambda: predict_prefill(run, model, hardware)
    for what, predict in predictions.items():
        if what in run:
            yield Pair(
                source=run["source"],
                date=run.get("date", ""),
                engine=run["engine"],
                cpu=machine["cpu"],
                memory=f"{machine.get('sockets', 1) * machine['channels']:g} x {machine['mt_per_s']}",
                stated="mt_per_s" not in machine.get("by_sheet", ()),
                model=run["model"],
                type=run["type"],
                threads=sheet.threads or sheet.sockets * sheet.cores,
                disk=run.get("disk"),
                what=what,
                predicted=predict(),
                measured=run[what],
            )


def sheet_of(run: Mapping[str, Any], machine: Mapping[str, Any]) -> DataSheet:
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
        disk=run.get("disk"),
    )


def sizes_of(run: Mapping[str, Any], configs: Mapping[str, Any]) -> ModelSizes:
    """The model as its file has it. Without the size of the file, all matrices have the type of the experts."""
    name = run["config"]
    raw = configs.get(name) or json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    plain = without_quantization(raw)
    model = replace(read(plain, run["model"]), activation_number=ROW_BYTES)
    if run["type"] in PLAIN:
        return model
    expert = _expert_bytes(model, run)
    number = expert / model.expert
    if "file_gib" in run or "resident_gib" in run:
        experts = model.moe_layers * model.experts * expert
        rest = run["resident_gib"] * GIB if "resident_gib" in run else run["file_gib"] * GIB - experts
        number = rest / model.other_parameters
    return replace(model, number=number, mean_expert=expert, expert_biases=0)


def _expert_bytes(model: ModelSizes, run: Mapping[str, Any]) -> float:
    if "bits" in run:
        return model.expert * run["bits"] / 8
    kinds = EXPERTS[run["type"]]
    if any(model.expert_width % BLOCK_TYPES[part].numbers for kind in kinds for part in kind.split("+")):
        kind = BLOCK_TYPES[kinds[1].split("+")[0]]  # llama.cpp takes another type of about as many bits
        return model.expert * kind.size / kind.numbers
    return statistics.mean(in_format(model, kind, gpu=False).expert_bytes for kind in kinds)


def predict_decode(run: Mapping[str, Any], model: ModelSizes, hardware: Hardware) -> float:
    """Tokens/s of one request."""
    if "disk" in run:
        limits = SearchLimits(("on-demand",), largest_batch=1, requests=1, tolerance=NEAR_SHARE)
        job = Job(1, run.get("context", 64), GENERATE, run.get("context", 64) + GENERATE)
        found = JobSearch(model, hardware, job, CACHE_NUMBER, limits).find_policy(int(hardware.fast.room))
        assert found is not None, f"{run['model']} does not fit into the memory that its engine took"
        return found[1].decode_throughput
    prompt = max(1, run.get("context", GENERATE // 2) - GENERATE // 2)
    return _in_memory(model, hardware, prompt).decode_throughput


def predict_prefill(run: Mapping[str, Any], model: ModelSizes, hardware: Hardware) -> float:
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


def summary(found: Sequence[Pair]) -> dict[str, float]:
    """Median error, and the share of pairs within 30 %. An error of 2x and one of 0.5x count alike."""
    errors = [max(pair.ratio, 1 / pair.ratio) - 1 for pair in found]
    within = statistics.mean(0.7 <= pair.ratio <= 1.3 for pair in found)
    return {"pairs": len(found), "median_error": statistics.median(errors), "within_30": within}


def groups(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    """The groups whose errors are printed."""
    in_memory = [pair for pair in found if pair.disk is None]
    decode = [pair for pair in in_memory if pair.what == "decode"]
    return {
        "decode from memory": decode,
        "memory stated": [pair for pair in decode if pair.stated],
        "memory by data sheet": [pair for pair in decode if not pair.stated],
        "prefill": [pair for pair in in_memory if pair.what == "prefill"],
        "decode from a disk": [pair for pair in found if pair.disk is not None],
    }


def table(found: Sequence[Pair]) -> Iterator[str]:
    """The pairs as a table of Markdown."""
    yield "| CPU | memory, MT/s | threads | model | file | engine | | predicted | measured | ratio |"
    yield "|---|---|---:|---|---|---|---|---:|---:|---:|"
    for pair in found:
        memory = pair.memory if pair.stated else f"*{pair.memory}*"
        memory += f", disk {pair.disk:g} GB/s" if pair.disk is not None else ""
        engine = f"[{pair.engine}]({pair.source})"
        figures = f"{pair.what} | {pair.predicted:.3g} | {pair.measured:g} | {pair.ratio:.2f}"
        yield f"| {pair.cpu} | {memory} | {pair.threads} | {pair.model} | {pair.type} | {engine} | {figures} |"


def errors(found: Sequence[Pair]) -> Iterator[str]:
    """The errors of the groups as a table of Markdown."""
    yield "| pairs | number | median error | within 30 % |"
    yield "|---|---:|---:|---:|"
    for name, group in groups(found).items():
        one = summary(group)
        yield f"| {name} | {one['pairs']} | {one['median_error']:.0%} | {one['within_30']:.0%} |"


def main() -> None:
    """Print the pairs and the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    found = pairs()
    if parser.parse_args().json:
        rows = [asdict(pair) | {"ratio": pair.ratio} for pair in found]
        print(json.dumps({"pairs": rows, **{name: summary(one) for name, one in groups(found).items()}}))
        return
    print("\n".join((*table(found), "", *errors(found))))


if __name__ == "__main__":
    main()
