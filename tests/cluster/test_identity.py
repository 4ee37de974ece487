"""Whatever processes serve a model, a request's bits are those of one process."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from moesaic import LLM, SamplingParams
from moesaic.cluster import launcher, local
from moesaic.config import QueueConfig, Schedule
from tests.support.cluster_driver import Answer, cluster

MATRIX = pytest.mark.full
"""Of what test_models serves too, in its cover of all pairs."""
SHAPES = [
    pytest.param({"attention_workers": 1, "expert_servers": 1}, id="1 worker, 1 server", marks=MATRIX),
    pytest.param({"attention_workers": 1, "expert_servers": 3}, id="1 worker, 3 servers"),
    pytest.param({"attention_workers": 2, "expert_servers": 1}, id="2 workers, 1 server", marks=MATRIX),
    pytest.param(
        {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2, "max_num_batched_tokens": 16},
        id="2 workers, 2 servers, every expert twice, prompts in chunks of 16",
    ),
    pytest.param(
        {"attention_workers": 1, "expert_servers": 2, "inflight_batches": 2}, id="two batches in flight"
    ),
    pytest.param(
        {"schedule": "barrier", "attention_workers": 2, "expert_servers": 2},
        id="barrier, 2 and 2",
        marks=MATRIX,
    ),
    pytest.param(
        {"schedule": "barrier", "attention_workers": 3, "expert_servers": 1, "max_num_batched_tokens": 16},
        id="barrier, 3 workers, 1 server, prompts in chunks",
    ),
    pytest.param({"schedule": "auto", "attention_workers": 2, "expert_servers": 2}, id="auto", marks=MATRIX),
    pytest.param({"schedule": "async", "expert_servers": 1}, id="async, 1 worker, 1 server", marks=MATRIX),
    pytest.param(
        {"schedule": "async", "attention_workers": 2, "expert_servers": 3, "queue_policy": "mtfs"},
        id="async mtfs, 2 workers, 3 servers",
    ),
    pytest.param(
        {"schedule": "async", "expert_servers": 2, "queue_policy": "flfs", "max_num_batched_tokens": 16},
        id="async flfs, 2 servers, prompts in chunks",
    ),
    pytest.param({"attention_workers": 2, "expert_servers": 0}, id="2 workers that do everything"),
]


KNOWN: dict[str, list[Answer]] = {}
"""Of `alone`."""


def workload(count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths; every other request is sampled, and every fourth must not say everything."""
    random_numbers = random.Random(7)
    prompts = [[random_numbers.randrange(3, 900) for _ in range(3 + 5 * i)] for i in range(count)]
    params = [
        SamplingParams(
            max_tokens=tokens,
            temperature=0.9 * (i % 2),
            seed=i,
            ignore_eos=True,
            logprobs=0,
            allowed_token_ids=None if i % 4 else range(10 * i, 900),
            bad_word_ids=() if i % 4 else [[token, token + step] for token in range(900) for step in (1, 2)],
        )
        for i in range(count)
    ]
    return prompts, params


def alone(prompts: list[list[int]], params: list[SamplingParams], **settings: Any) -> list[Answer]:
    """The same requests in one process, which is asked once."""
    key = repr((prompts, params, settings))
    if key not in KNOWN:
        KNOWN[key] = _alone(prompts, params, **settings)
    return KNOWN[key]


def _alone(prompts: list[list[int]], params: list[SamplingParams], **settings: Any) -> list[Answer]:
    model = LLM("demo", threads=1, kv_cache_memory="64MiB", **settings)
    answers = []
    for completion in model.generate(prompts, params):
        [output] = completion.outputs
        answers.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    return answers


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(8, 24))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_as_in_one_process(shape: dict[str, Any], expected: list[Answer]) -> None:
    with cluster(**shape) as served:
        served.submit(*workload(8, 24))
        assert served.finish() == expected


@pytest.mark.slow
def test_the_same_bits_with_a_cache_in_int8() -> None:
    with cluster(attention_workers=2, expert_servers=2, kv_cache_dtype="int8") as served:
        served.submit(*workload(8, 24))
        assert served.finish() == alone(*workload(8, 24), kv_cache_dtype="int8")


@pytest.mark.slow
def test_the_same_bits_whatever_the_queues_wait_for(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and servers were told to."""
    told: list[QueueConfig] = []

    def spy(spawn: Callable[[Any], local.ChildProcess]) -> Callable[[Any], local.ChildProcess]:
        def spawned(config: Any) -> local.ChildProcess:
            told.append(config.queues)
            return spawn(config)

        return spawned

    monkeypatch.setattr("moesaic.cluster.launcher.spawn_server", spy(launcher.spawn_server))
    monkeypatch.setattr("moesaic.cluster.launcher.spawn_worker", spy(launcher.spawn_worker))
    queues = QueueConfig(0.02, 4, 64, 5.0)
    with cluster(schedule="async", attention_workers=2, expert_servers=2, queues=queues) as served:
        served.submit(*workload(8, 24))
        assert served.finish() == expected
    assert told == [queues] * 4


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the documentation's lines write: two stages, on servers 0 and 1 and on server 2."""
    text = (Path(__file__).parent.parent.parent / "docs" / "cluster.md").read_text(encoding="utf-8")
    [lines] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "staged" in block]
    folder = tmp_path_factory.mktemp("staged")
    with contextlib.chdir(folder):
        exec(lines, {})
    return folder / "staged.json"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_the_same_bits_in_two_stages(schedule: str, staged: Path, expected: list[Answer]) -> None:
    with cluster(expert_servers=3, attention_workers=2, placement=str(staged), schedule=schedule) as served:
        placement = served.supervisor.placement
        assert placement is not None
        layers = [set(placement.server_experts(server)) for server in range(3)]
        assert layers[0] == layers[1] and not layers[0] & layers[2]
        assert layers[0] | layers[2] == set(placement.layers)
        served.submit(*workload(8, 24))
        assert served.finish() == expected
        servers = {f"expert server {number}" for number in range(3)}
        served.until(lambda: {one.name for one in served.supervisor.status() if one.stats.pairs} == servers)


@pytest.mark.slow
def test_ranks_ask_their_own_server_first(expected: list[Answer]) -> None:
    """Two colocated ranks, every expert on both: nothing goes to the other rank."""
    shape = {"expert_servers": 0, "data_parallel_size": 2, "enable_expert_parallel": True}
    with cluster(min_replicas=2, **shape) as served:  # type: ignore[arg-type]
        served.submit(*workload(8, 24))
        assert served.finish() == expected
        assert len(served.supervisor.status()) == 4
