"""The report of `moesaic plan`, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from moesaic.commands.processes import in_text
from moesaic.commands.tables import numbers, pairs
from moesaic.commands.units import in_bytes, in_words
from moesaic.cost.hardware import Hardware, Level
from moesaic.cost.sizes import ModelSizes
from moesaic.policy.offloading.advice import Batch, Help, find_worthwhile_batch
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.pricing import Phase, Price, Pricing


@dataclass(frozen=True)
class Report:
    """The result of `moesaic plan`."""

    model: ModelSizes
    hardware: Hardware
    workload: Workload
    price: Price
    flexgen_predicts: float | None = None
    """Throughput in tokens/s that FlexGen's own cost model predicts for its policy."""
    helps: Sequence[Help] = ()
    batches: list[Batch] = field(default_factory=list)
    fast_only: Price | None = None
    """The best price with everything on the fast level. None if that does not fit."""
    assumptions: Sequence[str] = ()
    """What the prediction assumes about quantised and converted experts, one sentence each."""


WORTH = 1.1
"""Offloading is recommended if it is at least this many times as fast as everything on the fast level."""


def advice(report: Report) -> list[str]:
    """Conclusions from the plan, one or two sentences each."""
    price, notes = report.price, list(_list_overflows(report))
    if report.fast_only is not None:
        notes.append(_compare_with_fast(price.throughput, report.fast_only.throughput))
    worthwhile = [help_item for help_item in report.helps if help_item.gain > 1.02]
    if worthwhile:
        best = worthwhile[0]
        notes.append(
            f"What would help most: {best.name}. Doubling it gives {best.gain:.2f} times the throughput."
        )
    elif report.helps:
        notes.append("Doubling any single part of the machine would give less than 2 % more throughput.")
    if report.batches:
        notes.append(_crossing(report.batches))
    return notes


def _list_overflows(report: Report) -> Iterator[str]:
    """A sentence for each level that is too small for the policy.

    This only happens with FlexGen's policies, since its search counts memory by its own model.
    """
    for level, parts in _levels(report):
        if sum(parts.values()) > level.room:
            yield (
                f"This policy does not fit: it needs {in_bytes(sum(parts.values()))} of {level.name}, and "
                f"{_room(level)} are usable. FlexGen's search assumes a smaller need."
            )


def _levels(report: Report) -> Sequence[tuple[Level, Mapping[str, float]]]:
    """Both memory levels, each with its contents: name -> bytes."""
    return (report.hardware.fast, report.price.fast), (report.hardware.slow, report.price.slow)


def _compare_with_fast(plan_rate: float, fast_rate: float) -> str:
    if plan_rate < WORTH * fast_rate:
        return (
            "Offloading is not worth it here: everything fits on the fast level and reaches "
            f"{fast_rate:.1f} tokens/s there, {fast_rate / plan_rate:.0%} of this plan's. Use moesaic serve."
        )
    return (
        f"Everything would fit on the fast level and reach {fast_rate:.1f} tokens/s there. This plan reaches "
        f"{plan_rate / fast_rate:.2f} times as many with a larger batch."
    )


def _crossing(batches: list[Batch]) -> str:
    first = find_worthwhile_batch(batches)
    if first is None:
        return (
            "Streaming weights does not pay at any batch size here: compute experts where their weights are."
        )
    if first == batches[0].requests:
        return "Streaming whole layers of weights pays even for a single request."
    return (
        f"Streaming whole layers of weights pays from about {first} concurrent requests on. With fewer, "
        "leave the weights where they are."
    )


def as_json(report: Report) -> str:
    """The report as one JSON object. Units are seconds, bytes and tokens/s."""
    price = report.price
    return json.dumps(
        {
            "model": report.model.name,
            "hardware": report.hardware.to_tables(),
            "workload": asdict(report.workload),
            "policy": asdict(price.policy)
            | {
                "batch": price.policy.batch,
                "attention": "slow" if price.policy.slow_attention else "fast",
                "experts": _name_expert_level(price.policy, "fast", "slow", "both"),
                "weights_fast_share": price.policy.static_experts / report.model.experts,
                "cache_fast_share": 1 - price.policy.slow_cache,
            },
            "memory": {"fast": price.fast, "slow": price.slow},
            "prefill": _phase(price.prefill, report.model.layers, price.prefill_throughput),
            "decode_step": _phase(price.step, report.model.layers, price.decode_throughput),
            "throughput": price.throughput,
            "flexgen_predicts": report.flexgen_predicts,
            "helps": [asdict(item) for item in report.helps],
            "by_batch": [asdict(item) for item in report.batches],
            "without_offloading": report.fast_only and report.fast_only.throughput,
            "pays_from": find_worthwhile_batch(report.batches) if report.batches else None,
            "advice": advice(report),
            "assumed": list(report.assumptions),
        }
    )


def _phase(phase: Phase, layers: int, throughput: float) -> dict[str, Any]:
    return {
        "seconds": phase.seconds,
        "layer_seconds": {name: busy / layers for name, busy in phase.busy.items()},
        "bottleneck": phase.bottleneck,
        "tokens_per_second": throughput,
    }


def as_text(report: Report) -> str:
    """The report as tables, with the advice below them."""
    parts = [_title(report), in_text(_policy(report)), in_text(_memory(report)), in_text(_times(report))]
    parts.append(in_text(_prediction(report)))
    if report.batches:
        parts.append(in_text(_batches(report)))
    return "\n".join(
        [
            *parts,
            *advice(report),
            *report.assumptions,
            "",
            f"Source of the machine's figures: {_source(report.hardware)}",
        ]
    )


def _title(report: Report) -> str:
    model, workload = report.model, report.workload
    return (
        f"{model.name} ({in_words(model.parameters)} parameters, {in_bytes(model.weights)}) on "
        f"{report.hardware.name}; each request has {workload.prompt} prompt tokens and generates "
        f"{workload.generate}"
    )


def _policy(report: Report) -> Table:
    policy, model = report.price.policy, report.model
    fast, slow = report.hardware.fast.name, report.hardware.slow.name
    rows = {
        "schedule": policy.schedule,
        "batch": f"{policy.batch} requests = {policy.micro_batches} micro-batches of {policy.micro_batch}",
        "attention computed at": slow if policy.slow_attention else fast,
        "experts computed at": _name_expert_level(
            policy, fast, f"{slow} (in decode)", f"{fast} and {slow} (in decode)"
        ),
        "static experts": f"{policy.static_experts} of {model.experts} per layer stay in {fast}",
        "weight pages per layer": str(policy.pages) if not policy.in_place else "none: weights stay in place",
        **({"experts prefetched": f"{policy.likely_experts} per layer"} if policy.likely_experts else {}),
        "KV cache": f"{1 - policy.slow_cache:.0%} in {fast}, {policy.slow_cache:.0%} in {slow}",
        "prefill residuals": f"in {fast if policy.fast_residual else slow}",
        "prompts per prefill pass": str(_prompts(report)),
    }
    return pairs("Policy", rows)


def _name_expert_level(policy: Policy, fast: str, slow: str, both_levels: str) -> str:
    """The words for the level that computes experts in decode."""
    return slow if policy.in_place else both_levels if policy.computes_there else fast


def _prompts(report: Report) -> int:
    pricing = Pricing(report.model, report.hardware, report.price.workload)
    return pricing.footprint.prefill_requests(report.price.policy)


def _memory(report: Report) -> Table:
    table = numbers("Peak memory", "", "needed", "usable")
    for level, parts in _levels(report):
        table.add_row(level.name, in_bytes(sum(parts.values())), _room(level))
        for name, size in parts.items():
            if size:
                table.add_row(f"  {name}", in_bytes(size), "")
    return table


def _room(level: Level) -> str:
    return f"{in_bytes(level.room)} of {in_bytes(level.memory)}"


def _times(report: Report) -> Table:
    table = numbers("Busy time of each resource, ms per layer", "", "prefill", "decode step")
    layers, price = report.model.layers, report.price
    for name in price.step.busy:
        prefill, step = (_milliseconds(phase.busy, name, layers) for phase in (price.prefill, price.step))
        # A resource that is idle in both phases says nothing of the plan.
        if prefill != "0.0" or step != "0.0":
            table.add_row(name, prefill, step)
    layer_times = [f"{1000 * phase.seconds / layers:.1f}" for phase in (price.prefill, price.step)]
    table.add_row("whole layer", *layer_times)
    table.add_row("bottleneck", price.prefill.bottleneck, price.step.bottleneck)
    return table


def _milliseconds(busy: Mapping[str, float], name: str, layers: int) -> str:
    return f"{1000 * busy[name] / layers:.1f}"


def _prediction(report: Report) -> Table:
    price = report.price
    total_seconds = price.prefill.seconds + price.decode_seconds
    rows = {
        "prefill": f"{price.prefill_throughput:.0f} prompt tokens/s, {price.prefill.seconds:.0f} s",
        "decode": f"{price.decode_throughput:.1f} tokens/s, {price.step.seconds:.2f} s per step",
        "end to end": f"{price.throughput:.1f} tokens/s, {total_seconds:.0f} s",
    }
    if report.flexgen_predicts is not None:
        rows["end to end, by FlexGen's cost model"] = f"{report.flexgen_predicts:.1f} tokens/s"
    return pairs("Predicted", rows)


def _batches(report: Report) -> Table:
    table = numbers("Tokens/s by batch size", "requests", "layers streamed", "weights left in place")
    for batch in report.batches:
        rates = ["does not fit" if rate is None else f"{rate:.1f}" for rate in (batch.streamed, batch.left)]
        table.add_row(str(batch.requests), *rates)
    return table


def _source(hardware: Hardware) -> str:
    return hardware.source or "its file"
