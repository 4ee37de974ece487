"""Reports of a batch run over a model larger than its memory: the plan, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moesaic.commands.processes import in_text
from moesaic.commands.units import in_bytes
from moesaic.core.metrics import PassStats
from moesaic.cost.assumed import assumed
from moesaic.cost.hardware import GIB
from moesaic.planning import Job, WorkerPlan
from moesaic.policy.offloading.policies import Policy

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class PhaseReport:
    """Figures of one phase: prefill (all passes with prompts) or decode (all other passes)."""

    name: str
    passes: int
    tokens: int
    padding_rows: int
    """Number of padding rows that were computed in addition to the tokens' rows."""
    predicted_seconds: float
    """Predicted seconds."""
    predicted_at_link_seconds: float
    """Predicted seconds with the speed that the link had in these passes."""
    measured_seconds: float
    """Measured seconds."""
    link_busy_seconds: float
    """Seconds during which the link loaded weights."""
    loaded_bytes: int
    """Bytes of loaded weights."""
    link_bandwidth: float | None
    """Speed of the link while it loaded weights, in bytes/s.

    None if it loaded nothing, or if it also carries rows and cache.
    """

    def as_json(self) -> dict[str, Any]:
        return {
            "passes": self.passes,
            "tokens": self.tokens,
            "padding_rows": self.padding_rows,
            "predicted_seconds": self.predicted_seconds,
            "predicted_at_link_seconds": self.predicted_at_link_seconds,
            "measured_seconds": self.measured_seconds,
            "link_busy_seconds": self.link_busy_seconds,
            "loaded_bytes": self.loaded_bytes,
            "link_bytes_per_s": self.link_bandwidth,
        }


def measure_phases(worker_plan: WorkerPlan, passes: Sequence[PassStats]) -> list[PhaseReport]:
    """The figures of prefill and decode. A phase without passes is left out."""
    parts = [(name, [stats for stats in passes if stats.prefill is (name == "prefill")]) for name in PHASES]
    return [_phase(worker_plan, name, phase_passes) for name, phase_passes in parts if phase_passes]


def _phase(worker_plan: WorkerPlan, name: str, passes: Sequence[PassStats]) -> PhaseReport:
    loaded_bytes, busy = (
        sum(stats.loaded_bytes for stats in passes),
        sum(stats.busy.get("down", 0.0) for stats in passes),
    )
    # The link of a GPU also carries rows and cache, so that its busy time is not that of weights alone.
    link = loaded_bytes / busy if loaded_bytes and busy and _is_over_disk(worker_plan) else None
    return PhaseReport(
        name,
        passes=sum(stats.passes for stats in passes),
        tokens=sum(stats.rows for stats in passes),
        padding_rows=sum(stats.padding_rows for stats in passes),
        predicted_seconds=sum(worker_plan.predict_seconds(stats) for stats in passes),
        predicted_at_link_seconds=sum(worker_plan.predict_seconds(stats, link) for stats in passes),
        measured_seconds=sum(stats.seconds for stats in passes),
        link_busy_seconds=busy,
        loaded_bytes=loaded_bytes,
        link_bandwidth=link,
    )


def _is_over_disk(worker_plan: WorkerPlan) -> bool:
    return worker_plan.hardware.slow.processor is None


def describe_plan(worker_plan: WorkerPlan, job: Job) -> str:
    """The plan in three lines: policy, memory and predicted throughput; then what it assumes."""
    over_disk = _is_over_disk(worker_plan)
    policy, price, ranks = (
        worker_plan.price.policy,
        worker_plan.price,
        worker_plan.worker.parallel.tensor_parallel_size,
    )
    num_away = worker_plan.model.experts - policy.static_experts
    attention = "" if over_disk else _attention(policy)
    verb = "stay in" if policy.in_place else "come from"
    slow = "the disk" if over_disk else "RAM"
    prefetch_text = f", up to {policy.likely_experts} of them prefetched" if policy.likely_experts else ""
    experts_text = (
        f"{num_away} of each layer's {worker_plan.model.experts} experts {verb} {slow}{prefetch_text}"
    )
    per_rank = f" on each of {ranks} ranks" if ranks > 1 else ""
    padding_text = "" if job.padded_length is None else f", prompts padded to {job.padded_length}"
    prefill = price.prefill_throughput * job.prompt / job.num_computed_tokens
    notes = "".join(f"\n{note}" for note in assumed(worker_plan.model, worker_plan.hardware))
    memory_text = ", ".join(
        f"{name} {in_bytes(size)}" for name, size in price.fast.items() if size >= 1 << 20
    )
    return (
        f"{policy.schedule}: {policy.batch} requests at a time in {policy.micro_batches} micro-batches of "
        f"{policy.micro_batch}; {experts_text if num_away else 'all experts fit'}{per_rank}{attention}\n"
        f"memory{per_rank}: {in_bytes(sum(price.fast.values()))} ({memory_text})\n"
        f"predicted for {job.prompt} + {job.generate} tokens{padding_text}: prefill {prefill:.1f}, decode "
        f"{price.decode_throughput:.1f} tokens/s (limited by {price.prefill.bottleneck} and by "
        f"{price.step.bottleneck}), {price.throughput:.1f} generated tokens/s over both{notes}"
    )


def _attention(policy: Policy) -> str:
    """Where attention is computed and where the KV cache is, on a machine with a GPU."""
    if policy.slow_attention:
        return "; the CPU computes attention over the KV cache in RAM"
    return "; the KV cache comes from RAM" if policy.slow_cache else "; the KV cache is on the GPU"


def _lines(phase: PhaseReport) -> dict[str, str]:
    """The cells of a phase's column: label -> text."""
    cells = {
        "passes": str(phase.passes),
        "tokens": str(phase.tokens),
        "predicted": f"{phase.predicted_seconds:.2f} s",
    }
    if phase.link_bandwidth is not None:
        cells["at this link"] = f"{phase.predicted_at_link_seconds:.2f} s"
    cells["measured"] = f"{phase.measured_seconds:.2f} s"
    if phase.measured_seconds:
        cells["predicted / measured"] = f"{phase.predicted_seconds / phase.measured_seconds:.2f}"
        if phase.link_bandwidth is not None:
            cells["at this link / measured"] = (
                f"{phase.predicted_at_link_seconds / phase.measured_seconds:.2f}"
            )
        cells["link busy"] = f"{phase.link_busy_seconds / phase.measured_seconds:.0%}"
    cells["read"] = in_bytes(phase.loaded_bytes)
    if phase.link_bandwidth is not None:
        cells["link"] = f"{phase.link_bandwidth / GIB:.2f} GiB/s"
    return cells


def describe_result(phases: Sequence[PhaseReport], seconds: float, ranks: int = 1) -> str:
    """A table of predicted and measured figures for each phase, and remarks below it.

    With several ranks the figures are those of the first. seconds: duration of the whole run.
    """
    table, columns = Table(box=SIMPLE_HEAD), [_lines(phase) for phase in phases]
    table.add_column("")
    for phase in phases:
        table.add_column(phase.name, justify="right")
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    other_seconds = seconds - sum(phase.measured_seconds for phase in phases)
    link = ""
    if any(phase.link_bandwidth is not None for phase in phases):
        link = "\nat this link: predicted again, with the speed that the link had in these passes"
    rank_note = f"\nfigures of the first of {ranks} ranks; each reads its own experts" if ranks > 1 else ""
    rows = sum(phase.padding_rows for phase in phases)
    padding = f"\npadding: {rows} rows in addition to the tokens" if rows else ""
    outside_text = f"\noutside passes (sampling, text, the API): {other_seconds:.2f} s"
    return f"{in_text(table)}{link}{padding}{rank_note}{outside_text}"
