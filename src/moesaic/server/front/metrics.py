"""The metrics of a server of several models: its own, and those that the process of each loaded model has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from moesaic.policy.fleet.model_pool import ModelState
from moesaic.server.front.fleet import ModelFleet
from moesaic.server.front.forwarding import read_page

LABELS = ["model_name"]


async def write_metrics(fleet: ModelFleet) -> bytes:
    """All metrics in Prometheus' text format. Each has the label model_name."""
    processes = [
        record.process
        for record in fleet.records.values()
        if record.process is not None and fleet.state_of(record) is ModelState.LOADED
    ]
    pages = await asyncio.gather(*(read_page(process, "/metrics") for process in processes))
    families = [*_describe_models(fleet), *_merge(page for page in pages if page is not None)]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    """Metric families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _describe_models(fleet: ModelFleet) -> Iterator[Metric]:
    counters = {
        name: CounterMetricFamily(f"moesaic:{name}", text, labels=LABELS)
        for name, text in (
            ("model_loads", "Times that a model was loaded."),
            ("model_unloads", "Times that a model was unloaded."),
            (
                "model_failures",
                "Times that a model could not be loaded, or that its process ended by itself.",
            ),
            ("model_load_seconds", "Seconds of all loads of a model together."),
        )
    }
    loaded_gauge = GaugeMetricFamily(
        "moesaic:model_loaded", "1 while a model is loaded, else 0.", labels=LABELS
    )
    text = "Requests that wait until their model is loaded."
    waiting = GaugeMetricFamily("moesaic:model_load_waiting", text, labels=LABELS)
    for name, record in fleet.records.items():
        counters["model_loads"].add_metric([name], record.loads)
        counters["model_unloads"].add_metric([name], record.unloads)
        counters["model_failures"].add_metric([name], record.failures)
        counters["model_load_seconds"].add_metric([name], record.load_seconds)
        is_loaded = fleet.state_of(record) in (ModelState.LOADED, ModelState.DRAINING)
        loaded_gauge.add_metric([name], float(is_loaded))
        waiting.add_metric([name], fleet.pool.count_waiting(name))
    yield from counters.values()
    yield from (loaded_gauge, waiting)


def _merge(pages: Iterable[str]) -> list[Metric]:
    """The families of several pages, with the samples of a family together, as the format wants them."""
    families: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            families[family.name].samples += family.samples
    return list(families.values())
