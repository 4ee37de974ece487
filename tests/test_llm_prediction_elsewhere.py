"""Drafts by a checkpoint's own layer (`mtp`) with its experts on servers, or its heads on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from moesaic import LLM, SamplingParams
from moesaic.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.metrics import SpeculationStats
from moesaic.core.placement import Placement
from moesaic.policy.scheduling.step_prices import StepPrices
from moesaic.runtime.group.owners import read_owners
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.runtime.worker import Worker
from tests.support import prediction, tiny_models
from tests.support.prediction import VOCAB
from tests.support.served_worker import generated, server
from tests.support.thread_groups import Threads, group_of_threads

MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
NEW = 24
COMMON = tiny_models.prompt(20, VOCAB, seed=9)
PROMPTS = [[*COMMON, 5, 6, 7], [*COMMON, 8], tiny_models.prompt(9, VOCAB), [3]]
RULES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.7, top_p=0.95, seed=5, max_tokens=NEW, ignore_eos=True),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "lockstep": {},
    "two batches": {"inflight_batches": 2},
    "barrier": {"schedule": "barrier"},
    "async": {"schedule": "async"},
    "auto": {"schedule": "auto"},
    "chunks, async": {"schedule": "async", "max_num_batched_tokens": 7},
    "partial sums": {"combine": "partial"},
}


@pytest.fixture(autouse=True)
def prices_of_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted then depends on no clock."""
    monkeypatch.setattr(StepPrices, "record_duration", lambda self, rows, seconds: None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prediction.save("glm4_moe", tmp_path_factory.mktemp("mtp") / "glm", strength=0.004)


def one_process(path: Path, rules: str, **settings: Any) -> dict[int, list[int]]:
    llm = LLM(str(path), threads=1, seed=0, kv_cache_memory="16MiB", kernels="reference", **settings)
    return dict(enumerate(one.outputs[0].token_ids for one in llm.generate(PROMPTS, RULES[rules])))


def config(path: Path, ranks: int = 1, cache: str = "1MiB", **scheduler: Any) -> WorkerConfig:
    """Of a worker that asks servers."""
    schedule = SchedulerConfig(
        **{"max_num_seqs": 4, "max_num_batched_tokens": 16, "speculative_config": MTP} | scheduler
    )
    model = ModelConfig(str(path), device="cpu", kernels="reference", threads=1)
    parallel = ParallelConfig(ranks)
    return WorkerConfig(model, CacheConfig(cache), schedule, parallel, remote_experts=True, supervised=True)


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    made: list[Threads] = []

    def launcher(config: WorkerConfig) -> Threads:
        made.append(Threads(config))
        return made[-1]

    try:
        with patch("moesaic.runtime.group.build_rank.RankLauncher", launcher):
            yield
    finally:
        for each in made:
            each.close()
            assert not each.failed, each.failed


@pytest.mark.parametrize(
    ("schedule", "rules", "ranks"),
    [
        ("lockstep", "greedy", 1),
        ("async", "greedy", 1),
        *(
            pytest.param(schedule, rules, ranks, marks=pytest.mark.slow)
            for schedule, rules, ranks in (
                ("two batches", "sampled", 1),
                ("barrier", "greedy", 1),
                ("auto", "greedy", 1),
                ("chunks, async", "sampled", 1),
                ("partial sums", "greedy", 1),
                ("lockstep", "greedy", 2),
                ("two batches", "greedy", 2),
                ("async", "sampled", 2),
            )
        ),
    ],
)
def test_servers_have_the_experts_of_the_layer_that_drafts(
    path: Path, tmp_path: Path, schedule: str, rules: str, ranks: int
) -> None:
    """The tokens of one process without drafts."""
    wanted, seen = config(path, ranks, **SCHEDULES[schedule]), list[SpeculationStats]()
    layout = read_expert_layout(wanted.model, predicting=True)
    assert layout.layers == (1, 2, 3) and layout.prediction == 3

    def look(worker: Worker) -> None:
        seen.append(worker.stats().speculation)

    with threads_as_ranks() if ranks > 1 else nullcontext(), server(path, layout, tmp_path) as directory:
        found = generated(wanted, directory, PROMPTS, RULES[rules], look)
    assert found == one_process(path, rules)
    [counts] = seen
    assert counts.draft_tokens > 0
    assert rules == "sampled" or counts.accepted_tokens > counts.draft_tokens / 2


@pytest.mark.parametrize(
    ("collectives", "settings"),
    [
        ("deepspeed", {}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("all-reduce", {"max_num_batched_tokens": 9, "max_num_seqs": 4}),
                ("reduce-scatter", {"kv_cache_dtype": "int8"}),
                ("reduce-scatter", {"expert_tensor_parallel_size": 2}),
            )
        ),
    ],
)
def test_ranks_compute_the_layer_together(path: Path, collectives: str, settings: dict[str, Any]) -> None:
    found = []
    for drafting in (None, MTP):
        given: dict[str, Any] = {"kv_cache_memory": "16MiB", "seed": 0, "kernels": "reference"}
        given |= {"tensor_parallel_size": 2, "moe_collectives": collectives, **settings}
        with group_of_threads(str(path), speculative_config=drafting, **given) as (llm, _, _):
            rounds = [llm.generate(PROMPTS, RULES["greedy"]) for _ in range(2)]  # then with a prefix cache
            counts = llm.stats().speculation
        found += [[one.outputs[0].token_ids for one in answers] for answers in rounds]
    assert found[0] == found[1] == found[2] == found[3]
    assert counts.accepted_tokens > counts.draft_tokens / 2 > 0


def test_a_placement_without_the_layer_covers_it(path: Path, tmp_path: Path) -> None:
    """Its experts are where those of the layer before it are."""
    layout = read_expert_layout(ModelConfig(str(path)), predicting=True)
    plain = read_expert_layout(ModelConfig(str(path)))
    assert plain.fingerprint == layout.fingerprint and plain.layers == layout.model_layers == (1, 2)
    half = layout.num_experts // 2
    halves = {0: range(half), 1: range(half, layout.num_experts)}
    held = {1: halves, 2: {0: halves[1], 1: halves[0]}}
    given = Placement(0, layout.num_experts, held, layout.fingerprint)
    covering = given.with_layer(layout.prediction)
    covering.check(layout.fingerprint, layout.layers, layout.num_experts)
    assert covering.experts_by_layer[3] == covering.experts_by_layer[2] != covering.experts_by_layer[1]
    assert covering.with_layer(3) is covering and given.with_layer(None) is given
    file = tmp_path / "placement.json"
    file.write_text(given.to_json())
    wanted = WorkerConfig(
        ModelConfig(str(path)),
        scheduler=SchedulerConfig(speculative_config=MTP),
        parallel=ParallelConfig(2, placement=str(file)),
    )
    owners = read_owners(wanted).owners
    assert set(owners) == {1, 2, 3} and np.array_equal(owners[3], owners[2])
