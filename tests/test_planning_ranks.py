"""Plans for groups of processes: each rank keeps to the cap, and what one rank does is what is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.config import ModelConfig, OffloadConfig, ParallelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.metrics import PassStats
from moesaic.core.placement import Placement
from moesaic.cost.hardware import Hardware
from moesaic.models import registry
from moesaic.models.shard import Shard
from moesaic.offload.weights import StreamedExperts
from moesaic.planning import USABLE, WorkerPlan, plan
from moesaic.runtime.group.owners import read_owners
from moesaic.runtime.model_loading import read_expert_layout
from tests.support import model_configs, tiny_models
from tests.test_planning import GPU, HARDWARE, JOB, MIB, SIZES


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 6 MiB in bf16, 1.5 MiB a layer; 4 query heads over 2 key-value heads."""
    options = model_configs.qwen3(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return tiny_models.save(
        tiny_models.build("qwen3_moe", options), tmp_path_factory.mktemp("ranks"), torch.bfloat16
    )


def planned(
    path: Path,
    cap: str,
    ranks: int = 2,
    placement: str | None = None,
    hardware: Hardware = HARDWARE,
    gpus: int = 0,
    **options: Any,
) -> WorkerPlan:
    group = ParallelConfig(ranks, placement=placement)
    worker = WorkerConfig(ModelConfig(str(path)), parallel=group)
    return plan(worker, OffloadConfig(cap, **options), JOB, hardware, gpus)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cap", ["3MiB", "4MiB", "8MiB"])
def test_every_rank_keeps_to_the_cap(path: Path, cap: str, ranks: int) -> None:
    found = planned(path, cap, ranks)
    offload, size = found.worker.offload, int(cap.removesuffix("MiB")) * MIB
    assert offload is not None and offload.fast_memory == size
    assert found.price.policy.schedule == "cgopipe"
    held = sum(found.price.fast.values()) - found.price.fast["cache"]
    assert held + int(found.worker.cache.kv_cache_memory) / ranks <= USABLE * size
    names = ("static experts", "two layers of streamed experts")
    counted = sum(found.price.fast[name] for name in names)
    owners, layout = read_owners(found.worker), read_expert_layout(found.worker.model)
    for rank in range(ranks):
        owned = owners.list_experts(rank)
        static = {layer: mine[: offload.static_experts] for layer, mine in owned.items()}
        arena = StreamedExperts.memory_for(path, layout, static, owned).total
        assert counted <= arena <= counted + 4096 * 2 * 3 * (found.model.experts + 2)


def test_the_cache_is_that_of_all_ranks(path: Path) -> None:
    """A rank's blocks hold the keys of its own heads; of four ranks two have the same ones."""
    for ranks in (1, 2, 4):
        found = planned(path, "8MiB", ranks)
        spec = registry.read_spec(path, Shard(0, ranks))
        token = spec.num_layers * 2 * spec.kv.kv_heads * spec.kv.key_width * 4
        assert found.model.layers * found.model.cache(1, 4.0) == token
        length = found.worker.model.max_model_len
        assert length is not None and int(found.worker.cache.kv_cache_memory) // ranks >= length * token


def test_ranks_together_need_less_of_a_cap_and_hold_more(path: Path) -> None:
    assert planned(path, "5MiB", 2).price.policy.static_experts == SIZES["num_experts"] // 2
    assert planned(path, "5MiB", 1).price.policy.static_experts < SIZES["num_experts"]
    for ranks, least in ((1, 4), (2, 3), (4, 2)):
        with pytest.raises(ConfigError, match=f"^--fast-memory: got '1MiB'; allowed: at least {least}MiB"):
            planned(path, "1MiB", ranks)


def test_a_placement_says_how_many_experts_a_rank_has(path: Path, tmp_path: Path) -> None:
    spec = registry.read_spec(path)
    held = {layer: {0: list(range(11)), 1: list(range(11, 16))} for layer in spec.moe_layers}
    file = tmp_path / "placement.json"
    file.write_text(Placement(0, spec.num_experts, held, registry.routed_model(path).model).to_json())
    assert planned(path, "5MiB", placement=str(file)).model.experts == 11


def test_what_is_refused(path: Path) -> None:
    for schedule in ("cgopipe", "s4", "serial"):
        found = planned(path, "4MiB", offload_schedule=schedule)
        assert found.price.policy.schedule == schedule
    with pytest.raises(ConfigError, match="^--offload-schedule: got 'on-demand'; allowed: auto, cgopipe, s4"):
        planned(path, "4MiB", offload_schedule="on-demand")
    with pytest.raises(ConfigError, match="^--tensor-parallel-size: got 3; allowed: 1, 2, 4 for"):
        planned(path, "4MiB", 3)


def test_a_placement_that_lacks_layers_is_refused(path: Path, tmp_path: Path) -> None:
    routed, file = registry.routed_model(path), tmp_path / "placement.json"
    placement = Placement.from_stages(routed.layers[1:], routed.num_experts, [(0, 1)], routed.model)
    file.write_text(placement.to_json())
    with pytest.raises(ConfigError, match="^--placement: layers: got 'no layer 0'"):
        planned(path, "4MiB", placement=str(file))


def test_passes_of_a_rank_are_predicted_by_its_part(path: Path) -> None:
    """Half of the experts over half of the disk."""
    options: dict[str, Any] = {"offload_schedule": "cgopipe", "micro_batch_size": 4, "micro_batches": 4}
    one, two = (planned(path, cap, ranks, **options) for cap, ranks in (("6MiB", 1), ("4MiB", 2)))
    assert (
        two.hardware.link.down_bandwidth
        == one.hardware.link.down_bandwidth / 2
        == HARDWARE.link.down_bandwidth / 2
    )
    done = PassStats(False, 4, 16, passes=3, context=3 * 16 * 35)
    streamed = [
        (found.model.experts - found.price.policy.static_experts) / found.hardware.link.down_bandwidth
        for found in (one, two)
    ]
    assert two.predict_seconds(done) == pytest.approx(
        one.predict_seconds(done) * streamed[1] / streamed[0], rel=0.05
    )
    assert two.predict_seconds(replace(done, passes=6, context=2 * done.context)) == pytest.approx(
        2 * two.predict_seconds(done)
    )


# ---- ranks on GPUs


@pytest.mark.parametrize("schedule", ["auto", "cgopipe", "s2", "s3", "s4", "serial"])
def test_every_rank_on_a_gpu_keeps_to_the_cap(path: Path, schedule: str) -> None:
    found = planned(path, "4MiB", hardware=GPU, gpus=2, offload_schedule=schedule)
    offload = found.worker.offload
    assert offload is not None and offload.schedule == {"auto": "cgopipe"}.get(schedule, schedule)
    held = sum(found.price.fast.values())
    if not offload.slow_cache:
        held += int(found.worker.cache.kv_cache_memory) // 2 - found.price.fast["cache"]
    assert held <= USABLE * 4 * MIB
    assert found.hardware.link.down_bandwidth == GPU.link.down_bandwidth / 2
    assert found.hardware.fast.bandwidth == GPU.fast.bandwidth


@pytest.mark.parametrize(("gpus", "share"), [(2, 1), (1, 2)])
def test_auto_is_a_ranks_part_of_a_gpu(path: Path, gpus: int, share: int) -> None:
    small = replace(GPU, fast=replace(GPU.fast, memory=8 * MIB))
    found = planned(path, "auto", hardware=small, gpus=gpus)
    assert found.worker.offload is not None
    assert found.worker.offload.fast_memory == int(small.fast.room / share)
    with pytest.raises(ConfigError, match="^--fast-memory: got '9MiB'; allowed: at most"):
        planned(path, "9MiB", hardware=small, gpus=gpus)


@pytest.mark.parametrize("schedule", ["on-demand", "in-place"])
def test_schedules_that_gate_first_are_refused(path: Path, schedule: str) -> None:
    allowed = "auto, cgopipe, s2, s3, s4, serial with --tensor-parallel-size"
    with pytest.raises(ConfigError, match=f"^--offload-schedule: got '{schedule}'; allowed: {allowed}$"):
        planned(path, "4MiB", hardware=GPU, gpus=2, offload_schedule=schedule)
