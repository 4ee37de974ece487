"""Every model type under every schedule, in a cover of all pairs of settings: the bits of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from moesaic import LLM, SamplingParams
from moesaic.cluster import launcher
from moesaic.cluster.local import ChildProcess
from moesaic.config import ExpertServerConfig
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import PATIENCE, Answer, Cluster, cluster
from tests.support.faulty_transport import Faults
from tests.support.faulty_worker import faulty

pytestmark = pytest.mark.slow

NEW, LONGEST = 20, 128
FACTORS: dict[str, dict[str, Any]] = {
    "model": {
        "mixtral, k 2, window": model_configs.CASES["mixtral-window"],
        "mixtral, k 1": ("mixtral", model_configs.mixtral(num_experts_per_tok=1)),
        "qwen3, k 8": ("qwen3_moe", model_configs.qwen3(num_experts_per_tok=8)),
        "qwen3, dense layers": model_configs.CASES["qwen3-bias-dense-layers"],
        "deepseek lite": model_configs.CASES["deepseek-lite-yarn"],
        "deepseek, k 6": ("deepseek_v2", model_configs.deepseek(num_experts_per_tok=6)),
    },
    "schedule": {
        "lockstep": {},
        "two in flight": {"inflight_batches": 2},
        "barrier": {"schedule": "barrier"},
        "auto": {"schedule": "auto"},
        "defrag": {"schedule": "async"},
        "mtfs": {"schedule": "async", "queue_policy": "mtfs"},
        "flfs": {"schedule": "async", "queue_policy": "flfs"},
    },
    "processes": {
        "1 and 1": {"attention_workers": 1, "expert_servers": 1},
        "1 and 3": {"attention_workers": 1, "expert_servers": 3},
        "2 and 2, twice": {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2},
        "3 and 2, one more": {"attention_workers": 3, "expert_servers": 2, "redundant_experts": 1},
    },
    "chunks": {"of 16": {"max_num_batched_tokens": 16}, "whole": {"max_num_batched_tokens": 512}},
    "cache": {"large": False, "of one request": True},
    "cancelled": {"none": (), "two": (2, 4)},
    "combine": {"exact": {}, "partial": {"combine": "partial"}},
    "kernels": {"native": "auto", "torch": "reference"},
    "transport": {
        "shm": {"transport": "shm"},
        "socket": {"transport": "socket"},
        "tcp": {},  # see `reached`
        "faulty": {},  # see `badly`
    },
}
FAULTS = Faults(delay=0.3, duplicate=0.2, reorder=True, cut_after=30)
"""Those that no replica is needed for."""
DROPPING = replace(FAULTS, drop_request=0.02, drop=0.001)
"""What got lost is asked for again, of another server; at a barrier nobody can know that it got lost."""
LOSING = ("qwen3, k 8", "defrag", "2 and 2, twice", "of 16", "large", "none", "exact", "native", "faulty")
"""Beside the cover: rows of single tokens that get lost."""
MORE = {
    "olmoe": model_configs.CASES["olmoe-clip-bias-gqa"],
    "qwen2": model_configs.CASES["qwen2-dense-layers-plain"],
    "gpt-oss": model_configs.CASES["gpt-oss"],
    "qwen3-next": model_configs.CASES["qwen3-next"],
    "lfm2": model_configs.CASES["lfm2"],
}
"""Families beside the cover, each once."""
ONCE = [
    ("olmoe", "mtfs", "1 and 3", "of 16", "large", "none", "exact", "native", "shm"),
    ("qwen2", "two in flight", "1 and 1", "of 16", "large", "none", "exact", "native", "tcp"),
    ("qwen3-next", "defrag", "2 and 2, twice", "of 16", "large", "two", "exact", "native", "shm"),
    ("qwen3-next", "two in flight", "1 and 3", "of 16", "large", "none", "exact", "native", "socket"),
    ("lfm2", "defrag", "1 and 3", "of 16", "large", "two", "exact", "native", "shm"),
]
OTHERS = [
    pytest.param((model, *choices), marks=pairs.REST)
    for model in ("gpt-oss", "qwen3-next", "lfm2")
    for choices in (
        ("defrag", "3 and 2, one more", "of 16", "large", "none", "partial", "native", "socket"),
        ("barrier", "2 and 2, twice", "of 16", "large", "none", "exact", "native", "tcp"),
        ("two in flight", "1 and 3", "whole", "large", "two", "exact", "torch", "shm"),
        ("mtfs", "1 and 1", "whole", "large", "none", "exact", "native", "faulty"),
        ("flfs", "1 and 3", "of 16", "large", "none", "exact", "torch", "tcp"),
    )
]
"""Families whose experts have biases, or whose layers keep states, under every schedule."""


ALIKE = {"3 and 2, one more": "2 and 2, twice", "mtfs": "defrag", "flfs": "defrag"}


def every_pair() -> list[Any]:
    """Choices, one of each factor, in which every pair of choices of two factors occurs.

    Where a model counts as its type, a policy of queues as any other one, and processes as whether an expert
    has copies and a worker has neighbours, fewer are enough; the rest is of the full matrices.
    """
    cases = pairs.cover(*FACTORS.values())
    models = list(FACTORS["model"])
    few = pairs.thinned(
        cases,
        lambda case: (models.index(case[0]) // 2, *(ALIKE.get(one, one) for one in case[1:])),
        spread=True,
    )
    return [pytest.param(case, marks=() if case in few else pairs.REST) for case in cases]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, (kind, options) in (FACTORS["model"] | MORE).items():
        paths[name] = tiny_models.save(tiny_models.build(kind, options), tmp_path_factory.mktemp("model"))
        byte_tokenizer(paths[name])
    return paths


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 15, 16, 33, 70)]
    params = [
        SamplingParams(max_tokens=NEW, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    return prompts, params


def reached(transport: str, faults: Faults) -> AbstractContextManager[object]:
    """Around the start of the processes: how workers reach servers where no setting says it."""
    if transport == "tcp":
        return patch("moesaic.cluster.launcher.spawn_server", over_tcp(launcher.spawn_server))
    return faulty(faults, seed=7) if transport == "faulty" else nullcontext()


def over_tcp(spawn: Callable[[ExpertServerConfig], ChildProcess]) -> Callable[..., ChildProcess]:
    return lambda config: spawn(replace(config, address="tcp:127.0.0.1:0"))


def drive(served: Cluster, cancelled: tuple[int, ...]) -> list[Answer]:
    """The answers; those of `cancelled` as far as they came: one that has a few tokens, one soon after."""
    served.submit(*workload())
    for number, after in zip(cancelled, (3, 0), strict=False):
        served.until(lambda n=number, most=after: len(served.running.answers[n][0]) >= most)  # type: ignore[misc]
        served.cancel(number)
    return served.finish()


def lose(served: Cluster) -> None:
    """Go on until something got lost and was asked for again. Which calls there are depends on the moment."""
    until = time.monotonic() + PATIENCE
    while not served.supervisor.report().counters.resent_pairs:
        assert time.monotonic() < until, f"nothing was asked for again: {served.supervisor.report()}"
        served.submit(*workload())
        served.finish()


@pytest.mark.parametrize("case", [*every_pair(), LOSING, *ONCE, *OTHERS], ids=", ".join)
def test_the_bits_of_one_process(case: tuple[str, ...], checkpoints: dict[str, Path]) -> None:
    name, schedule, processes, chunks, cache, cancel, combine, kernels, transport = case
    path, picked = str(checkpoints[name]), FACTORS["kernels"][kernels]
    model = LLM(path, threads=1, max_model_len=LONGEST, kernels=picked, kv_cache_memory="8MiB")
    expected: list[Answer] = []
    for completion in model.generate(*workload()):
        [output] = completion.outputs
        expected.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    blocks = LONGEST // model.info.block_size if FACTORS["cache"][cache] else model.info.num_blocks
    settings = FACTORS["schedule"][schedule] | FACTORS["processes"][processes] | FACTORS["chunks"][chunks]
    settings |= FACTORS["transport"][transport] | FACTORS["combine"][combine]
    memory = f"{blocks * model.info.kv_bytes // model.info.num_blocks}B"
    cancelled = FACTORS["cancelled"][cancel]
    dropping = "min_replicas" in settings and schedule != "barrier"
    with (
        reached(transport, DROPPING if dropping else FAULTS),
        cluster(path, kernels=picked, kv_cache_memory=memory, max_model_len=LONGEST, **settings) as served,
    ):
        found = drive(served, cancelled)
        if dropping and transport == "faulty":
            lose(served)
        report = served.supervisor.report()
    counted = report.counters
    assert counted.process_deaths == 0
    servers = [one.address.partition(":")[0] for one in report.processes if one.role == "expert server"]
    assert set(servers) == {"tcp" if transport == "tcp" else "unix"}
    assert not cancelled or len(found[cancelled[0]][0]) < NEW
    for number in cancelled:
        length = len(found[number][0])
        expected[number] = (expected[number][0][:length], expected[number][1][:length])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    if (kernels, combine) == ("native", "exact"):  # torch's sums depend on the rows beside
        assert found == expected
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-3 if name == "qwen3-next" else 1e-4)
