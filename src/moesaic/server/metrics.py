"""Prometheus metrics with vLLM's names and the prefix `moesaic:` or `vllm:`. A scrape formats a snapshot.

Question: Which metrics are there, and how is one added?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from moesaic.core.metrics import (
    BlockStats,
    ExpertStats,
    GroupStats,
    SpeculationStats,
    StateStats,
    StoredPrefixStats,
    TransferStats,
)
from moesaic.core.request import FinishReason
from moesaic.core.speculation import COUNTS, break_even
from moesaic.engine import EngineStats
from moesaic.server.meter import Distribution, Meter

OWN_PREFIX = "moesaic:"
"""Prefix of metrics that vLLM does not have."""
VLLM_METRICS = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
        *("prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
        *("corrupted_requests", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "prompt_tokens_by_source"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("request_inference_time_seconds", "request_time_per_output_token_seconds"),
        *("request_max_num_generation_tokens", "iteration_tokens_total", "prompt_tokens_cached"),
        *("prompt_tokens_cached_by_source", "num_requests_waiting_by_reason", "cache_config_info"),
        "request_prefill_kv_computed_tokens",
    )
)
"""Metrics that mean the same as those of this name in vLLM."""

Metric = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
LABELS = ("model_name",)


class EngineCollector(Collector):
    """Makes metric families from snapshots of the engine and from the meter.

    prefix: that of the metrics that vLLM has, too.
    """

    def __init__(
        self, stats: Callable[[], EngineStats], meter: Meter, model_name: str, prefix: str = OWN_PREFIX
    ) -> None:
        self._prefix = prefix
        self._stats = stats
        self._meter = meter
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats, meter = self._stats(), self._meter
        worker = stats.worker
        usage = worker.blocks.num_used / max(1, worker.blocks.num_total)
        yield self._gauge("num_requests_running", "Requests being computed.", worker.running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be computed.", worker.waiting)
        yield self._waiting(worker.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        yield self._blocks(worker.blocks)
        yield self._cache_config(worker.blocks, stats.block_size)
        yield self._states(worker.states)
        queries, hits = worker.blocks.prefix_queries, worker.blocks.prefix_hits
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits)
        yield self._counter(
            "num_preemptions", "Requests preempted: moved back to waiting.", worker.preemptions
        )
        yield self._counter(
            "runs", "Steps of workers, or runs of a layer with --schedule async and auto.", worker.steps
        )
        yield self._counter(
            "partial_runs", "Runs of them with some of the rows in flight.", worker.partial_runs
        )
        yield self._counter("prompt_tokens", "Prompt tokens processed.", meter.prompt_tokens)
        num_cached = meter.cached_prompt_tokens
        yield self._counter("prompt_tokens_cached", "Those of them found in the prefix cache.", num_cached)
        yield from self._sources(meter.prompt_tokens, num_cached, hits)
        yield self._counter("generation_tokens", "Tokens generated.", meter.generation_tokens)
        reasons = {reason.value: meter.finish_counts[reason] for reason in FinishReason}
        text = "Requests that ended, by reason."
        yield self._split("request_success", text, CounterMetricFamily, "finished_reason", reasons)
        yield self._counter(
            "corrupted_requests",
            "Requests that ended because the model's logits were NaN or infinite.",
            meter.finish_counts[FinishReason.ERROR],
        )
        yield from self._speculation(worker.speculation)
        yield from self._group(worker.experts.group)
        yield from self._transfers(worker.transfers)
        yield from self._prefix_disk(worker.stored_prefixes)
        yield from offload_families(worker.experts, self._model_name)
        yield from self._distributions(meter)

    def _waiting(self, num_requests: int) -> Metric:
        """Requests by what they wait for, which is always room."""
        text = "Requests waiting to be computed, by what they wait for."
        reasons = {"capacity": num_requests, "deferred": 0}
        return self._split("num_requests_waiting_by_reason", text, GaugeMetricFamily, "reason", reasons)

    def _sources(self, num_tokens: int, num_cached: int, hits: int) -> Iterator[Metric]:
        """Prompt tokens by where their KV came from, which is never another server's cache."""
        sources = {
            "local_compute": num_tokens - num_cached,
            "local_cache_hit": num_cached,
            "external_kv_transfer": 0,
        }
        text = "Prompt tokens processed, by where their KV came from."
        yield self._split("prompt_tokens_by_source", text, CounterMetricFamily, "source", sources)
        text = "Prompt tokens found in the prefix cache, by the memory that had them."
        name, memories = "prompt_tokens_cached_by_source", {"device": hits}
        yield self._split(name, text, CounterMetricFamily, "source", memories)

    def _distributions(self, meter: Meter) -> Iterator[HistogramMetricFamily]:
        """Histograms of times and of tokens."""
        for name, text, values in (
            ("time_to_first_token", "Time from arrival to the first token.", meter.time_to_first_token),
            ("inter_token_latency", "Time between two tokens of a request.", meter.inter_token_latency),
            (
                "request_time_per_output_token",
                "Mean time between the tokens of an answer that has several.",
                meter.request_time_per_token,
            ),
            ("e2e_request_latency", "Time from arrival to the last token.", meter.e2e_latency),
            ("request_queue_time", "Time from arrival to admission.", meter.queue_time),
            ("request_prefill_time", "Time from admission to the first token.", meter.prefill_time),
            ("request_decode_time", "Time from the first to the last token.", meter.decode_time),
            ("request_inference_time", "Time from admission to the last token.", meter.inference_time),
        ):
            yield self._histogram(f"{name}_seconds", f"{text} In seconds.", values)
        for name, text, values in (
            ("request_prompt_tokens", "Prompt tokens of requests that ended.", meter.request_prompt_tokens),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of these that were not found in the prefix cache.",
                meter.request_computed_tokens,
            ),
            ("request_generation_tokens", "Tokens that these generated.", meter.request_generation_tokens),
            (
                "request_max_num_generation_tokens",
                "Tokens of the longest completion of each request.",
                meter.longest_generation,
            ),
            (
                "iteration_tokens_total",
                "Tokens of a worker's step: those generated, and the computed prompts of first tokens.",
                meter.step_tokens,
            ),
        ):
            yield self._histogram(name, text, values)

    def _blocks(self, blocks: BlockStats) -> GaugeMetricFamily:
        text = "KV blocks: free, cached for their prefix, used by a request. They add up to the pool."
        family = GaugeMetricFamily("moesaic:kv_blocks", text, labels=["model_name", "state"])
        for state in ("free", "cached", "used"):
            family.add_metric([self._model_name, state], getattr(blocks, f"num_{state}"))
        return family

    def _cache_config(self, blocks: BlockStats, block_size: int) -> GaugeMetricFamily:
        """The size of the KV cache as labels, which routers in front of vLLM read."""
        full, labels, values = self._label_metric("cache_config_info")
        sizes = {"block_size": block_size, "num_gpu_blocks": blocks.num_total}
        family = GaugeMetricFamily(full, "The KV cache; always 1.", labels=[*labels, *sizes])
        family.add_metric([*values, *map(str, sizes.values())], 1)
        return family

    def _states(self, states: StateStats) -> GaugeMetricFamily:
        text = "Pages with states of linear attention: free, of running requests, of prefixes."
        family = GaugeMetricFamily("moesaic:state_pages", text, labels=["model_name", "state"])
        counts = {"free": states.pages_free, "used": states.seats_used, "snapshot": states.snapshots}
        for state, count in counts.items():
            family.add_metric([self._model_name, state], count)
        return family

    def _speculation(self, counts: SpeculationStats) -> Iterator[Metric]:
        """Metrics of drafted tokens. They are 0 where none are drafted."""
        for name, text, value in (
            ("num_drafts", "Checks of one request's drafted tokens.", counts.drafts),
            ("num_draft_tokens", "Drafted tokens that were checked.", counts.draft_tokens),
            ("num_accepted_tokens", "Drafted tokens that were right.", counts.accepted_tokens),
        ):
            yield self._counter(f"spec_decode_{name}", text, value)
        text = "Drafted tokens that were right, by their place in the draft, from 0."
        name, labels, values = self._label_metric("spec_decode_num_accepted_tokens_per_pos")
        family = CounterMetricFamily(name, text, labels=[*labels, "position"])
        for position, value in enumerate(counts.accepted_per_pos):
            family.add_metric([*values, str(position)], value)
        yield family
        yield self._break_even(counts)

    def _prefix_disk(self, counts: StoredPrefixStats) -> Iterator[Metric]:
        """Metrics of prefixes on the disk. They are 0 without --prefix-cache-dir."""
        for name, text, value in (
            ("prefix_disk_hits", "Prompt tokens whose KV was read from the disk.", counts.read_tokens),
            ("prefix_disk_read_bytes", "Bytes of KV that were read from the disk.", counts.read_bytes),
            ("prefix_disk_written_bytes", "Bytes of KV written to the disk.", counts.written_bytes),
            (
                "prefix_disk_dropped_blocks",
                "KV blocks that were not written: no memory or no disk for them.",
                counts.dropped_blocks,
            ),
            (
                "prefix_disk_damaged_entries",
                "Damaged files that were removed.",
                counts.damaged_entries,
            ),
        ):
            yield self._counter(name, text, value)

    def _transfers(self, counts: TransferStats) -> Iterator[Metric]:
        """Metrics of KV from prefill workers. They are 0 where there are none."""
        for name, text, value in (
            ("kv_transfers", "Requests whose KV a prefill worker has sent.", counts.sent_requests),
            ("kv_transfer_bytes", "Bytes of KV that prefill workers have sent.", counts.sent_bytes),
            ("kv_transfer_seconds", "Seconds on their way, without early bytes.", counts.sent_seconds),
            ("kv_transfer_early_bytes", "Bytes of them that left during their step.", counts.early_bytes),
            (
                "kv_transfer_failures",
                "Transfers that ended with a broken connection.",
                counts.failed_transfers,
            ),
            (
                "kv_received_requests",
                "Requests that went on with KV that was sent.",
                counts.received_requests,
            ),
            ("kv_received_tokens", "Their tokens, whose KV was not computed again.", counts.received_tokens),
        ):
            yield self._counter(name, text, value)
        text = "Bytes of KV that has arrived for requests that are not admitted yet."
        yield self._gauge("kv_transfer_held_bytes", text, counts.held_bytes)

    def _break_even(self, counts: SpeculationStats) -> GaugeMetricFamily:
        text = "Acceptance from which drafts pay, priced by the steps measured so far. +Inf: never."
        labels, prices = ["model_name", "requests", "tokens"], counts.prices
        family = GaugeMetricFamily("moesaic:spec_decode_break_even_acceptance", text, labels=labels)
        for requests, tokens in COUNTS if prices else ():
            if tokens <= len(counts.accepted_per_pos):
                acceptance = break_even(prices[requests * (1 + tokens) - 1] / prices[requests - 1], tokens)
                value = math.inf if acceptance is None else acceptance
                family.add_metric([self._model_name, str(requests), str(tokens)], value)
        return family

    def _group(self, group: GroupStats) -> Iterator[CounterMetricFamily]:
        """Metrics of a worker that is a group of ranks. They are 0 for other workers."""
        text = "Bytes that the first rank of a tensor-parallel worker sent to the others."
        family = CounterMetricFamily("moesaic:collective_bytes", text, labels=["model_name", "collective"])
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "metadata"):
            family.add_metric([self._model_name, kind], getattr(group, f"{kind}_bytes"))
        yield family
        for name, help_text in (
            ("group_pairs", "(row, expert) pairs gated on the first rank of a tensor-parallel worker."),
            ("group_local_pairs", "Pairs of group_pairs whose expert, or a part of it, is on that rank."),
            (
                "group_shuffled_rows",
                "Rows that were scattered to the ranks where their experts are predicted.",
            ),
            ("group_kept_rows", "Rows of group_shuffled_rows that reached their predicted rank."),
        ):
            yield self._counter(name, help_text, getattr(group, name.removeprefix("group_")))

    def _label_metric(self, name: str) -> tuple[str, list[str], list[str]]:
        """The full name of a metric, its labels and their values. With vLLM's prefix it has vLLM's labels."""
        if name not in VLLM_METRICS or self._prefix == OWN_PREFIX:
            return OWN_PREFIX + name, ["model_name"], [self._model_name]
        return self._prefix + name, ["model_name", "engine"], [self._model_name, "0"]

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        full, labels, values = self._label_metric(name)
        family = GaugeMetricFamily(full, text, labels=labels)
        family.add_metric(values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        full, labels, values = self._label_metric(name)
        family = CounterMetricFamily(full, text, labels=labels)
        family.add_metric(values, value)
        return family

    def _split(
        self,
        name: str,
        text: str,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        label: str,
        parts: Mapping[str, float],
    ) -> GaugeMetricFamily | CounterMetricFamily:
        """A metric with a value for each value of `label`."""
        full, labels, values = self._label_metric(name)
        family = kind(full, text, labels=[*labels, label])
        for part, value in parts.items():
            family.add_metric([*values, part], value)
        return family

    def _histogram(self, name: str, text: str, distribution: Distribution) -> HistogramMetricFamily:
        full, labels, values = self._label_metric(name)
        family = HistogramMetricFamily(full, text, labels=labels)
        family.add_metric(values, distribution.cumulative(), distribution.total)
        return family


def make_registry(collector: EngineCollector) -> CollectorRegistry:
    """A registry that contains only `collector`."""
    # To describe itself a collector would collect once, which takes a snapshot of the engine.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def offload_families(
    stats: ExpertStats, model_name: str
) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Metrics of what --fast-memory reads, what it finds in memory, and how decode steps are computed now.

    They are 0 where all of a model is in memory.
    """
    residency, plan = stats.residency, stats.plan
    text = "Bytes of experts by the level that had them: read from slow, or in fast memory when chosen."
    family = CounterMetricFamily("moesaic:expert_bytes", text, labels=[*LABELS, "level"])
    family.add_metric([model_name, "slow"], residency.loaded_bytes)
    family.add_metric([model_name, "fast"], residency.held_bytes)
    yield family
    for name, text, value in (
        ("chosen_experts", "Experts that steps chose, where experts are loaded by choice.", residency.chosen),
        ("chosen_experts_in_memory", "Experts of chosen_experts that were in fast memory.", residency.hits),
        ("expert_exchanges", "Experts that took the place of one chosen less often.", residency.exchanges),
        ("plan_revisions", "Times that --fast-memory was planned anew for another load.", plan.revisions),
        ("memory_divisions", "Times that experts and KV cache divided memory anew.", plan.divisions),
    ):
        counter = CounterMetricFamily(f"moesaic:{name}", text, labels=LABELS)
        counter.add_metric([model_name], value)
        yield counter
    text = "Decode steps by how they load experts: those that were chosen, or all in pages."
    family = CounterMetricFamily("moesaic:offloaded_decode_steps", text, labels=[*LABELS, "schedule"])
    family.add_metric([model_name, "on-demand"], plan.on_demand_steps)
    family.add_metric([model_name, "paged"], plan.paged_steps)
    yield family
    for name, text, value in (
        ("micro_batch_size", "Requests of a micro-batch of --fast-memory.", plan.micro_batch),
        ("listed_experts", "Experts in memory at the start because of --hot-experts.", plan.listed_experts),
        ("resident_experts", "Experts of each layer that may stay in memory now.", plan.resident_experts),
    ):
        gauge = GaugeMetricFamily(f"moesaic:{name}", text, labels=LABELS)
        gauge.add_metric([model_name], value)
        yield gauge
