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
    padding: int
    """Number of padding rows that were computed in addition to the tokens' rows."""
    predicted: float
    """Predicted seconds."""
    at_link: float
    """Predicted seconds with the speed that the link had in these passes."""
    measured: float
    """Measured seconds."""
    link_busy: float
    """Seconds during which the link loaded weights."""
    loaded: int
    """Bytes of loaded weights."""
    link: float | None
    """Speed of the link while it loaded weights, in bytes/s.

    None if it loaded nothing, or if it also carries rows and cache.
    """

    def as_json(self) -> dict[str, Any]:
        return {
            "passes": self.passes,
            "tokens": self.tokens,
            "padding_rows": self.padding,
            "predicted_seconds": self.predicted,
            "predicted_at_link_seconds": self.at_link,
            "measured_seconds": self.measured,
            "link_busy_seconds": self.link_busy,
            "loaded_bytes": self.loaded,
            "link_bytes_per_s": self.link,
        }


def phases(planned: WorkerPlan, passes: Sequence[PassStats]) -> list[PhaseReport]:
    """The figures of prefill and decode. A phase without passes is left out."""
    parts = [(name, [one for one in passes if one.prefill is (name == "prefill")]) for name in PHASES]
    return [_phase(planned, name, mine) for name, mine in parts if mine]


def _phase(planned: WorkerPlan, name: str, passes: Sequence[PassStats]) -> PhaseReport:
    loaded, busy = sum(one.loaded for one in passes), sum(one.busy.get("down", 0.0) for one in passes)
    link = loaded / busy if loaded and busy and _over_disk(planned) else None
    return PhaseReport(
        name,
        passes=sum(one.passes for one in passes),
        tokens=sum(one.rows for one in passes),
        padding=sum(one.padding_rows for one in passes),
        predicted=sum(planned.predict_seconds(one) for one in passes),
        at_link=sum(planned.predict_seconds(one, link) for one in passes),
        measured=sum(one.seconds for one in passes),
        link_busy=busy,
        loaded=loaded,
        link=link,
    )


def _over_disk(planned: WorkerPlan) -> bool:
    return planned.hardware.slow.processor is None


def plan_text(planned: WorkerPlan, job: Job) -> str:
    """The plan in three lines: policy, memory and predicted throughput; then what it assumes."""
    over_disk = _over_disk(planned)
    policy, price, ranks = planned.price.policy, planned.price, planned.worker.parallel.tensor_parallel_size
    away = planned.model.experts - policy.static_experts
    attention = "" if over_disk else _attention(policy)
    verb = "stay in" if policy.in_place else "come from"
    slow = "the disk" if over_disk else "RAM"
    prefetched = f", up to {policy.likely_experts} of them prefetched" if policy.likely_experts else ""
    rest = f"{away} of each layer's {planned.model.experts} experts {verb} {slow}{prefetched}"
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    padded = "" if job.padded_length is None else f", prompts padded to {job.padded_length}"
    prefill = price.prefill_throughput * job.prompt / job.computed_tokens
    notes = "".join(f"\n{note}" for note in assumed(planned.model, planned.hardware))
    held = ", ".join(f"{name} {in_bytes(size)}" for name, size in price.fast.items() if size >= 1 << 20)
    return (
        f"{policy.schedule}: {policy.batch} requests at a time in {policy.micro_batches} micro-batches of "
        f"{policy.micro_batch}; {rest if away else 'all experts fit'}{each}{attention}\n"
        f"memory{each}: {in_bytes(sum(price.fast.values()))} ({held})\n"
        f"predicted for {job.prompt} + {job.generate} tokens{padded}: prefill {prefill:.1f}, decode "
        f"{price.decode_throughput:.1f} tokens/s (limited by {price.prefill.bottleneck} and by "
        f"{price.step.bottleneck}), {price.throughput:.1f} generated tokens/s over both{notes}"
    )


def _attention(policy: Policy) -> str:
    """Where attention is computed and where the KV cache is, on a machine with a GPU."""
    if policy.slow_attention:
        return "; the CPU computes attention over the KV cache in RAM"
    return "; the KV cache comes from RAM" if policy.slow_cache else "; the KV cache is on the GPU"


def _lines(one: PhaseReport) -> dict[str, str]:
    """The cells of a phase's column: label -> text."""
    cells = {"passes": str(one.passes), "tokens": str(one.tokens), "predicted": f"{one.predicted:.2f} s"}
    if one.link is not None:
        cells["at this link"] = f"{one.at_link:.2f} s"
    cells["measured"] = f"{one.measured:.2f} s"
    if one.measured:
        cells["predicted / measured"] = f"{one.predicted / one.measured:.2f}"
        if one.link is not None:
            cells["at this link / measured"] = f"{one.at_link / one.measured:.2f}"
        cells["link busy"] = f"{one.link_busy / one.measured:.0%}"
    cells["read"] = in_bytes(one.loaded)
    if one.link is not None:
        cells["link"] = f"{one.link / GIB:.2f} GiB/s"
    return cells


def result_text(found: Sequence[PhaseReport], seconds: float, ranks: int = 1) -> str:
    """A table of predicted and measured figures for each phase, and remarks below it.

    With several ranks the figures are those of the first. seconds: duration of the whole run.
    """
    table, columns = Table(box=SIMPLE_HEAD), [_lines(one) for one in found]
    table.add_column("")
    for one in found:
        table.add_column(one.name, justify="right")
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    rest = seconds - sum(one.measured for one in found)
    link = ""
    if any(one.link is not None for one in found):
        link = "\nat this link: predicted again, with the speed that the link had in these passes"
    whose = f"\nfigures of the first of {ranks} ranks; each reads its own experts" if ranks > 1 else ""
    rows = sum(one.padding for one in found)
    padding = f"\npadding: {rows} rows in addition to the tokens" if rows else ""
    return f"{in_text(table)}{link}{padding}{whose}\noutside passes (sampling, text, the API): {rest:.2f} s"
