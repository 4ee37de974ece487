"""Prometheus metrics of a model larger than the fast memory. They are 0 where all of it is in memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moesaic.core.metrics import ExpertStats

LABELS = ("model_name",)


def families(stats: ExpertStats, model_name: str) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """What --fast-memory reads, what it finds in memory, and how decode steps are computed now."""
    found, plan = stats.residency, stats.plan
    text = "Bytes of experts by the level that had them: read from slow, or in fast memory when chosen."
    family = CounterMetricFamily("moesaic:expert_bytes", text, labels=[*LABELS, "level"])
    family.add_metric([model_name, "slow"], found.loaded_bytes)
    family.add_metric([model_name, "fast"], found.held_bytes)
    yield family
    for name, text, value in (
        ("chosen_experts", "Experts that steps chose, where experts are loaded by choice.", found.chosen),
        ("chosen_experts_in_memory", "Experts of chosen_experts that were in fast memory.", found.hits),
        ("expert_exchanges", "Experts that took the place of one chosen less often.", found.exchanges),
        ("plan_revisions", "Times that --fast-memory was planned anew for another load.", plan.revisions),
    ):
        counter = CounterMetricFamily(f"moesaic:{name}", text, labels=LABELS)
        counter.add_metric([model_name], value)
        yield counter
    text = "Decode steps by how they load experts: those that were chosen, or all in pages."
    family = CounterMetricFamily("moesaic:offloaded_decode_steps", text, labels=[*LABELS, "schedule"])
    family.add_metric([model_name, "on-demand"], plan.on_demand_steps)
    family.add_metric([model_name, "paged"], plan.paged_steps)
    yield family
    gauge = GaugeMetricFamily(
        "moesaic:micro_batch_size", "Requests of a micro-batch of --fast-memory.", labels=LABELS
    )
    gauge.add_metric([model_name], plan.micro_batch)
    yield gauge
