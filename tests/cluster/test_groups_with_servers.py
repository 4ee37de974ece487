"""Attention workers that are groups of processes, with the experts on servers: the bits of the group alone,
and the tokens of one process, through kills of ranks and of servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.cluster.launch import launch
from moesaic.config import ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.profile import Profile
from moesaic.testing import byte_tokenizer
from moesaic.trace.options import RecordConfig
from tests.cluster.test_groups import alone, same, soon
from tests.cluster.test_identity import workload as prompts_of_demo
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, Cluster, cluster
from tests.support.group_placements import write
from tests.support.processes import children, gone

pytestmark = pytest.mark.slow

NEW, LONGEST = 16, 160
FAMILIES = {
    "mixtral": ("mixtral", model_configs.mixtral(num_key_value_heads=2)),
    "deepseek lite": model_configs.CASES["deepseek-lite-yarn"],
    "qwen3-next": model_configs.CASES["qwen3-next"],
}
"""Key heads, latent attention, and layers that keep states."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "lockstep": {},
    "two in flight": {"inflight_batches": 2},
    "barrier": {"schedule": "barrier"},
    "async": {"schedule": "async"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "1 group, 1 server": {"expert_servers": 1},
    "1 group, 3 servers": {"expert_servers": 3},
    "2 groups, 2 servers, every expert twice": {
        "attention_workers": 2,
        "expert_servers": 2,
        "min_replicas": 2,
    },
    "2 groups beside their servers": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
CHUNKS = {"of 16": 16, "whole": 512}
COMBINE = ("exact", "partial")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    known: dict[str, str] = {}

    def saved(family: str) -> str:
        if family not in known:
            folder = tmp_path_factory.mktemp("model")
            tiny_models.save(tiny_models.build(*FAMILIES[family]), folder)
            byte_tokenizer(folder)
            known[family] = str(folder)
        return known[family]

    return saved


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    lengths = (140, 65, 64, 20, 140, 3)  # two begin alike, so one may reuse the other's blocks
    prompts = [tiny_models.prompt(n, model_configs.VOCAB, seed=i % 4) for i, n in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=NEW, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], str]) -> Callable[[str, int], list[Answer]]:
    """What one process says, or a group that holds its experts itself."""
    known: dict[tuple[str, int], list[Answer]] = {}

    def answers(family: str, ranks: int) -> list[Answer]:
        if (family, ranks) not in known:
            settings: dict[str, Any] = {"tensor_parallel_size": ranks} if ranks > 1 else {}
            model = LLM(checkpoint(family), threads=1, kv_cache_memory="64MiB", **settings)
            outputs = [completion.outputs[0] for completion in model.generate(*workload())]
            known[family, ranks] = [
                (one.token_ids, [entry.logprob for entry in one.logprobs or [] if entry]) for one in outputs
            ]
        return known[family, ranks]

    return answers


@pytest.mark.parametrize(
    ("family", "schedule", "shape", "chunks", "combine"),
    pairs.params(
        FAMILIES,
        SCHEDULES,
        SHAPES,
        CHUNKS,
        COMBINE,
        key=lambda case: (case[0], case[1], case[2].startswith("1"), *case[3:]),
    ),
)
def test_the_bits_of_the_group_alone(
    family: str,
    schedule: str,
    shape: str,
    chunks: str,
    combine: str,
    checkpoint: Callable[[str], str],
    reference: Callable[[str, int], list[Answer]],
) -> None:
    settings = SCHEDULES[schedule] | SHAPES[shape] | {"max_num_batched_tokens": CHUNKS[chunks]}
    path = checkpoint(family)
    with cluster(path, tensor_parallel_size=2, combine=combine, max_model_len=LONGEST, **settings) as served:
        served.submit(*workload())
        found = served.finish()
    same(found, reference(family, 1))
    if combine == "exact":
        assert found == reference(family, 2)


def ranks(served: Cluster) -> list[int]:
    """Process ids of the first group, the first rank first."""
    pid = served.pid("attention worker 0")
    return [pid, *children(pid)]


@pytest.mark.parametrize(
    ("victim", "schedule"),
    pairs.some(
        [(victim, schedule) for victim in ("first rank", "second rank", "server") for schedule in SCHEDULES],
        [
            ("first rank", "async"),
            ("second rank", "barrier"),
            ("server", "async"),
        ],
    ),
)
def test_a_process_dies_in_the_middle(
    victim: str,
    schedule: str,
    checkpoint: Callable[[str], str],
    reference: Callable[[str, int], list[Answer]],
) -> None:
    family = "mixtral" if victim == "server" else "qwen3-next"
    shape: dict[str, Any] = {"expert_servers": 2, "tensor_parallel_size": 2, "max_model_len": LONGEST}
    with cluster(checkpoint(family), **shape, **SCHEDULES[schedule]) as served:
        before: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 20 and not before:
                group = ranks(served)
                before.extend([served.pid("expert server 1")] if victim == "server" else group)
                os.kill(before[1 if victim == "second rank" else 0], signal.SIGKILL)

        served.submit(*workload())
        assert served.finish(disturb) == reference(family, 2)
        assert before and soon(lambda: all(map(gone, before)))
        assert soon(lambda: served.supervisor.report().counters.process_deaths == 1)


def test_a_frozen_rank_and_a_group_without_work_are_replaced(
    checkpoint: Callable[[str], str], reference: Callable[[str, int], list[Answer]]
) -> None:
    shape: dict[str, Any] = {"expert_servers": 1, "tensor_parallel_size": 2, "max_model_len": LONGEST}
    with cluster(checkpoint("mixtral"), **shape) as served:
        for deaths, signum in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            before = ranks(served)
            os.kill(before[1], signum)
            assert soon(lambda before=before: all(map(gone, before)))
            served.until(lambda n=deaths: served.supervisor.report().counters.process_deaths == n)  # type: ignore[misc]
            served.until(lambda: {one.stage for one in served.supervisor.status()} == {"serving"})
            assert not set(before) & set(ranks(served))
        served.submit(*workload())
        assert served.finish() == reference("mixtral", 2)
        served.until(lambda: served.stats.experts.group.all_gather_bytes > 0)


def test_affinity_sends_requests_to_groups_beside_their_experts(tmp_path: Path) -> None:
    """Data-parallel groups of tensor-parallel ranks, each beside the server of its experts."""
    expected, profile = alone("demo", NEW)
    shape = {"data_parallel_size": 2, "enable_expert_parallel": True, "tensor_parallel_size": 2}
    file = write(tmp_path, profile, units=2)
    with cluster(expert_servers=0, placement=file, **shape) as served:  # type: ignore[arg-type]
        served.submit(*prompts_of_demo(8, NEW))
        same(served.finish(), expected)
        report = served.supervisor.report()
        assert report.dispatch == "affinity" and report.counters.process_deaths == 0
        served.until(lambda: sum(served.stats.experts.local_pairs) > 0)


def test_trace_and_routing_are_recorded(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    trace, record = tmp_path / "trace.json", tmp_path / "profile.npz"
    worker = WorkerConfig(
        ModelConfig(checkpoint("mixtral"), threads=1),
        scheduler=SchedulerConfig(schedule="async"),
        trace=str(trace),
    )
    shape = ClusterConfig(expert_servers=2, tensor_parallel_size=2)
    recorded = RecordConfig(str(record), record_routing_share=1.0)
    with launch(worker, shape, seed=0, record=recorded) as launched:
        served = Cluster(launched)
        served.submit(*workload())
        served.finish()
    assert '"attention worker 0"' in trace.read_text()
    profile = Profile.load(record)
    assert profile.loads.sum() > 0
