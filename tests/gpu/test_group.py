"""Groups whose ranks compute on the sanitizer's device: the tokens of one process on a CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gpu import test_offload
from tests.support import model_configs as model_cases
from tests.support import pairs, tiny_models
from tests.support.gpu_sanitizer import NAME, Dispatch, sanitized
from tests.support.group_placements import recorded, write
from tests.support.thread_groups import group_of_threads

from moesaic import LLM, RequestOutput
from moesaic.config import (
    ModelConfig,
    MoeCollectives,
    ParallelConfig,
    WorkerConfig,
    one_gpu,
)
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.models import registry
from moesaic.runtime.group import launcher
from moesaic.runtime.group.offloaded_group import SLOW_ATTENTION_SCHEDULES, WHOLE_BLOCKS
from moesaic.testing import byte_tokenizer

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", model_cases.mixtral(num_attention_heads=8, num_key_value_heads=2)),
    "qwen3": (
        "qwen3_moe",
        model_cases.qwen3(
            num_attention_heads=4, num_key_value_heads=4, mlp_only_layers=[1], num_hidden_layers=4,
            attention_bias=True,
        ),
    ),
    "deepseek": ("deepseek_v2", model_cases.deepseek(n_shared_experts=2)),
}  # fmt: skip
FORMS: tuple[MoeCollectives, ...] = ("all-reduce", "reduce-scatter", "deepspeed")
POLICIES = {
    name: policy
    for name, policy in test_offload.POLICIES.items()
    if policy.schedule in (*WHOLE_BLOCKS, *SLOW_ATTENTION_SCHEDULES)
}
OFTEN = (
    "the cache stays", "the cache stays, some experts too", "the cache moves, s4",
    "the cache moves, rows too",    "the CPU attends", "the CPU attends, s3", "the CPU attends, serial",
)  # fmt: skip


def kinds(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """A policy counts as where it keeps the cache, a model as what it keeps there."""
    model, policy, *rest = case
    return model == "deepseek", policy and policy.partition(",")[0], *rest


SETTINGS: dict[str, Any] = {"max_model_len": 80, "max_num_batched_tokens": 23, "max_num_seqs": 8}
CASES = [
    *pairs.params(
        MODELS, (None, *OFTEN), FORMS, (2,), key=kinds
    ),
    *(
        pytest.param(*case, 2, marks=pairs.REST)
        for case in itertools.product(MODELS, [name for name in POLICIES if name not in OFTEN], FORMS)
    ),
    pytest.param("mixtral", None, "reduce-scatter", 4, marks=pytest.mark.slow),
    pytest.param("mixtral", "the CPU attends", "deepspeed", 4, marks=pairs.REST),
    pytest.param("qwen3", "the cache moves, s4", "all-reduce", 4, marks=pairs.REST),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (kind, options) in MODELS.items():
        made[name] = tiny_models.save(tiny_models.build(kind, options), tmp_path_factory.mktemp(name))
        byte_tokenizer(made[name])
    return made


@contextmanager
def on_device(path: Path, ranks: int, offload: Offload | None, **settings: Any) -> Iterator[LLM]:
    settings = SETTINGS | {"kv_cache_memory": "64MiB", "tensor_parallel_size": ranks} | settings
    with (
        sanitized(),
        group_of_threads(str(path), within=Dispatch, device="cuda", offload=offload, **settings) as (
            llm,
            _,
            _,
        ),
    ):
        assert llm.info.device == NAME and llm.info.ranks == ranks
        yield llm


@functools.cache
def alone(path: Path, **settings: Any) -> list[RequestOutput]:
    """Of one process, on a CPU, all in memory."""
    llm = LLM(str(path), threads=1, device="cpu", kernels="reference", **(SETTINGS | settings))
    return test_offload.generate(llm)


def same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [entry.logprob for entry in one.logprobs or []] == pytest.approx(
            [entry.logprob for entry in other.logprobs or []], abs=1e-4
        )


@pytest.mark.parametrize(("model", "policy", "form", "ranks"), CASES)
def test_tokens_are_those_of_one_process(
    checkpoints: dict[str, Path], model: str, policy: str | None, form: str, ranks: int
) -> None:
    """policy: of ranks that page their shards; None: all is in the GPU."""
    path, offload = checkpoints[model], None if policy is None else POLICIES[policy]
    with on_device(path, ranks, offload, moe_collectives=form) as llm:
        found, passes = test_offload.generate(llm), llm.stats().experts.passes
    same(found, alone(path))
    most = -(-registry.read_spec(path).num_experts // ranks)
    assert any(one.loaded_bytes for one in passes) == (offload is not None and offload.static_experts < most)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "the cache stays", "the CPU attends, some experts stay"])
def test_shuffled_rows(checkpoints: dict[str, Path], tmp_path: Path, policy: str | None) -> None:
    path, offload = checkpoints["deepseek"], None if policy is None else POLICIES[policy]
    greedy = [test_offload.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)] * 4
    profile = recorded(str(path), test_offload.prompts()[:4], greedy)[1]
    placement = write(tmp_path, profile, 2, copies=1)
    with on_device(path, 2, offload, placement=placement, moe_collectives="shuffled") as llm:
        found, shuffled = test_offload.generate(llm), llm.stats().experts.group.shuffled_rows
    same(found, alone(path))
    assert shuffled > 0


@pytest.mark.slow
def test_ranks_that_share_each_expert(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["mixtral"]
    with on_device(path, 4, None, expert_tensor_parallel_size=2) as llm:
        same(test_offload.generate(llm), alone(path))


@pytest.mark.parametrize(
    ("offload", "line"),
    [
        (
            replace(test_offload.STAYS, schedule="on-demand"),
            "--offload-schedule: got 'on-demand'; allowed: cgopipe, s4, serial, s2, s3 with --fast-memory",
        ),
        (
            replace(test_offload.BESIDE, slow_cache=0.5),
            "slow_cache: got 0.5; allowed: 0, 1 with --fast-memory",
        ),
    ],
)
def test_what_a_group_does_not_carry_out_is_refused(
    checkpoints: dict[str, Path], offload: Offload, line: str
) -> None:
    with (
        sanitized(),
        pytest.raises(ConfigError) as raised,
        group_of_threads(str(checkpoints["qwen3"]), device="cuda", offload=offload, tensor_parallel_size=2),
    ):
        pass
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


def test_a_rank_sees_one_gpu_of_those_that_the_first_one_sees() -> None:
    def seen(visible: int, **environment: str) -> list[str]:
        return [one_gpu(rank, visible, environment)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]

    assert seen(4) == ["0", "1", "2", "3"]
    assert seen(2) == ["0", "1", "0", "1"], "two ranks each"
    assert seen(4, CUDA_VISIBLE_DEVICES="4,5,6,7") == ["4", "5", "6", "7"]
    assert seen(2, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,") == ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]


def test_the_processes_of_a_group_are_told_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = WorkerConfig(ModelConfig("model", device="cuda"), parallel=ParallelConfig(2))
    with sanitized():
        assert launcher.rank_environment(asked, 1)["CUDA_VISIBLE_DEVICES"] == "0", "there is one"
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        on_cpu = replace(asked, model=ModelConfig("model", device="cpu"))
        assert "CUDA_VISIBLE_DEVICES" not in launcher.rank_environment(on_cpu, 1)
