"""From a job and a machine to a worker's settings, and to what its passes should have taken."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.config import CacheConfig, ModelConfig, OffloadConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.metrics import PassStats
from moesaic.core.profile import Profile, Routes
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor
from moesaic.models import registry
from moesaic.models.kvcache.paged_kv import bytes_per_token
from moesaic.offload.weights import StreamedExperts
from moesaic.planning import USABLE, Job, WorkerPlan, longest_request, plan
from moesaic.policy.offloading.footprint import Footprint
from moesaic.runtime import offloaded_worker
from tests.support import model_configs, tiny_models

MIB = 1 << 20
HARDWARE = Hardware(
    "two cores",
    Level("RAM", 8 * GIB, 10 * GIB, Processor(1e11)),
    Level("disk", 100 * GIB, GIB, None),
    Link(0.02 * GIB, 0.02 * GIB),
)
GPU = Hardware(
    "a box",
    Level("a GPU", 16 * GIB, 300 * GIB, Processor(5e13)),
    Level("RAM", 64 * GIB, 40 * GIB, Processor(1e12)),
    Link(12 * GIB, 12 * GIB, staging=10 * GIB),
)
JOB = Job(requests=40, prompt=30, generate=10, longest=64)
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16, "num_hidden_layers": 4}
CAPS = ("5MiB", "6MiB", "8MiB", "16MiB")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 6 MiB in bf16, 1.5 MiB a layer."""
    model = tiny_models.build("qwen3_moe", model_configs.qwen3(**SIZES))
    return tiny_models.save(model, tmp_path_factory.mktemp("planned"), torch.bfloat16)


PADDED = replace(JOB, padded_length=54)
"""The longest prompt has nearly twice the mean's tokens."""


def planned(path: Path, cap: str = "6MiB", job: Job = JOB, **options: Any) -> WorkerPlan:
    worker = WorkerConfig(ModelConfig(str(path)))
    return plan(worker, OffloadConfig(cap, **options), job, HARDWARE)


def test_a_slow_level_that_computes_is_no_disk(path: Path) -> None:
    computing = replace(HARDWARE, slow=replace(HARDWARE.slow, processor=Processor(1e10)))
    options = OffloadConfig("6MiB", hardware="gpu.toml")
    with pytest.raises(ConfigError, match=r"--hardware: got 'gpu.toml'; allowed: a file of .* over a disk"):
        plan(WorkerConfig(ModelConfig(str(path))), options, JOB, computing)


def cache_tokens(found: WorkerPlan) -> int:
    spec = found.model
    return int(found.worker.cache.kv_cache_memory) // round(spec.layers * spec.cache(1, 4.0))


@pytest.mark.parametrize("job", [JOB, PADDED], ids=["", "padded"])
@pytest.mark.parametrize("cap", CAPS)
def test_a_worker_that_keeps_to_the_cap(path: Path, cap: str, job: Job) -> None:
    found = planned(path, cap, job)
    offload, policy = found.worker.offload, found.price.policy
    assert offload is not None
    size = int(float(cap.removesuffix("MiB")) * MIB)
    assert offload.fast_memory == found.hardware.fast.memory == size
    held = sum(found.price.fast.values()) - found.price.fast["cache"]
    assert held + int(found.worker.cache.kv_cache_memory) <= USABLE * size
    assert policy.slow_cache == 0 and not policy.slow_attention and policy.fast_residual
    assert found.worker.scheduler.max_num_seqs == offload.batch <= job.requests
    # rows of a step are those that the plan made room for
    assert found.worker.scheduler.max_num_batched_tokens == offload.batch * job.num_computed_tokens
    assert offload.padded_prompt_len == job.padded_length
    assert found.worker.cache.enable_prefix_caching is (job.padded_length is None)
    assert cache_tokens(found) >= job.longest
    assert offload.prefill_rows * found.model.hidden * 4 <= size
    # and so are weights: what the executor takes for its experts is what was counted
    layout = offloaded_worker.load(found.worker, offload, None)[1]
    static = {layer: range(offload.static_experts) for layer in layout.layers}
    arena = StreamedExperts.memory_for(path, layout, static).total
    names = ("static experts", "two layers of streamed experts")
    counted = sum(found.price.fast[name] for name in names)
    blocks = (
        4096 * 2 * 3 * (found.model.experts + 2)
    )  # what each tensor's first and last block may hold beside
    assert counted <= arena <= counted + blocks


def test_more_memory_is_never_slower(path: Path) -> None:
    throughputs = [planned(path, cap).price.throughput for cap in CAPS]
    assert throughputs == sorted(throughputs)
    assert planned(path, "16MiB").price.policy.static_experts == SIZES["num_experts"]


@pytest.mark.parametrize("cap", ["1KiB", "1MiB", "3MiB"])
def test_a_cap_that_is_too_small_is_told_with_one_that_is_not(path: Path, cap: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--fast-memory: got '{cap}'; allowed: at least \d+MiB for"
    ) as it:
        planned(path, cap)
    least = str(it.value).partition("at least ")[2].partition(" ")[0]
    assert planned(path, least).worker.offload is not None


def test_room_is_set_aside_for_one_long_request_among_short_ones(path: Path) -> None:
    """Three requests of 8 tokens and one of 160: as many as ten of the mean have in a batch."""
    job = Job(4, 4, 4, longest=160)
    found = planned(path, "5MiB", job)
    assert cache_tokens(found) >= 160
    assert (
        sum(found.price.fast.values()) - found.price.fast["cache"] + int(found.worker.cache.kv_cache_memory)
        <= USABLE * 5 * MIB
    )


def test_requests_may_get_as_long_as_the_cache_holds(path: Path) -> None:
    own = model_configs.qwen3()["max_position_embeddings"]
    assert longest_request(WorkerConfig(ModelConfig(str(path)))) == own
    assert planned(path, "16MiB").worker.model.max_model_len == own
    job = Job(1, 30, 10, longest=48)
    small = planned(path, "5MiB", job)
    assert small.worker.model.max_model_len == min(own, cache_tokens(small)) >= 48
    worker = WorkerConfig(ModelConfig(str(path), max_model_len=80))
    assert longest_request(worker) == 80
    with pytest.raises(ConfigError, match=f"^--max-model-len: got {own + 1}; allowed: at most {own}, the"):
        longest_request(WorkerConfig(ModelConfig(str(path), max_model_len=own + 1)))
    found = plan(worker, OffloadConfig("16MiB"), replace(JOB, longest=64), HARDWARE)
    assert found.worker.model.max_model_len == 80


@pytest.mark.parametrize("block", [1, 7, 16, 48])
def test_the_cache_holds_the_longest_request_in_whole_blocks(path: Path, block: int) -> None:
    worker = WorkerConfig(ModelConfig(str(path)), CacheConfig(block_size=block))
    found = plan(worker, OffloadConfig("5MiB"), Job(2, 30, 18, longest=48), HARDWARE)
    length = found.worker.model.max_model_len
    assert length is not None and cache_tokens(found) // block >= math.ceil(length / block)


def test_what_the_user_decides_is_done(path: Path) -> None:
    for schedule in ("cgopipe", "on-demand", "s4", "serial"):
        found = planned(path, offload_schedule=schedule, micro_batch_size=3, micro_batches=2)
        policy = found.price.policy
        assert (policy.schedule, policy.micro_batch, policy.micro_batches) == (schedule, 3, 2)
    # fewer requests than that are left
    assert planned(path, job=replace(JOB, requests=2), micro_batch_size=8).price.policy.batch <= 2
    assert planned(path, job=replace(JOB, requests=2), micro_batches=8).price.policy.batch <= 2


@pytest.mark.parametrize(
    ("flag", "worker"),
    [
        ("--max-num-seqs: got 3", {"scheduler": SchedulerConfig(max_num_seqs=3)}),
        ("--max-num-batched-tokens: got 99", {"scheduler": SchedulerConfig(max_num_batched_tokens=99)}),
        ("--kv-cache-memory: got '1MiB'", {"cache": CacheConfig(kv_cache_memory="1MiB")}),
    ],
)
def test_flags_that_the_plan_sets_are_refused(path: Path, flag: str, worker: dict[str, Any]) -> None:
    given = WorkerConfig(ModelConfig(str(path)), **worker)
    with pytest.raises(ConfigError, match=f"^{flag}; allowed: nothing with --fast-memory"):
        plan(given, OffloadConfig("6MiB"), JOB, HARDWARE)


@pytest.mark.parametrize("cap", CAPS[:3])
def test_padding_leaves_room_for_fewer_requests(path: Path, cap: str) -> None:
    fixed: dict[str, Any] = {"offload_schedule": "cgopipe", "micro_batch_size": 1}
    free, padded = (planned(path, cap, replace(job, requests=256), **fixed) for job in (JOB, PADDED))
    assert padded.price.policy.batch <= free.price.policy.batch
    assert padded.price.throughput < free.price.throughput
    assert padded.price.workload.prompt == 54


def test_padding_needs_a_fast_memory() -> None:
    with pytest.raises(ConfigError, match="^--pad: needs --fast-memory"):
        OffloadConfig(pad=True)


def test_types_count(path: Path) -> None:
    """Weights in float32 take twice as much; a cache in bf16 half, in int8 a byte a number and scales."""
    worker = WorkerConfig(ModelConfig(str(path), dtype="float32"))
    with pytest.raises(ConfigError, match="--fast-memory"):
        plan(worker, OffloadConfig("5MiB"), JOB, HARDWARE)
    job, spec = Job(1, 100, 20, 120), registry.read_spec(path)
    found = []
    for dtype in ("auto", "bfloat16", "int8"):
        cache = CacheConfig(kv_cache_dtype=dtype)  # type: ignore[arg-type]
        done = plan(WorkerConfig(ModelConfig(str(path)), cache), OffloadConfig("16MiB"), job, HARDWARE)
        found.append(int(done.worker.cache.kv_cache_memory))
    tokens, rest = divmod(found[0], bytes_per_token(spec.kv, spec.num_layers, torch.float32))
    assert rest == 0 and found[1] * 2 == found[0]
    assert found[2] == tokens * bytes_per_token(spec.kv, spec.num_layers, torch.int8)


def test_passes_as_they_were_planned_take_what_was_predicted(path: Path) -> None:
    found = planned(path, "5MiB", Job(32, 30, 10, 40), offload_schedule="cgopipe", micro_batch_size=4)
    policy, price = found.price.policy, found.price
    one = PassStats(False, policy.micro_batches, policy.batch, passes=1, context=policy.batch * 35)
    step = found.predict_seconds(one)
    assert step == pytest.approx(price.step.seconds, rel=0.05)
    assert found.predict_seconds(replace(one, passes=7, context=7 * one.context)) == pytest.approx(7 * step)
    parts = -(
        -policy.batch // Footprint(found.model, found.hardware, price.workload).prefill_requests(policy)
    )
    rows = policy.batch * 30
    prompts = PassStats(True, parts, policy.batch, passes=1, rows=rows, context=rows)
    assert found.predict_seconds(prompts) == pytest.approx(price.prefill.seconds, rel=0.05)
    # padding is priced as what it is beside
    long, full = replace(prompts, rows=64 * rows), replace(one, context=10**6 * one.context)
    assert found.predict_seconds(replace(prompts, padding_rows=63 * rows)) == found.predict_seconds(long)
    assert (
        found.predict_seconds(replace(one, padding_context=(10**6 - 1) * one.context))
        == found.predict_seconds(full)
        > 2 * step
    )
    # a fuller cache and longer prompts take longer
    assert found.predict_seconds(replace(prompts, rows=64 * rows)) > found.predict_seconds(prompts)


def test_passes_that_began_without_their_first_layer_waited_for_it(path: Path) -> None:
    found = planned(path, "5MiB", offload_schedule="cgopipe", micro_batch_size=4)
    policy = found.price.policy
    done = PassStats(False, policy.micro_batches, policy.batch, passes=5, context=5 * policy.batch * 35)
    away = (found.model.experts - policy.static_experts) * found.model.expert * found.model.number
    more = found.predict_seconds(replace(done, cold=2)) - found.predict_seconds(done)
    assert more == pytest.approx(2 * away / HARDWARE.link.down_bandwidth)
    more = found.predict_seconds(replace(done, cold=2), link=3e6) - found.predict_seconds(done, link=3e6)
    assert more == pytest.approx(2 * away / 3e6)


def test_a_profile_tells_what_on_demand_loads(path: Path, tmp_path: Path) -> None:
    """All requests choose the same experts; of another model, or none of its requests, it is refused."""
    spec = registry.read_spec(path)
    tokens, count = np.zeros(12, np.int32), spec.num_experts
    ids = np.tile(np.arange(spec.top_k, dtype=np.int16), (12, len(spec.moe_layers), 1))
    starts, prompts = np.array([0, 4, 8, 12]), np.full(3, 4)
    routes = Routes(tokens, starts, prompts, np.full(3, -1, np.int16), ids)
    made = Profile.from_routes(
        registry.routed_model(path).model, spec.vocab_size, count, spec.moe_layers, routes
    )
    file = tmp_path / "profile.npz"
    made.save(file)
    options: dict[str, Any] = {"offload_schedule": "on-demand", "micro_batch_size": 4}
    plain, known = planned(path, **options), planned(path, profile=str(file), **options)
    assert known.price.step.busy["link down"] < 0.5 * plain.price.step.busy["link down"]
    replace(made, model="other").save(file)
    with pytest.raises(ConfigError, match="model: got 'other'; allowed: this model's"):
        planned(path, profile=str(file), **options)


def test_a_faster_link_is_one_that_is_read_faster(path: Path) -> None:
    """The disk's own bandwidth is no limit beside what it was seen to send."""
    found = planned(path, "5MiB", offload_schedule="cgopipe", micro_batch_size=4)
    policy = found.price.policy
    done = PassStats(False, policy.micro_batches, policy.batch, passes=1, context=policy.batch * 35)
    layers = (found.model.experts - policy.static_experts) * found.model.expert * found.model.number
    assert found.predict_seconds(done, link=1e5) == pytest.approx(found.model.layers * layers / 1e5, rel=0.05)
    slow = replace(found.hardware.slow, bandwidth=HARDWARE.link.down_bandwidth)
    alike = replace(found, hardware=replace(found.hardware, slow=slow))
    assert alike.predict_seconds(done, link=10 * HARDWARE.link.down_bandwidth) < 0.2 * alike.predict_seconds(
        done
    )


@pytest.mark.slow
def test_logits_take_no_more_than_the_workspace(path: Path) -> None:
    found = planned(path)
    offload = found.worker.offload
    assert offload is not None and offload.logit_rows is not None and offload.logit_rows >= 1
    assert offload.logit_rows * found.model.vocab * 4 <= found.price.fast["workspace"]


# ---- a GPU over RAM


def on_gpu(path: Path, cap: str = "6MiB", hardware: Hardware = GPU, **options: Any) -> WorkerPlan:
    worker = WorkerConfig(ModelConfig(str(path)))
    return plan(worker, OffloadConfig(cap, **options), JOB, hardware, gpus=1)


@pytest.mark.parametrize(
    "schedule",
    [
        "auto",
        "cgopipe",
        "in-place",
        "on-demand",
        "s2",
        "s3",
        "s4",
        pytest.param("serial", marks=pytest.mark.slow),
    ],
)
def test_a_worker_on_a_gpu_does_what_was_priced(path: Path, schedule: str) -> None:
    found = on_gpu(path, offload_schedule=schedule)
    offload, policy = found.worker.offload, found.price.policy
    assert offload is not None and schedule in ("auto", offload.schedule)
    assert offload.slow_cache == policy.slow_cache in (0, 1) and offload.link is None
    assert (offload.slow_attention, offload.fast_residual) == (policy.slow_attention, policy.fast_residual)
    assert policy.slow_attention is {"s2": True, "s3": True, "s4": False}.get(schedule, policy.slow_attention)
    held = sum(found.price.fast.values())
    if not policy.slow_cache:
        held += int(found.worker.cache.kv_cache_memory) - found.price.fast["cache"]
    assert held <= USABLE * 6 * MIB


def test_a_cache_in_ram_may_take_all_of_it(path: Path) -> None:
    """As many requests as there are each get room for the longest one."""
    few = replace(GPU, slow=replace(GPU.slow, memory=16 * MIB))
    roomy, narrow = (on_gpu(path, "5MiB", one, offload_schedule="s3") for one in (GPU, few))
    sizes = [int(one.worker.cache.kv_cache_memory) for one in (roomy, narrow)]
    spec, longest = roomy.model, 64
    assert sizes[0] == roomy.price.policy.batch * longest * round(spec.layers * spec.cache(1, 2.0))
    assert sizes[1] + sum(narrow.price.slow.values()) - narrow.price.slow["cache"] <= few.slow.room


def test_auto_is_what_is_free_of_a_gpu(path: Path) -> None:
    small = replace(GPU, fast=replace(GPU.fast, memory=6 * MIB))
    found = on_gpu(path, "auto", small)
    assert found.worker.offload is not None
    assert found.worker.offload.fast_memory == int(small.fast.room) < small.fast.memory
    worker = WorkerConfig(ModelConfig(str(path)), CacheConfig(kv_cache_dtype="float16"))
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype: got 'float16'; allowed: auto, bfloat16"):
        plan(worker, OffloadConfig("auto"), JOB, small, gpus=1)


@pytest.mark.slow
def test_a_cache_on_a_gpu_has_the_type_of_the_weights(path: Path) -> None:
    assert on_gpu(path).price.workload.cache_number == 2.0 != planned(path).price.workload.cache_number
    assert on_gpu(path, "16MiB").model.number == 2.0


@pytest.mark.parametrize(
    ("schedule", "cap", "ram", "line"),
    [
        ("in-place", "1GiB", 64 * GIB, "--offload-schedule in-place: .* does not fit on a box: no policy"),
        ("in-place", "5MiB", MIB / 16, "--offload-schedule in-place: .* does not fit on a box: one request"),
        ("s3", "5MiB", 1024, "--offload-schedule s3: .* does not fit on a box: one request"),
        ("s3", "1MiB", 64 * GIB, "--fast-memory: got '1MiB'; allowed: at least \\dMiB for"),
        ("auto", "17GiB", 64 * GIB, "--fast-memory: got '17GiB'; allowed: at most 16.0 GiB, the memory"),
    ],
    ids=["all experts fit", "in place, little RAM", "s3, little RAM", "a small cap", "a large cap"],
)
def test_what_is_missing_is_said(path: Path, schedule: Any, cap: str, ram: float, line: str) -> None:
    box = replace(GPU, slow=replace(GPU.slow, memory=ram))
    with pytest.raises(ConfigError, match=f"^{line}"):
        on_gpu(path, cap, box, offload_schedule=schedule)


def test_pages_are_always_staged_and_pinned_memory_is_a_power_of_two(path: Path) -> None:
    sheet = replace(GPU, link=Link(12 * GIB, 12 * GIB))
    found = on_gpu(path, hardware=sheet)
    assert found.hardware.link.staging == sheet.slow.bandwidth / 2
    away = (16 - found.price.policy.static_experts) * 3 * 128 * 128 * 2
    assert away <= found.price.slow["pinned pages"] < 2 * away
    assert math.log2(found.price.slow["pinned pages"]).is_integer()


@pytest.mark.parametrize(
    ("gpu", "cap", "options", "got", "allowed"),
    [
        (True, "6MiB", {"hardware": "disk.toml"}, "--hardware: got 'disk.toml'", "GPU memory over RAM"),
        (False, "auto", {}, "--fast-memory: got 'auto'", "a size, such as 2GiB; auto is for a GPU"),
        (False, "6MiB", {"offload_schedule": "s3"}, "--offload-schedule: got 's3'", "which computes nothing"),
    ],
    ids=["a disk", "auto", "s3"],
)
def test_what_the_other_kind_of_machine_has_is_refused(
    path: Path, gpu: bool, cap: str, options: dict[str, Any], got: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(WorkerConfig(ModelConfig(str(path))), OffloadConfig(cap, **options), JOB, HARDWARE, gpu)
    line = str(raised.value)
    assert line.startswith(f"{got}; allowed: ") and line.endswith(allowed) and "\n" not in line
