"""Drafted tokens in a cluster: the bits of one process without drafts, also while processes are killed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any, get_args

import pytest

from moesaic import LLM, SamplingParams
from moesaic.config import Schedule
from tests.cluster.test_identity import alone
from tests.support import pairs, prediction
from tests.support.cluster_driver import Cluster, cluster

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
SHAPES: dict[str, dict[str, Any]] = {
    "2 workers, 2 servers, chunks": {
        "attention_workers": 2,
        "expert_servers": 2,
        "min_replicas": 2,
        "max_num_batched_tokens": 16,
    },
    "two batches in flight": {"expert_servers": 2, "inflight_batches": 2},
    "barrier": {"schedule": "barrier", "attention_workers": 2, "expert_servers": 2},
    "async": {"schedule": "async", "attention_workers": 2, "expert_servers": 3, "queue_policy": "mtfs"},
    "async, chunks": {"schedule": "async", "expert_servers": 2, "max_num_batched_tokens": 16},
}


RANKS = {"expert_servers": 0, "tensor_parallel_size": 2}
"""Which add up numbers in another order than one process."""


def repetitive() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat a phrase, and answers of few different tokens, of which some are penalised."""
    numbers = random.Random(3)
    prompts = [[numbers.randrange(300, 900) for _ in range(4 + i)] * 3 for i in range(8)]
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=0.6 * (i % 2),
            seed=i,
            logprobs=0,
            ignore_eos=True,
            allowed_token_ids=prompts[i][:3],
            presence_penalty=0.2 * (i % 3),
        )
        for i in range(8)
    ]
    return prompts, params


def accepted(served: Cluster) -> None:
    """Waits for the statistics to say so."""
    served.until(lambda: served.stats.speculation.accepted_tokens > 0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_as_without_drafts(shape: str) -> None:
    with cluster(**SHAPES[shape], speculative_config=NGRAM) as served:
        served.submit(*repetitive())
        assert served.finish() == alone(*repetitive())
        accepted(served)


@pytest.mark.slow
def test_ranks_have_the_same_bits_as_without_drafts() -> None:
    found = []
    for drafting in (None, NGRAM):
        with cluster(**RANKS, speculative_config=drafting) as served:  # type: ignore[arg-type]
            served.submit(*repetitive())
            found.append(served.finish())
            if drafting is not None:
                accepted(served)
    assert found[0] == found[1]


@pytest.mark.parametrize("schedule", pairs.some(get_args(Schedule), ["barrier", "async"]))
def test_the_same_bits_through_kills(schedule: str) -> None:
    killed: list[str] = []
    shape = {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2}
    with cluster(schedule=schedule, **shape, speculative_config=NGRAM) as served:  # type: ignore[arg-type]
        served.connected()

        def kill(tokens: int) -> None:
            for name, after in (("expert server 0", 40), ("attention worker 0", 120)):
                if tokens >= after and name not in killed:
                    killed.append(name)
                    os.kill(served.pid(name), signal.SIGKILL)

        served.submit(*repetitive())
        assert served.finish(kill) == alone(*repetitive())
        accepted(served)
    assert len(killed) == 2


@pytest.mark.slow
def test_the_layer_of_the_model_drafts_in_workers_of_one_process(tmp_path: Path) -> None:
    """Tokens of a killed worker go on at the other one."""
    path, killed = str(prediction.save("glm4_moe", tmp_path / "glm", strength=0.004)), list[str]()
    numbers = random.Random(5)
    prompts = [[numbers.randrange(1, prediction.VOCAB) for _ in range(4 + i)] for i in range(6)]
    params = [SamplingParams(max_tokens=60, temperature=0.0, logprobs=0, ignore_eos=True) for _ in prompts]
    found = []
    for drafting in (None, MTP):
        shape = {"expert_servers": 0, "attention_workers": 2}
        with cluster(path, **shape, speculative_config=drafting) as served:  # type: ignore[arg-type]

            def kill(tokens: int, served: Cluster = served, drafting: str | None = drafting) -> None:
                if drafting is not None and tokens >= 60 and not killed:
                    killed.append("attention worker 0")
                    os.kill(served.pid(killed[0]), signal.SIGKILL)

            served.submit(prompts, params)
            found.append(served.finish(kill))
            if drafting is not None:
                accepted(served)
    assert found[0] == found[1] and killed


def of_one_process(path: str) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts, their parameters, and the tokens of one process without drafts."""
    numbers = random.Random(7)
    prompts = [[numbers.randrange(1, prediction.VOCAB) for _ in range(18 + i)] for i in range(6)]
    params = [
        SamplingParams(max_tokens=40, temperature=0.7 * (i % 2), seed=i, logprobs=0, ignore_eos=True)
        for i in range(6)
    ]
    model = LLM(path, threads=1, kv_cache_memory="64MiB")
    return prompts, params, [one.outputs[0].token_ids for one in model.generate(prompts, params)]


@pytest.mark.slow
def test_the_layer_of_the_model_drafts_with_servers_ranks_and_prefill_workers(tmp_path: Path) -> None:
    path = str(prediction.save("deepseek_v3", tmp_path / "deepseek", strength=0.004))
    prompts, params, expected = of_one_process(path)
    shape = {"expert_servers": 2, "tensor_parallel_size": 2, "prefill_workers": 1}
    with cluster(path, **shape, speculative_config=MTP) as served:  # type: ignore[arg-type]
        served.submit(prompts, params)
        assert [tokens for tokens, _ in served.finish()] == expected
        accepted(served)


@pytest.mark.full
def test_the_layer_of_the_model_drafts_with_experts_that_servers_load(tmp_path: Path) -> None:
    path = str(prediction.save("glm4_moe", tmp_path / "glm", strength=0.004))
    prompts, params, expected = of_one_process(path)
    with cluster(path, redundant_experts=2, server_memory=1 << 20, speculative_config=MTP) as served:
        served.submit(prompts, params)
        assert [tokens for tokens, _ in served.finish()] == expected
        accepted(served)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_the_layer_of_the_model_drafts_through_a_killed_server(
    schedule: str, ranks: int, tmp_path: Path
) -> None:
    path, killed = str(prediction.save("glm4_moe", tmp_path / "glm", strength=0.004)), list[str]()
    prompts, params, expected = of_one_process(path)
    shape = {"expert_servers": 2, "min_replicas": 2, "tensor_parallel_size": ranks, "attention_workers": 2}
    with cluster(path, schedule=schedule, **shape, speculative_config=MTP) as served:  # type: ignore[arg-type]
        served.connected()

        def kill(tokens: int) -> None:
            if tokens >= 40 and not killed:
                killed.append("expert server 0")
                os.kill(served.pid(killed[0]), signal.SIGKILL)

        served.submit(prompts, params)
        assert [tokens for tokens, _ in served.finish(kill)] == expected
        accepted(served)
    assert killed
