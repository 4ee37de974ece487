"""What each rank of a group takes of the sanitizer's device, and how much its cache may."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import test_group, test_offload
from tests.support import model_configs as model_cases
from tests.support import pairs, tiny_models
from tests.support.gpu_sanitizer import Dispatch, sanitized
from tests.support.memory_by_rank import rank_of_thread, shares
from tests.support.thread_groups import group_of_threads

from moesaic import LLM, SamplingParams
from moesaic.config import (
    CacheConfig,
    ModelConfig,
    MoeCollectives,
    OffloadConfig,
    OffloadSchedule,
    ParallelConfig,
    WorkerConfig,
)
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.cost.machines import MACHINES
from moesaic.kernels.table import REFERENCE
from moesaic.models import registry
from moesaic.planning import Job, plan
from moesaic.runtime.model_loading import check_gpu_sharing
from moesaic.testing import byte_tokenizer

NARROW = {
    "hidden_size": 128, "moe_intermediate_size": 16, "num_experts": 16, "num_experts_per_tok": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
"""What rows and answers take is more than what experts do inside."""


def planned(path: Path, options: OffloadConfig, job: Job, ranks: int = 2) -> tuple[Offload, dict[str, Any]]:
    asked = WorkerConfig(ModelConfig(str(path)), parallel=ParallelConfig(ranks))
    worker = plan(asked, options, job, MACHINES["l4"], gpus=ranks).worker
    assert worker.offload is not None
    return worker.offload, {
        "kv_cache_memory": worker.cache.kv_cache_memory,
        "max_num_seqs": worker.scheduler.max_num_seqs,
        "max_num_batched_tokens": worker.scheduler.max_num_batched_tokens,
        "max_model_len": worker.model.max_model_len,
    }


@pytest.mark.parametrize(
    ("schedule", "cap"),
    [
        *(("auto", 5), ("s3", 8)),
        *(
            pytest.param(*case, marks=pairs.REST)
            for case in (("auto", 8), ("s2", 5), ("s4", 5), ("serial", 8))
        ),
    ],
)
@pytest.mark.slow
def test_planned_ranks_keep_to_the_memory_that_each_may_take(
    tmp_path: Path, schedule: OffloadSchedule, cap: int
) -> None:
    """Experts of 12 MiB, half of them on each rank."""
    path = tiny_models.save(tiny_models.build("qwen3_moe", model_cases.qwen3(**test_offload.LARGE)), tmp_path)
    byte_tokenizer(path)
    offload, settings = planned(path, OffloadConfig(f"{cap}MiB", offload_schedule=schedule), test_offload.JOB)
    with shares() as taken, test_group.on_device(path, 2, offload, **settings) as llm:
        found = test_offload.generate(llm)
    assert max(taken.most.values()) <= cap << 20 and len(taken.most) == 2
    test_group.same(found, test_group.alone(path, **settings))


EXCHANGED: list[tuple[OffloadSchedule, int, MoeCollectives, bool]] = [
    ("auto", 2, "reduce-scatter", True), ("auto", 2, "deepspeed", True),
]  # fmt: skip
EXCHANGING = itertools.product(("auto", "s2", "serial"), (2, 4), test_group.FORMS, (False, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ranks", "form", "to_one_half"),
    [*EXCHANGED, *(pytest.param(*case, marks=pairs.REST) for case in EXCHANGING if case not in EXCHANGED)],
)
def test_what_ranks_exchange_is_within_that_memory(
    tmp_path: Path, schedule: OffloadSchedule, ranks: int, form: MoeCollectives, to_one_half: bool
) -> None:
    model = tiny_models.build("qwen3_moe", model_cases.qwen3(**NARROW))
    if to_one_half:
        ask_for_the_first_experts(model)
    path = tiny_models.save(model, tmp_path)
    byte_tokenizer(path)
    job = Job(requests=24, prompt=100, generate=4, longest=110)
    offload, settings = planned(path, OffloadConfig("3MiB", offload_schedule=schedule), job, ranks)
    prompts = [tiny_models.prompt(100, model_cases.VOCAB, seed=seed) for seed in range(24)]
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with (
        shares() as taken,
        test_group.on_device(path, ranks, offload, moe_collectives=form, **settings) as llm,
    ):
        found, group = llm.generate(prompts, greedy), llm.stats().experts.group
    assert max(taken.most.values()) <= 3 << 20 and len(taken.most) == ranks
    holders = 1 if form == "all-reduce" else ranks // 2  # ranks with the first half of the experts
    assert (group.local_pairs * holders == group.pairs) == (to_one_half or form == "all-reduce")
    llm = LLM(str(path), threads=1, device="cpu", kernels="reference", **settings)
    wanted = llm.generate(prompts, greedy)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]


def ask_for_the_first_experts(model: torch.nn.Module) -> None:
    """All rows choose the first half: one coordinate of theirs is large, and every gate looks at it."""
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[:, 0] = 50.0
        for layer in model.get_submodule("model.layers").children():
            layer.get_parameter("post_attention_layernorm.weight")[0] = 1.0
            gate = layer.get_parameter("mlp.gate.weight")
            gate[:, 0] = -8.0
            gate[: len(gate) // 2, 0] = 8.0


@pytest.mark.slow
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_ranks_hold_the_experts_once_between_them(tmp_path: Path, shared: int) -> None:
    """No rank takes the whole of an expert that it has a part of, not even while it loads."""
    wide = model_cases.mixtral(
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=4, intermediate_size=1024
    )
    path = tiny_models.save(tiny_models.build("mixtral", wide), tmp_path)
    byte_tokenizer(path)
    experts, cache = registry.expert_layout(path, REFERENCE, "cpu").num_bytes // 4, 1 << 18
    with (
        shares() as taken,
        test_group.on_device(path, 4, None, expert_tensor_parallel_size=shared, kv_cache_memory="1MiB"),
    ):
        pass
    assert len(taken.most) == 4
    assert experts < min(taken.most.values()) <= max(taken.most.values()) < 1.2 * (experts + cache)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, options = test_group.MODELS["qwen3"]
    made = tiny_models.save(tiny_models.build(kind, options), tmp_path_factory.mktemp("qwen3"))
    byte_tokenizer(made)
    return made


@pytest.mark.slow
def test_a_cache_of_a_group_fits_the_rank_with_the_least_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(*mebibytes: int) -> int:
        with sanitized(), monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "device_count", lambda: 2)
            patched.setattr(torch.cuda, "mem_get_info", lambda _: (mebibytes[rank_of_thread()] << 20, 0))
            settings: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 80, "max_num_seqs": 256}
            with group_of_threads(str(path), within=Dispatch, device="cuda", **settings) as (llm, _, _):
                return llm.info.num_blocks

    assert blocks(10, 5) == blocks(5, 10) == blocks(5, 5) < blocks(10, 10)


def test_a_cache_needs_a_size_where_others_load_into_the_same_gpu() -> None:
    alone = WorkerConfig(ModelConfig("demo", device="cuda"), supervised=True)
    with sanitized():
        check_gpu_sharing(alone)
        check_gpu_sharing(replace(alone, beside=1, cache=CacheConfig("4GiB")))
        with pytest.raises(ConfigError, match="^--kv-cache-memory: got 'auto'; allowed: a size"):
            check_gpu_sharing(replace(alone, beside=1))
    check_gpu_sharing(replace(alone, beside=1, model=ModelConfig("demo", device="cpu")))


def test_a_cache_of_a_group_needs_a_size_where_ranks_share_a_gpu(path: Path) -> None:
    """The sanitizer has one."""
    with (
        pytest.raises(ConfigError, match="^--kv-cache-memory: got 'auto'; allowed: a size, such as 4GiB"),
        test_group.on_device(path, 2, None, kv_cache_memory="auto"),
    ):
        pass
