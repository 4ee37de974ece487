"""A model larger than its fast memory: the floats of the one in memory, whatever the policy."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.core.offload import BlockNeeds, Choice, Division, DivisionPrices, Load, Offload
from moesaic.kernels import table
from moesaic.policy.offloading.dividing import Dividing
from moesaic.policy.scheduling.step_prices import StepPrices
from tests.support import model_configs, pairs, tiny_models
from tests.support.drafting import Oracle
from tests.support.tiny_checkpoints import MODELS, MORE, Written

NEW = 12
FAST = "qwen3-bias-dense-layers"
DISK = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=4, prefill_rows=19)
"""RAM over the checkpoint's disk."""
CORES = replace(DISK, link=4e9, slow_attention=True, slow_cache=1.0)
"""Two cores, and a link between them that nobody waits for."""
BESIDE = replace(CORES, slow_attention=False)
"""The same, attention on the fast core: the cache moves."""
CHOICES = Choice("on-demand", 1, 2, (1.0, 9.0)), Choice("cgopipe", 2, 0, (9.0, 1.0))
"""Two ways to compute decode steps: for few requests, and for many."""
PRICES = DivisionPrices((1, 8), (0.01, 0.02), 0.01, layers=4, num_experts=8, top_k=2)
"""With which experts have more memory than the cache, whatever it costs to read them."""
POLICIES = {
    "pages": DISK,
    "one micro-batch": replace(DISK, micro_batch=8, micro_batches=1, prefill_rows=200),
    "rows one by one": replace(DISK, micro_batch=1, micro_batches=8, prefill_rows=1),
    "some experts stay": replace(DISK, micro_batch=3, micro_batches=2, static_experts=2),
    "on demand": replace(DISK, schedule="on-demand", static_experts=1),
    "on demand, likely ones before": replace(DISK, schedule="on-demand", static_experts=1, likely_experts=2),
    "on demand, all likely ones before": replace(DISK, schedule="on-demand", likely_experts=99),
    "on demand, hot ones stay": replace(DISK, schedule="on-demand", static_experts=1, hot=True),
    "revised by the load": replace(
        DISK, static_experts=1, hot=True, loads=(Load(2, 64), Load(8, 64)), choices=CHOICES
    ),
    "divided by the load": replace(
        DISK, schedule="on-demand", static_experts=1, likely_experts=2, hot=True, division=PRICES
    ),
    "serial": replace(DISK, schedule="serial"),
    "s4": replace(DISK, schedule="s4"),
    "padded": replace(DISK, padded_prompt_len=84, prefill_rows=2 * 84),
    "padded less than the longest, one micro-batch": replace(
        DISK, micro_batch=8, micro_batches=1, padded_prompt_len=30
    ),
    "padded more than the longest, one by one": replace(
        DISK, micro_batch=1, padded_prompt_len=100, prefill_rows=1
    ),
    "padded, on demand": replace(
        DISK, schedule="on-demand", static_experts=1, micro_batch=3, padded_prompt_len=84
    ),
    "two cores": CORES,
    "two cores, some experts stay": replace(CORES, static_experts=2, micro_batch=3),
    "two cores, s2": replace(CORES, schedule="s2"),
    "two cores, s3": replace(CORES, schedule="s3"),
    "two cores, serial": replace(CORES, schedule="serial", fast_residual=False),
    "two cores, in place": replace(CORES, schedule="in-place", static_experts=1),
    "two cores, all in place": replace(CORES, schedule="in-place"),
    "two cores, the cache moves": BESIDE,
    "two cores, some of the cache moves": replace(BESIDE, slow_cache=0.6),
    "two cores, some of the cache moves, s4": replace(
        BESIDE, schedule="s4", static_experts=1, slow_cache=0.9
    ),
    "two cores, a little of the cache moves, padded": replace(BESIDE, padded_prompt_len=84, slow_cache=0.1),
    "two cores, the cache moves, s4": replace(BESIDE, schedule="s4", static_experts=1),
    "two cores, the cache moves, on demand": replace(BESIDE, schedule="on-demand"),
    "two cores, the cache moves, in place": replace(BESIDE, schedule="in-place", static_experts=1),
}
CASES = pairs.params(
    MODELS, ("as weights", "int8"), POLICIES, (23, 512),
    key=lambda case: (case[0].startswith("deepseek"), *case[1:]),
    fast=[(FAST, "as weights", "pages", 23), (FAST, "as weights", "two cores", 512)],
) + pairs.params(
    MORE, ("as weights",),
    ("pages", "padded, on demand", "two cores, the cache moves", "revised by the load",
     "divided by the load"), (23,),
)  # fmt: skip
needs_native = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")


def prompts() -> list[list[int]]:
    """Around block boundaries, past windows; two share 60 tokens; more of them than seats."""
    drawn = [
        tiny_models.prompt(length, model_configs.VOCAB, seed=length)
        for length in (1, 16, 17, 40, 84, 5, 9, 33)
    ]
    return [*drawn, drawn[4][:60] + drawn[1]]


def params(index: int) -> SamplingParams:
    """Of different lengths, so that requests leave and join; every second one is sampled."""
    temperature = 0.8 if index % 2 else 0.0
    length = NEW - index % 3
    return SamplingParams(temperature=temperature, seed=index, max_tokens=length, logprobs=3, ignore_eos=True)


def floats(output: RequestOutput) -> Any:
    """Tokens and every log-probability."""
    return output.token_ids, [(one.token_id, one.logprob, one.top) for one in output.logprobs or () if one]


class Checkpoints:
    """And their answers from memory, once a test asks."""

    def __init__(self, written: Written) -> None:
        self.paths = written
        self._wanted: dict[tuple[str, str], list[Any]] = {}

    def wanted(self, name: str, cache: str) -> list[Any]:
        if (name, cache) not in self._wanted:
            self._wanted[name, cache] = answers(self.paths[name], cache)
        return self._wanted[name, cache]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(Written(tmp_path_factory.mktemp))


def answers(path: Path, cache: str, **settings: Any) -> list[Any]:
    llm = LLM(str(path), threads=1, kv_cache_dtype=cache, max_model_len=128, **settings)
    results = llm.generate(prompts(), [params(i) for i in range(len(prompts()))])
    return [floats(result.outputs[0]) for result in results]


@needs_native
@pytest.mark.parametrize(("name", "cache", "policy", "rows"), CASES)
def test_every_logprob_is_the_same_float_under_every_policy(
    checkpoints: Checkpoints, name: str, cache: str, policy: str, rows: int
) -> None:
    """cache: of which type. rows: of a step, so that prompts come in chunks or whole."""
    offload, cache = POLICIES[policy], (MODELS | MORE)[name] if cache == "as weights" else cache
    seats = {"max_num_seqs": offload.batch, "max_num_batched_tokens": rows}
    found = answers(checkpoints.paths[name], cache, offload=offload, **seats)
    assert found == checkpoints.wanted(name, cache)


@needs_native
def test_hot_experts_stay_and_the_load_revises_the_plan(checkpoints: Checkpoints) -> None:
    """Requests leave one after another, so the last steps have few of them."""
    offload = POLICIES["revised by the load"]
    seats = {"max_num_seqs": offload.batch, "max_num_batched_tokens": 512}
    llm = LLM(str(checkpoints.paths[FAST]), threads=1, max_model_len=128, offload=offload, **seats)
    lengths = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (30, 30, *[6] * 7)]
    llm.generate(prompts(), lengths)
    found = llm.stats().experts
    assert found.plan.revisions >= 1 and found.plan.paged_steps and found.plan.on_demand_steps
    assert found.residency.exchanges >= 1 and 0 < found.residency.hits < found.residency.chosen
    assert found.residency.loaded_bytes > 0 and found.residency.held_bytes > 0


class Wavering(Dividing):
    """Takes another division before each step, at random among those that keep what is admitted."""

    def choose(self, now: float, needs: BlockNeeds) -> Division:
        blocks = needs.running_blocks if needs.running else sum(needs.waiting[:1])
        allowed = [one for one in self._divisions if one.num_blocks >= max(blocks, needs.used_end)]
        self._now = self._divisions.index(random.Random(now).choice(allowed or self._divisions[:1]))
        return self.division


@needs_native
@pytest.mark.parametrize("name", pairs.some(MODELS, [FAST]))
@pytest.mark.parametrize("policy", ["divided by the load", "divided, with pages"])
def test_experts_that_give_way_at_every_step_change_no_float(
    checkpoints: Checkpoints, name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.runtime.offloaded_worker.Dividing", Wavering)
    offload = POLICIES["divided by the load"]
    if policy == "divided, with pages":
        offload = replace(offload, schedule="cgopipe", likely_experts=0)
    seats = {"max_num_seqs": offload.batch, "max_num_batched_tokens": 23}
    llm = LLM(str(checkpoints.paths[name]), threads=1, max_model_len=128, offload=offload, **seats)
    results = llm.generate(prompts(), [params(i) for i in range(len(prompts()))])
    assert [floats(result.outputs[0]) for result in results] == checkpoints.wanted(name, "auto")
    assert llm.stats().experts.plan.divisions > 3


@needs_native
@pytest.mark.parametrize(
    ("name", "policy"),
    pairs.params(
        MODELS,
        ("pages", "on demand, hot ones stay", "revised by the load", "divided by the load", "two cores",
         "two cores, the cache moves", "rows one by one"),
        fast=[(FAST, "on demand, hot ones stay")],
    ),
)  # fmt: skip
def test_drafts_share_the_experts_of_a_pass_and_change_no_float(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, name: str, policy: str
) -> None:
    cache, offload = MODELS[name], POLICIES[policy]
    wanted = checkpoints.wanted(name, cache)
    known = [(prompt, one[0]) for prompt, one in zip(prompts(), wanted, strict=True)]
    monkeypatch.setattr("moesaic.runtime.drafting.make_drafter", lambda config: Oracle(known, 0.8))
    monkeypatch.setattr(StepPrices, "record_duration", lambda self, rows, seconds: None)
    monkeypatch.setattr("moesaic.runtime.drafting.StepPrices", lambda work: StepPrices(lambda rows: 1.0))
    llm = LLM(
        str(checkpoints.paths[name]), threads=1, kv_cache_dtype=cache, max_model_len=128, offload=offload,
        max_num_seqs=offload.batch, max_num_batched_tokens=64,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    results = llm.generate(prompts(), [params(i) for i in range(len(prompts()))])
    assert [floats(result.outputs[0]) for result in results] == wanted
    counts, passes = llm.stats().speculation, llm.stats().experts.passes
    if policy == "rows one by one":
        assert counts.drafts == 0, "a pass has room for one row"
        return
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    decodes = [one for one in passes if not one.prefill]
    assert sum(one.rows for one in decodes) > sum(one.passes * one.sequences for one in decodes)


@needs_native
def test_requests_that_are_preempted_come_back(checkpoints: Checkpoints) -> None:
    """The cache has room for two of the longest requests, and eight run."""
    offload, path = POLICIES["revised by the load"], checkpoints.paths[FAST]
    seats = {"max_num_seqs": offload.batch, "max_num_batched_tokens": 512}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    wanted = LLM(str(path), threads=1, max_model_len=128).generate(prompts(), params)
    size = str(LLM(str(path), threads=1, max_model_len=128, max_num_seqs=2).info.kv_bytes)
    llm = LLM(str(path), threads=1, max_model_len=128, offload=offload, kv_cache_memory=size, **seats)
    found = llm.generate(prompts(), params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
    assert llm.stats().preemptions > 0
