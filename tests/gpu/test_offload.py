"""A model larger than the memory of a GPU, on the sanitizer's device: the tokens of the one in memory."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import gpu_cases, pairs, tiny_models
from tests.support import model_configs as model_cases
from tests.support.gpu_sanitizer import NAME, TAKEN, sanitized
from tests.support.model_configs import VOCAB

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.config import ModelConfig, OffloadConfig, OffloadSchedule, WorkerConfig
from moesaic.core.curves import Curve
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload, SplitPrices
from moesaic.cost.machines import MACHINES
from moesaic.planning import USABLE, Job, plan
from moesaic.policy.offloading.pricing import Pricing
from moesaic.testing import byte_tokenizer

NEW = 5
STAYS = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=4, prefill_rows=19)
"""The cache is on the GPU."""
BESIDE = replace(STAYS, slow_cache=1.0)
"""It is in RAM, and comes down for attention on the GPU."""
PADDED = 64
CPU = replace(BESIDE, slow_attention=True)
"""The CPU attends to it."""
EVEN = SplitPrices(1.0, Curve(((1, 0.1),)), Curve(((1, 0.8), (4, 1.5))))
"""Some of the experts that are not on the GPU are loaded."""
SLOW_LINK = SplitPrices(3.0, Curve(((1, 0.1),)), Curve(((1, 0.4), (4, 2.0))))
POLICIES = {
    "the cache stays": STAYS,
    "the cache stays, some experts too": replace(STAYS, static_experts=2, micro_batch=3),
    "the cache stays, one micro-batch": replace(STAYS, micro_batch=8, micro_batches=1, prefill_rows=200),
    "the cache stays, on demand": replace(STAYS, schedule="on-demand", static_experts=1, likely_experts=2),
    "the cache stays, serial": replace(STAYS, schedule="serial"),
    "the cache moves": BESIDE,
    "the cache moves, s4": replace(BESIDE, schedule="s4", static_experts=1),
    "the cache moves, rows too": replace(BESIDE, fast_residual=False),
    "the cache moves, in place": replace(BESIDE, schedule="in-place", static_experts=1),
    "the CPU attends": CPU,
    "the CPU attends, some experts stay": replace(CPU, static_experts=2),
    "the CPU attends, s2": replace(CPU, schedule="s2"),
    "the CPU attends, s3": replace(CPU, schedule="s3"),
    "the CPU attends, serial": replace(CPU, schedule="serial", fast_residual=False),
    "the CPU attends, on demand": replace(CPU, schedule="on-demand"),
    "the CPU attends, in place": replace(CPU, schedule="in-place"),
    "the cache stays, padded": replace(STAYS, padded_prompt_len=PADDED, prefill_rows=2 * PADDED),
    "the cache moves, padded": replace(
        BESIDE, padded_prompt_len=PADDED, prefill_rows=PADDED, static_experts=1
    ),
    "the CPU attends, padded": replace(CPU, padded_prompt_len=PADDED, prefill_rows=PADDED),
    "the cache stays, hot experts": replace(
        STAYS, schedule="on-demand", static_experts=3, likely_experts=1, hot=True
    ),
    "the cache stays, split": replace(STAYS, schedule="split", static_experts=2, prices=EVEN, hot=True),
    "the cache moves, split, most on the CPU": replace(BESIDE, schedule="split", prices=SLOW_LINK),
    "the CPU attends, split": replace(CPU, schedule="split", static_experts=1, prices=EVEN),
    "the CPU attends, one by one": replace(CPU, micro_batch=1, micro_batches=8, prefill_rows=5),
}
CASES = pairs.params(
    gpu_cases.MODELS, POLICIES, ("auto", "reference"), (23, 512),
    key=lambda case: (case[0].startswith("deepseek"), case[1]),
)  # fmt: skip
"""A policy meets keys and values, and latent attention: the models of either take turns, and the rest too."""


def prompts() -> list[list[int]]:
    """Around block boundaries, past windows; two share 40 tokens; more of them than seats."""
    drawn = [tiny_models.prompt(length, VOCAB, seed=length) for length in (1, 16, 17, 40, 60, 5, 9)]
    return [*drawn, drawn[4][:40] + drawn[1], drawn[3][:3]]


def answers(path: Path, rows: int = 23, **settings: Any) -> tuple[LLM, list[RequestOutput]]:
    llm = LLM(str(path), threads=1, max_model_len=80, max_num_batched_tokens=rows, max_num_seqs=8, **settings)
    return llm, generate(llm)


@functools.cache
def wanted(path: Path, rows: int) -> list[RequestOutput]:
    """What one process answers on a CPU with all in memory."""
    return answers(path, rows, device="cpu", kernels="reference")[1]


def generate(llm: LLM) -> list[RequestOutput]:
    asked = [
        SamplingParams(
            temperature=0.8 if index % 2 else 0.0, seed=index, max_tokens=NEW - index % 3, logprobs=2,
            ignore_eos=True,
        )
        for index in range(len(prompts()))
    ]  # fmt: skip
    return [one.outputs[0] for one in llm.generate(prompts(), asked)]


@pytest.mark.parametrize(("model", "policy", "kernels", "rows"), CASES)
def test_tokens_are_those_of_the_model_in_memory(
    written: Callable[[str], Path], model: str, policy: str, kernels: str, rows: int
) -> None:
    """kernels: of the CPU beside the GPU. rows: of a step, so that prompts come in chunks or whole."""
    path = written(model)
    with sanitized():
        llm, found = answers(path, rows, device="cuda", kernels=kernels, offload=POLICIES[policy])
    assert llm.info.device == NAME
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted(path, rows)]
    for one, other in zip(found, wanted(path, rows), strict=True):
        assert [entry.logprob for entry in one.logprobs or []] == pytest.approx(
            [entry.logprob for entry in other.logprobs or []], abs=1e-4
        )


@pytest.mark.parametrize(
    ("offload", "line"),
    [
        (replace(CPU, link=1e9), "--device: got 'cuda'; allowed: cpu with a link between two cores"),
        (replace(CPU, schedule="s4"), "slow_attention: got True; allowed: False with s4"),
        (
            replace(STAYS, schedule="split"),
            "prices: got None; allowed: prices with split, and nothing with others",
        ),
        (replace(BESIDE, schedule="s2"), "slow_attention: got False; allowed: True with s2"),
    ],
)
def test_what_a_gpu_does_not_carry_out_is_refused(
    written: Callable[[str], Path], offload: Offload, line: str
) -> None:
    with sanitized(), pytest.raises(ConfigError) as raised:
        LLM(str(written("mixtral-window")), device="cuda", offload=offload)
    assert str(raised.value) == line


LARGE = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16, "num_hidden_layers": 4}
LONG = {**LARGE, "max_position_embeddings": 1100}
WIDE_CACHE = {"num_key_value_heads": 6, "head_dim": 64}
JOB = Job(requests=9, prompt=30, generate=NEW, longest=80)


SCHEDULES = ("auto", "cgopipe", "in-place", "on-demand", "s2", "s3", "s4", "serial", "split")


PLANNED = [
    *((schedule, 8 if index % 2 else 13, False) for index, schedule in enumerate(SCHEDULES)),
    *((schedule, 8, True) for schedule in ("cgopipe", "s2")),
]
NOW = [case for case in PLANNED if case[2] or case[0] in ("auto", "in-place", "on-demand", "s4")]


@pytest.mark.parametrize(("schedule", "cap", "pad"), pairs.some(PLANNED, NOW))
def test_a_planned_run_keeps_to_the_memory_that_it_may_take(
    tmp_path: Path, schedule: OffloadSchedule, cap: int, pad: bool
) -> None:
    """Experts of 12 MiB."""
    path = tiny_models.save(tiny_models.build("qwen3_moe", model_cases.qwen3(**LARGE)), tmp_path)
    byte_tokenizer(path)
    options = OffloadConfig(f"{cap}MiB", offload_schedule=schedule, pad=pad)
    job = replace(JOB, padded_length=max(map(len, prompts()))) if pad else JOB
    worker = plan(WorkerConfig(ModelConfig(str(path))), options, job, MACHINES["l4"], gpus=1).worker
    offload, scheduler = worker.offload, worker.scheduler
    assert offload is not None
    settings: dict[str, Any] = {
        "kv_cache_memory": worker.cache.kv_cache_memory,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": worker.model.max_model_len,
        "enable_prefix_caching": worker.cache.enable_prefix_caching,
    }
    with sanitized():
        gc.collect()  # what other tests took
        before = TAKEN.begin()
        llm = LLM(str(path), device="cuda", threads=1, offload=offload, **settings)
        found = generate(llm)
        most = TAKEN.most - before
    assert most <= cap << 20
    wanted = generate(LLM(str(path), device="cpu", kernels="reference", threads=1, **settings))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


@dataclass(frozen=True)
class Prompts:
    """A job whose prompts differ from those that were planned for."""

    lengths: list[int]
    news: list[int]
    """Tokens that each generates."""
    cap: str = "10MiB"
    padded: int | None = None
    shared: int = 0
    """Tokens that all begin with; they are known when all come a second time."""
    wide: bool = False
    """The cache is most of what is held."""

    @property
    def mean(self) -> int:
        return sum(self.lengths) // len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths) + max(self.news)

    def job(self) -> Job:
        return Job(len(self.lengths), self.mean, max(self.news), self.longest, self.padded)

    def generate(self, llm: LLM) -> None:
        asked = [tiny_models.prompt(length, VOCAB, seed=seed) for seed, length in enumerate(self.lengths)]
        asked = [asked[0][: self.shared] + each[self.shared :] for each in asked]
        params = [SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True) for new in self.news]
        for turn in range(1 + bool(self.shared)):
            llm.generate([[*each[:-1], turn] for each in asked], params)


KINDS = {
    "many prompts": Prompts([120] * 24, [2] * 24),
    "one long prompt": Prompts([12] * 31 + [700], [2] * 32),
    "shared prefixes": Prompts([120] * 24, [2] * 24, shared=112),
    "padding": Prompts(
        [300] + [12] * 31, [2 + index % 8 * 4 for index in range(32)], "24MiB", padded=300, wide=True
    ),
}


PLACES = list(itertools.product(KINDS, (True, False), (True, False)))
PLACES_NOW = [
    ("many prompts", False, False),
    ("one long prompt", True, False),
    ("shared prefixes", False, True),
    ("padding", True, True),
]
"""They have every kind, and every pair of places of the cache and the rows."""


@pytest.mark.parametrize(("kind", "slow_attention", "residual"), pairs.some(PLACES, PLACES_NOW))
def test_prompts_of_any_kind_take_no_more_than_was_planned(
    tmp_path: Path, kind: str, slow_attention: bool, residual: bool
) -> None:
    """Where the cache, and perhaps the rows, are in RAM: the GPU has those of two micro-batches."""
    case = KINDS[kind]
    model = model_cases.qwen3(**LONG, **(WIDE_CACHE if case.wide else {}))
    path = tiny_models.save(tiny_models.build("qwen3_moe", model), tmp_path)
    byte_tokenizer(path)
    options = OffloadConfig(
        case.cap, offload_schedule="cgopipe", micro_batch_size=8, pad=case.padded is not None
    )
    planned = plan(WorkerConfig(ModelConfig(str(path))), options, case.job(), MACHINES["l4"], gpus=1)
    assert planned.worker.offload is not None
    pricing = Pricing(planned.model, planned.hardware, planned.price.workload)
    policy = replace(
        planned.price.policy, slow_attention=slow_attention, slow_cache=1.0, fast_residual=residual
    )
    rows = case.padded or case.mean
    offload = replace(
        planned.worker.offload, slow_attention=slow_attention, slow_cache=1.0, fast_residual=residual,
        prefill_rows=pricing.footprint.prefill_requests(policy) * rows,
    )  # fmt: skip
    held = sum(pricing.footprint.fast(policy).values()) + 2 * case.longest * planned.model.cache(1, 4.0)
    with sanitized():
        gc.collect()
        before = TAKEN.begin()
        llm = LLM(
            str(path), device="cuda", threads=1, offload=offload, max_num_seqs=policy.batch,
            max_num_batched_tokens=policy.batch * rows, max_model_len=case.longest, kv_cache_memory="256MiB",
        )  # fmt: skip
        case.generate(llm)
        most = TAKEN.most - before
    assert most <= held / USABLE
