"""The meter, on a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from moesaic.core import messages
from moesaic.core.metrics import BlockStats, SpeculationStats, WorkerStats
from moesaic.core.request import FinishReason, RequestOutput
from moesaic.core.speculation import MAX_CHECKED_ROWS
from moesaic.engine import EngineStats
from moesaic.server.meter import Distribution, Meter
from moesaic.server.metrics import VLLM_METRICS, EngineCollector, make_registry

QUIET = messages.Stats(WorkerStats())


def output(group: int, index: int = 0, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(group, index, "a", [1], finish_reason=finish, num_prompt_tokens=5)


def test_a_distribution_is_cumulative_and_bounds_are_included() -> None:
    values = Distribution((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        values.observe(value)
    assert values.cumulative() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert values.total == pytest.approx(7.65)


def test_the_times_of_one_request_add_up() -> None:
    meter = Meter()
    meter.record_arrival(7, 1, now=10.0)
    meter.record_message(messages.RequestsAdmitted([7], [0.5], [0]), [], 10.5)
    meter.record_message(QUIET, [output(7)], 12.0)
    meter.record_message(QUIET, [output(7)], 12.25)
    meter.record_message(QUIET, [output(7, finish=FinishReason.STOP)], 13.0)
    assert meter.queue_time.total == 0.5
    assert meter.time_to_first_token.total == 2.0
    assert meter.prefill_time.total == 1.5
    assert meter.inter_token_latency.total == meter.decode_time.total == 1.0
    assert sum(meter.inter_token_latency.counts) == 2
    assert meter.e2e_latency.total == 3.0
    assert (meter.prompt_tokens, meter.generation_tokens) == (5, 3)


def test_the_mean_time_of_a_token_is_that_of_answers_with_several() -> None:
    meter = Meter()
    meter.record_arrival(7, 1, now=0.0)
    meter.record_arrival(8, 1, now=0.0)
    meter.record_message(messages.RequestsAdmitted([7], [0.5], [0]), [], 0.5)
    for now, finish in ((1.0, None), (1.25, None), (3.0, FinishReason.STOP)):
        meter.record_message(QUIET, [output(7, finish=finish)], now)
    meter.record_message(QUIET, [output(8, finish=FinishReason.LENGTH)], 4.0)
    assert meter.request_time_per_token.total == 1.0 and sum(meter.request_time_per_token.counts) == 1
    assert meter.inference_time.total == 2.5 + 4.0


def test_a_request_counts_once_with_its_longest_completion() -> None:
    meter = Meter()
    meter.record_arrival(3, 3, now=0.0)
    for index, tokens in ((1, 2), (0, 3), (2, 1)):
        for token in range(tokens):
            done = FinishReason.STOP if token == tokens - 1 else None
            meter.record_message(QUIET, [output(3, index, done)], 1.0)
    assert meter.longest_generation.total == 3 and sum(meter.longest_generation.counts) == 1
    meter.record_arrival(9, 2, now=0.0)
    meter.record_message(QUIET, [output(9, 0, FinishReason.STOP)], 2.0)
    meter.record_abort(9)
    assert sum(meter.longest_generation.counts) == 1


def test_a_step_counts_its_tokens_and_the_computed_part_of_prompts() -> None:
    meter = Meter()
    meter.record_arrival(7, 1, now=0.0)
    meter.record_arrival(8, 1, now=0.0)
    cached = RequestOutput(8, 0, "a", [1], num_prompt_tokens=9, num_cached_tokens=4)
    meter.record_message(QUIET, [output(7)], 1.0)  # 5 tokens of its prompt, and one more
    meter.record_message(QUIET, [output(7), cached], 2.0)  # 1 token, and 1 after 9 - 4 of the prompt
    meter.record_message(QUIET, [], 3.0)
    assert sum(meter.step_tokens.counts) == 2 and meter.step_tokens.total == 6 + 7
    assert (meter.prompt_tokens, meter.cached_prompt_tokens) == (14, 4)


def test_each_of_n_completions_is_timed_and_the_aborted_are_counted() -> None:
    meter = Meter()
    meter.record_arrival(3, 3, now=0.0)
    meter.record_message(messages.RequestsAdmitted([3, 4, 5, 99], [1.0, 1.0, 1.0, 1.0], [0] * 4), [], 1.0)
    meter.record_message(QUIET, [output(3, 1, FinishReason.LENGTH)], 2.0)
    meter.record_abort(3)
    meter.record_abort(3)
    meter.record_message(QUIET, [output(3, 0), output(8)], 3.0)
    assert meter.finish_counts == {FinishReason.LENGTH: 1, FinishReason.ABORT: 2}
    assert sum(meter.prefill_time.counts) == 1 and meter.prefill_time.total == 1.0


def test_names_are_vllms_with_our_prefix() -> None:
    collector = EngineCollector(lambda: EngineStats(0, WorkerStats()), Meter(), "m")
    names = {family.name for family in make_registry(collector).collect()}
    assert names == {
        f"moesaic:{name}"
        for name in (
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_blocks"),
            "state_pages",
            *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
            *("prompt_tokens", "generation_tokens", "request_success", "corrupted_requests"),
            *("runs", "partial_runs"),
            *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
            *("spec_decode_num_accepted_tokens_per_pos", "spec_decode_break_even_acceptance"),
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "cache_config_info"),
            *("num_requests_waiting_by_reason", "request_prefill_kv_computed_tokens"),
            *("prompt_tokens_by_source", "prompt_tokens_cached_by_source"),
            *(
                "collective_bytes",
                "group_pairs",
                "group_local_pairs",
                "group_shuffled_rows",
                "group_kept_rows",
            ),
            *("prefix_disk_hits", "prefix_disk_read_bytes", "prefix_disk_written_bytes"),
            *("prefix_disk_dropped_blocks", "prefix_disk_damaged_entries"),
            *("kv_transfers", "kv_transfer_bytes", "kv_transfer_seconds", "kv_transfer_failures"),
            *(
                "kv_transfer_early_bytes",
                "kv_received_requests",
                "kv_received_tokens",
                "kv_transfer_held_bytes",
            ),
            *("expert_bytes", "chosen_experts", "chosen_experts_in_memory", "expert_exchanges"),
            *("plan_revisions", "offloaded_decode_steps", "micro_batch_size", "listed_experts"),
            *("memory_divisions", "resident_experts"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_prompt_tokens", "request_generation_tokens"),
            *("request_inference_time_seconds", "request_time_per_output_token_seconds"),
            *("request_max_num_generation_tokens", "iteration_tokens_total", "prompt_tokens_cached"),
        )
    }


def test_break_even_is_that_of_the_prices() -> None:
    prices = tuple(
        2 * (1 + 0.5 * rows) for rows in range(MAX_CHECKED_ROWS)
    )  # as two workers have them together
    for pays, steps in ((0.5, prices), (math.inf, (1.0, 9.0) * 16)):
        stats = WorkerStats(speculation=SpeculationStats(accepted_per_pos=(0, 0), prices=steps))
        collector = EngineCollector(lambda stats=stats: EngineStats(0, stats), Meter(), "m")
        found = {
            (sample.labels["requests"], sample.labels["tokens"]): sample.value
            for family in make_registry(collector).collect()
            for sample in family.samples
            if "break_even" in sample.name
        }
        assert list(found) == [("1", "1"), ("1", "2"), ("8", "1"), ("8", "2"), ("16", "1")]
        assert found["1", "1"] == pytest.approx(pays)


def test_with_vllms_prefix_only_what_vllm_has_gets_it() -> None:
    collectors = [
        EngineCollector(lambda: EngineStats(0, WorkerStats()), Meter(), "m", *prefix)
        for prefix in ((), ("vllm:",))
    ]
    ours, theirs = ({family.name for family in make_registry(one).collect()} for one in collectors)
    assert {name.replace("vllm:", "moesaic:") for name in theirs} == ours
    assert {name.removeprefix("vllm:") for name in theirs if name.startswith("vllm:")} == VLLM_METRICS
    assert "moesaic:kv_blocks" in theirs and "vllm:num_requests_running" in theirs


def test_with_vllms_prefix_its_metrics_have_its_labels() -> None:
    """Dashboards for vLLM filter and group by `engine`."""
    stats = WorkerStats(speculation=SpeculationStats(accepted_per_pos=(1,)))
    collector = EngineCollector(lambda: EngineStats(0, stats), Meter(), "m", "vllm:")
    samples = [sample for family in make_registry(collector).collect() for sample in family.samples]
    assert {sample.labels.get("engine") for sample in samples if sample.name.startswith("vllm:")} == {"0"}
    assert all("engine" not in sample.labels for sample in samples if sample.name.startswith("moesaic:"))


VLLMS_DASHBOARDS = (
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("time_to_first_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_max_num_generation_tokens", "iteration_tokens_total", "prompt_tokens", "generation_tokens"),
    *("request_success", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
)
"""Metrics in the dashboards that vLLM 0.33.0 publishes (examples/observability), without the prefix."""


VLLMS_NAMES = (
    *("admission_rejections", "cache_config_info", "corrupted_requests", "diffusion_num_canvas_positions"),
    *("diffusion_num_committed_tokens", "diffusion_num_denoising_steps", "e2e_request_latency_seconds"),
    *("engine_sleep_state", "estimated_flops_per_gpu_total", "estimated_read_bytes_per_gpu_total"),
    *("estimated_write_bytes_per_gpu_total", "external_prefix_cache_hits", "external_prefix_cache_queries"),
    *("generation_tokens", "inter_token_latency_seconds", "iteration_tokens_total", "kv_cache_usage_perc"),
    *("kv_block_idle_before_evict_seconds", "kv_block_lifetime_seconds", "kv_block_reuse_gap_seconds"),
    *("lora_requests_info", "mm_cache_hits", "mm_cache_queries", "num_preemptions", "num_requests_running"),
    *("num_requests_kv_fetch_by_stage", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("prefix_cache_hits", "prefix_cache_queries", "prompt_tokens", "prompt_tokens_by_source"),
    *("prompt_tokens_cached", "prompt_tokens_cached_by_source", "request_decode_time_seconds"),
    *("request_generation_tokens", "request_inference_time_seconds", "request_max_num_generation_tokens"),
    *("request_num_preemptions", "request_params_max_tokens", "request_params_n", "request_success"),
    *("request_prefill_kv_computed_tokens", "request_prefill_time_seconds", "request_prompt_tokens"),
    *("request_queue_time_seconds", "request_time_per_output_token_seconds", "watermark_requests"),
    *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_drafts", "time_to_first_token_seconds"),
)
"""The metrics of vLLM 0.33.0, without the prefix."""


def test_what_has_vllms_prefix_is_a_metric_of_vllm() -> None:
    assert set(VLLMS_NAMES) >= VLLM_METRICS


@pytest.mark.parametrize("prefix", ["moesaic:", "vllm:"])
def test_no_series_comes_twice(prefix: str) -> None:
    """Neither under the same name, nor under both prefixes, nor with the same values under another name."""
    meter = Meter()
    meter.record_arrival(7, 2, now=0.0)
    meter.record_message(messages.RequestsAdmitted([7], [0.25], [0]), [], 0.25)
    meter.record_message(QUIET, [output(7, 1, FinishReason.STOP)], 1.0)
    for now, finish in ((1.0, None), (1.25, None), (3.0, FinishReason.STOP)):
        cached = RequestOutput(7, 0, "a", [1], finish_reason=finish, num_prompt_tokens=9, num_cached_tokens=4)
        meter.record_message(QUIET, [cached], now)
    collector = EngineCollector(lambda: EngineStats(0, WorkerStats()), meter, "m", prefix)
    families = list(make_registry(collector).collect())
    names = [family.name.split(":")[1] for family in families]
    assert len(names) == len(set(names))
    samples = [
        (sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples
    ]
    assert len(samples) == len(set(samples))
    histograms = [
        tuple(sample.value for sample in family.samples) for family in families if family.type == "histogram"
    ]
    assert len(histograms) == len(set(histograms))


def test_tokens_and_requests_are_split_as_in_vllm() -> None:
    meter = Meter()
    meter.record_arrival(7, 1, now=0.0)
    stop = FinishReason.STOP
    meter.record_message(
        QUIET,
        [RequestOutput(7, 0, "a", [1], finish_reason=stop, num_prompt_tokens=9, num_cached_tokens=4)],
        1.0,
    )
    stats = WorkerStats(waiting=3, blocks=BlockStats(num_total=20, prefix_hits=4))
    collector = EngineCollector(lambda: EngineStats(0, stats, 16), meter, "m", "vllm:")
    families = {family.name: family for family in make_registry(collector).collect()}

    def parts(name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in families[f"vllm:{name}"].samples}

    by_source = {"local_compute": 5, "local_cache_hit": 4, "external_kv_transfer": 0}
    assert parts("prompt_tokens_by_source", "source") == by_source
    assert parts("prompt_tokens_cached_by_source", "source") == {"device": 4}
    assert parts("num_requests_waiting_by_reason", "reason") == {"capacity": 3, "deferred": 0}
    [config] = families["vllm:cache_config_info"].samples
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"], config.value) == ("16", "20", 1)
    assert meter.request_computed_tokens.total == 5


def test_vllms_dashboards_find_their_metrics() -> None:
    collector = EngineCollector(lambda: EngineStats(0, WorkerStats()), Meter(), "m", "vllm:")
    names = {family.name for family in make_registry(collector).collect()}
    assert {f"vllm:{name}" for name in VLLMS_DASHBOARDS} - names == set()


def test_tokens_of_requests_are_counted_when_they_end() -> None:
    meter = Meter()
    meter.record_arrival(7, 1, now=0.0)
    meter.record_message(QUIET, [output(7)], 1.0)
    assert meter.request_prompt_tokens.total == 0.0
    meter.record_message(QUIET, [output(7, finish=FinishReason.STOP)], 2.0)
    assert (meter.request_prompt_tokens.total, meter.request_generation_tokens.total) == (5.0, 2.0)
    counted = meter.request_prompt_tokens.cumulative()[:4]
    assert counted == [("1.0", 0.0), ("2.0", 0.0), ("5.0", 1.0), ("10.0", 1.0)]


def test_drafted_tokens_are_counted_by_place() -> None:
    stats = WorkerStats(speculation=SpeculationStats(5, 12, 7, (4, 2, 1)))
    collector = EngineCollector(lambda: EngineStats(0, stats), Meter(), "m")
    found = {
        (sample.name.removeprefix("moesaic:spec_decode_"), sample.labels.get("position")): sample.value
        for family in make_registry(collector).collect()
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert found == {
        ("num_drafts_total", None): 5,
        ("num_draft_tokens_total", None): 12,
        ("num_accepted_tokens_total", None): 7,
        ("num_accepted_tokens_per_pos_total", "0"): 4,
        ("num_accepted_tokens_per_pos_total", "1"): 2,
        ("num_accepted_tokens_per_pos_total", "2"): 1,
    }
