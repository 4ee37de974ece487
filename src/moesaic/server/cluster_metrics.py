"""Prometheus metrics of the cluster's processes. Each scrape takes a snapshot and formats it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moesaic.core.cluster_status import (
    ClusterLoad,
    ClusterStatus,
    LayerLocality,
    LinkStatus,
    PlacementSolve,
)
from moesaic.core.metrics import ResidencyStats
from moesaic.server.service import Cluster

MOST_EXPERTS = 2048
"""Maximum number of (layer, expert) pairs that get a series each. Larger models get one for each layer."""

PAST_SERVERS = "past"
"""Label of the counts of expert servers that have left, so that the sums over servers never decrease."""

Series = Iterable[tuple[tuple[str, ...], float]]
"""(label values, number) of each time series."""


class ClusterCollector(Collector):
    """Makes metric families from snapshots of `cluster`."""

    def __init__(self, cluster: Cluster, model_name: str) -> None:
        self._cluster = cluster
        self._model_name = model_name

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        status, load = self._cluster.report(), self._cluster.load()
        yield from self._processes(status)
        yield from self._counters(status)
        yield from self._residency(status)
        if status.links:
            yield from self._links(status.links)
        if status.locality:
            yield from self._locality(status.locality)
        if status.placement_solve is not None:
            yield from self._solves(status.placement_solve)
        if load is not None:
            yield from self._experts(load)

    def _processes(self, status: ClusterStatus) -> Iterator[GaugeMetricFamily]:
        # A role without a serving process is reported too, as 0.
        serving_counts = Counter({process.role: 0 for process in status.processes})
        serving_counts.update(process.role for process in status.processes if process.stage == "serving")
        series = [((role,), float(number)) for role, number in serving_counts.items()]
        yield self._gauge("processes_up", "Processes that are serving.", series, "role")
        yield self._health(status)
        waiting = [
            ((process.name,), float(process.stats.waiting_pairs))
            for process in status.processes
            if process.role == "expert server"
        ]
        text = "(row, expert) pairs that have arrived and are not computed yet."
        yield self._gauge("expert_server_waiting_pairs", text, waiting, "server")
        if status.placement_version is not None:
            version: Series = [((), float(status.placement_version))]
            yield self._gauge("placement_version", "Version of the placement of experts.", version)

    def _residency(self, status: ClusterStatus) -> Iterator[CounterMetricFamily]:
        """What servers with more experts than memory read, and what they found in memory."""
        servers = [
            (process.name, process.stats.residency)
            for process in status.processes
            if process.role == "expert server"
        ]
        if status.past_servers.residency != ResidencyStats():
            servers.append((PAST_SERVERS, status.past_servers.residency))
        text = "Bytes of experts by the level that had them: read from slow, or in fast memory when chosen."
        levels: Series = [
            ((name, level), float(size))
            for name, residency in servers
            for level, size in (("slow", residency.loaded_bytes), ("fast", residency.held_bytes))
        ]
        yield self._counter("expert_server_bytes", text, levels, "server", "level")
        text = "Experts that runs chose, where a server does not have all of them in memory."
        chosen_counts: Series = [((name,), float(residency.chosen)) for name, residency in servers]
        yield self._counter("expert_server_chosen_experts", text, chosen_counts, "server")
        text = "Experts of expert_server_chosen_experts that were in memory."
        hits: Series = [((name,), float(residency.hits)) for name, residency in servers]
        yield self._counter("expert_server_chosen_experts_in_memory", text, hits, "server")

    def _health(self, status: ClusterStatus) -> GaugeMetricFamily:
        text = "1 while new requests are accepted, 0 in an outage that lasts."
        is_available = status.health in ("serving", "recovering")
        return self._gauge("available", text, [((), float(is_available))])

    def _counters(self, status: ClusterStatus) -> Iterator[CounterMetricFamily]:
        counters = status.counters
        for name, text, value in (
            ("process_deaths", "Processes that ended unexpectedly.", counters.process_deaths),
            ("failovers", "Times that a client gave up a server with rows in flight.", counters.failovers),
            (
                "silent_failovers",
                "Failovers because a server did not answer in time.",
                counters.silent_failovers,
            ),
            ("false_failovers", "Failovers from a server that answered later.", counters.false_failovers),
            ("resent_pairs", "(row, expert) pairs sent again.", counters.resent_pairs),
            (
                "moved_requests",
                "Requests that were moved to another attention worker.",
                counters.moved_requests,
            ),
            ("rebalances", "Changes of the placement that balance the load.", counters.rebalances),
            ("far_bytes", "Bytes between workers and expert servers of different hosts.", counters.far_bytes),
            ("paced_runs", "Runs with the timing of modelled devices (--paced).", counters.paced_runs),
            ("paced_late_runs", "Runs of these that took longer here.", counters.paced_late),
            (
                "refused_connections",
                "Connections to --cluster-address that were refused.",
                counters.refused_connections,
            ),
            (
                "supervisor_restarts",
                "Times that the supervisor was restarted, as its thread had died or hung.",
                counters.supervisor_restarts,
            ),
        ):
            yield self._counter(name, text, [((), value)])
        violations: Series = [(("ttft",), counters.missed_ttft), (("itl",), counters.missed_itl)]
        text = "First tokens later than --slo-ttft, and further tokens later than --slo-itl."
        yield self._counter("slo_violations", text, violations, "objective")

    def _solves(self, solve: PlacementSolve) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Placements that were solved from live routing."""
        text = "Placements that were solved from live routing (--rebalance routing)."
        yield self._counter("placement_solves", text, [((), solve.solves)])
        text = "Placements of these that were swapped in."
        yield self._counter("placement_swaps", text, [((), solve.swaps)])
        for name, help_text, value in (
            ("gain", "Seconds that the last solved placement was predicted to save.", solve.gain_seconds),
            ("cost", "Seconds that its moves were predicted to take.", solve.cost_seconds),
        ):
            yield self._gauge(f"placement_predicted_{name}_seconds", help_text, [((), value)])
        text = "Predicted share of pairs on the own rank, before and with the last solved placement."
        local: Series = [(("before",), solve.local_before), (("after",), solve.local_after)]
        yield self._gauge("placement_predicted_local", text, local, "placement")

    def _links(self, links: Sequence[LinkStatus]) -> Iterator[GaugeMetricFamily]:
        """What is known of the links between hosts. The host of `moesaic serve` may have an empty name."""
        text = "Bytes/s of one direction of the link between two hosts."
        speeds: Series = [((link.one, link.other), link.bytes_per_second) for link in links]
        yield self._gauge("link_bytes_per_second", text, speeds, "host", "other_host")
        text = "Seconds of one way of the link between two hosts."
        ways: Series = [((link.one, link.other), link.latency_seconds) for link in links]
        yield self._gauge("link_latency_seconds", text, ways, "host", "other_host")

    def _locality(self, layers: Sequence[LayerLocality]) -> Iterator[CounterMetricFamily]:
        """Pairs in all and local pairs. The local activation rate is the second over the first."""
        text = "(row, expert) pairs that attention workers sent."
        yield self._counter(
            "sent_pairs", text, [((str(layer.layer),), layer.pairs) for layer in layers], "layer"
        )
        text = "(row, expert) pairs that attention workers sent to the expert server of their own rank."
        local: Series = [((str(layer.layer),), layer.local_pairs) for layer in layers]
        yield self._counter("local_activation_pairs", text, local, "layer")

    def _experts(self, load: ClusterLoad) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        text = "(row, expert) pairs computed."
        if load.pairs.size <= MOST_EXPERTS:
            series: Series = [
                ((str(layer), str(expert)), float(pairs))
                for layer, row in zip(load.layers, load.pairs.tolist(), strict=True)
                for expert, pairs in enumerate(row)
            ]
            yield self._counter("expert_pairs", text, series, "layer", "expert")
        else:
            totals = load.pairs.sum(axis=1).tolist()
            series = [((str(layer),), float(n)) for layer, n in zip(load.layers, totals, strict=True)]
            yield self._counter("expert_pairs", text, series, "layer")
        text = "Mean of the expert servers' recent pairs over their maximum, 0 to 1."
        evenness = zip(load.layers, load.balancedness.tolist(), strict=True)
        yield self._gauge("expert_balancedness", text, [((str(layer),), x) for layer, x in evenness], "layer")

    def _gauge(self, name: str, text: str, series: Series, *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"moesaic:{name}", text, labels=["model_name", *labels])
        for values, number in series:
            family.add_metric([self._model_name, *values], number)
        return family

    def _counter(self, name: str, text: str, series: Series, *labels: str) -> CounterMetricFamily:
        family = CounterMetricFamily(f"moesaic:{name}", text, labels=["model_name", *labels])
        for values, number in series:
            family.add_metric([self._model_name, *values], number)
        return family
