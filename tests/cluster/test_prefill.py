"""Prompts on prefill workers: the bits of one process, also when either side is killed during a transfer."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.cluster.launch import launch
from moesaic.cluster.member import RestartRule
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.request import RequestOutput
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.testing import byte_tokenizer
from tests.cluster.test_groups import same
from tests.cluster.test_identity import alone
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import PATIENCE, Answer, Cluster, cluster

LENGTHS = (5, 15, 16, 17, 33, 64, 130, 200)
SHAPES: dict[str, dict[str, Any]] = {
    "one of each": {"expert_servers": 0},
    "two of each": {"expert_servers": 0, "attention_workers": 2, "prefill_workers": 2},
    "lockstep": {"attention_workers": 2},
    "barrier": {"schedule": "barrier", "prefill_workers": 2},
    "async": {"schedule": "async", "attention_workers": 2, "prefill_workers": 2},
    "two batches in flight": {"inflight_batches": 2},
    "small caches": {"kv_cache_memory": "1MiB", "max_model_len": 256, "attention_workers": 2},
    "sockets": {"transport": "socket"},
    "own servers": {
        "attention_workers": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "prefill_workers": 1,
    },
}


def workload(tokens: int = 12) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, two of them with a common beginning; every other request is sampled."""
    numbers = random.Random(11)
    prompts = [[numbers.randrange(3, 900) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-1][:100] + prompts[-2][:50])
    params = [
        SamplingParams(
            max_tokens=1 if i == 4 else tokens,
            min_tokens=1 if i == 4 else 3,
            temperature=0.9 * (i % 2),
            seed=i,
            ignore_eos=i % 3 > 0,
            logprobs=0,
            frequency_penalty=0.5 * (i % 2),
        )
        for i in range(len(prompts))
    ]
    return prompts, params


def prefill_cluster(**shape: Any) -> Any:
    return cluster(**{"prefill_workers": 1, "max_num_batched_tokens": 16} | shape)


def nothing_is_left(served: Cluster) -> None:
    """All blocks, seats and received bytes are free, and no transfer is under way."""

    def done() -> bool:
        stats = served.stats
        return not (stats.blocks.num_used or stats.states.seats_used or stats.transfers.held_bytes)

    served.until(done)
    assert not served.router.transfers


@pytest.mark.parametrize(
    "shape", pairs.some(list(SHAPES), ["one of each", "async", "barrier", "own servers", "small caches"])
)
def test_the_same_bits_as_in_one_process(shape: str) -> None:
    with prefill_cluster(**SHAPES[shape]) as served:
        served.submit(*workload())
        assert served.finish() == alone(*workload())
        nothing_is_left(served)
        served.until(lambda: served.stats.transfers.received_requests == 6)
        transfers = served.stats.transfers
        assert transfers.failed_transfers == 0 and transfers.sent_requests == transfers.received_requests
        every = sum(LENGTHS[i] for i in (2, 3, 5, 6, 7)) + 150
        assert every - 96 <= transfers.received_tokens <= every  # 96 tokens may be in the prefix cache
        assert transfers.sent_bytes and transfers.sent_seconds


@pytest.mark.parametrize("cache", pairs.some(["float32", "bfloat16", "int8"], ["bfloat16", "int8"]))
def test_every_cache_type_travels(cache: str) -> None:
    with prefill_cluster(expert_servers=1, kv_cache_dtype=cache) as served:
        served.submit(*workload())
        assert served.finish() == alone(*workload(), kv_cache_dtype=cache)
        nothing_is_left(served)
        served.until(lambda: served.stats.transfers.received_requests == 6)


EARLY = list(itertools.product(("float32", "int8"), ("lockstep", "async")))


@pytest.mark.parametrize(("cache", "schedule"), pairs.some(EARLY, EARLY[1:3]))
def test_layers_travel_while_others_are_computed(cache: str, schedule: str) -> None:
    """In long prompts each layer is enough for a piece. Chunks of 128 rows leave 72 of the last prompt."""
    numbers = random.Random(3)
    prompts = [[numbers.randrange(3, 900) for _ in range(length)] for length in (200, 400, 129, 456)]
    asked = prompts, [SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)] * 4
    with prefill_cluster(
        expert_servers=1, schedule=schedule, kv_cache_dtype=cache, max_num_batched_tokens=128
    ) as served:
        served.submit(*asked)
        assert served.finish() == alone(*asked, kv_cache_dtype=cache)
        nothing_is_left(served)
        served.until(lambda: served.stats.transfers.received_requests == 4)
        transfers = served.stats.transfers
        assert 0 < transfers.early_bytes < transfers.sent_bytes


GROUPS: dict[str, dict[str, Any]] = {
    "ranks with experts": {"expert_servers": 0},
    "all-reduce": {"expert_servers": 0, "moe_collectives": "all-reduce"},
    "lockstep": {"expert_servers": 1},
    "async": {"expert_servers": 1, "schedule": "async", "attention_workers": 2},
    "barrier": {"expert_servers": 1, "schedule": "barrier", "prefill_workers": 2},
    "two batches in flight": {"expert_servers": 1, "inflight_batches": 2},
}


@pytest.mark.parametrize("shape", pairs.some(list(GROUPS), ["ranks with experts", "async"]))
def test_kv_of_all_ranks_travels(shape: str) -> None:
    """From a group of ranks to another one, whose ranks have the same heads."""
    with prefill_cluster(tensor_parallel_size=2, **GROUPS[shape]) as served:
        served.submit(*workload())
        same(served.finish(), alone(*workload()))
        nothing_is_left(served)
        served.until(lambda: served.stats.transfers.received_requests == 6)
        assert served.stats.transfers.failed_transfers == 0


@pytest.mark.parametrize(
    "victim", pairs.some(["prefill worker 0", "attention worker 0"], ["attention worker 0"])
)
def test_a_group_dies_during_a_transfer(victim: str) -> None:
    with prefill_cluster(tensor_parallel_size=2, expert_servers=1) as served:
        served.submit(*workload(40))
        kill = DuringTransfer(served, victim, after=3)
        same(served.finish(kill), alone(*workload(40)))
        assert kill.left == 0
        served.until(lambda: all(one.stage == "serving" for one in served.supervisor.status()))
        nothing_is_left(served)


FAMILIES = {"states": "qwen3-next", "convolutions": "lfm2", "latent": "deepseek-lite"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, case in FAMILIES.items():
        found[name] = tmp_path_factory.mktemp(name)
        tiny_models.save(tiny_models.build(*model_configs.CASES[case]), found[name])
        byte_tokenizer(found[name])
    return found


def of_family(longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    lengths: list[int] = [200, 129, 128, 65, 64, 63, 16, 200]
    lengths = [min(length, longest) for length in lengths]
    prompts = [tiny_models.prompt(n, model_configs.VOCAB, seed=i % 4) for i, n in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=70, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    return prompts, params


@functools.cache
def of_one_process(path: Path, longest: int) -> list[Answer]:
    model = LLM(str(path), threads=1, enable_prefix_caching=False, enforce_eager=True)
    found = []
    for completion in model.generate(*of_family(longest)):
        [output] = completion.outputs
        found.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    return found


TRAVELLING = list(itertools.product(FAMILIES, ("lockstep", "async")))
TRAVEL_NOW = [("states", "async"), ("convolutions", "lockstep"), ("latent", "async")]


@pytest.mark.parametrize(("family", "schedule"), pairs.some(TRAVELLING, TRAVEL_NOW))
def test_states_and_latents_travel(family: str, schedule: str, checkpoints: dict[str, Path]) -> None:
    """Of prompts that end before, at and after a multiple of 64, where states are stored."""
    path, longest = checkpoints[family], 120 if family == "latent" else 200
    with prefill_cluster(model=str(path), schedule=schedule, attention_workers=2) as served:
        served.submit(*of_family(longest))
        assert served.finish() == of_one_process(path, longest)
        nothing_is_left(served)
        served.until(lambda: served.stats.transfers.received_requests == 8)


class DuringTransfer:
    """Kills a process while a transfer to `to` is under way, `times` times."""

    def __init__(self, served: Cluster, victim: str, after: int, times: int = 1) -> None:
        self.served, self.victim, self.after, self.left = served, victim, after, times
        self.looked = 0

    def __call__(self, tokens: int) -> None:
        self.looked += 1
        if self.left and self.looked > self.after and self.served.router.transfers:
            [found] = [one for one in self.served.supervisor.status() if one.name == self.victim]
            if found.pid is not None and found.stage == "serving":
                self.left -= 1
                os.kill(found.pid, signal.SIGKILL)


VICTIMS = [
    (victim, count, schedule, after)
    for victim in ("prefill worker 0", "attention worker 0")
    for count in (1, 2)
    for schedule in ("lockstep", "async", "barrier")
    for after in (0, 5, 12)
]
KILLED = [
    ("attention worker 0", 2, "lockstep", 0),
    ("prefill worker 0", 2, "async", 5),
    ("attention worker 0", 1, "barrier", 5),
]


@pytest.mark.parametrize(("victim", "count", "schedule", "after"), pairs.some(VICTIMS, KILLED))
def test_a_death_during_a_transfer(victim: str, count: int, schedule: str, after: int) -> None:
    """With one worker of each role its successor goes on; with two, the other one does."""
    shape = {"attention_workers": count, "prefill_workers": count, "schedule": schedule}
    with prefill_cluster(**shape) as served:
        served.submit(*workload(40))
        kill = DuringTransfer(served, victim, after, times=2)
        assert served.finish(kill) == alone(*workload(40))
        assert kill.left < 2
        served.until(lambda: all(one.stage == "serving" for one in served.supervisor.status()))
        nothing_is_left(served)
        served.submit(*workload(4))
        assert served.finish()[len(LENGTHS) + 1 :] == alone(*workload(4))


def no_process(config: WorkerConfig) -> None:
    raise OSError("no process can be started")


@pytest.mark.slow
def test_without_a_prefill_worker_the_others_compute_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    with prefill_cluster(expert_servers=0) as served:
        served.submit(*workload())
        served.finish()
        served.until(lambda: served.stats.transfers.sent_requests == 6)  # told a little later
        monkeypatch.setattr("moesaic.cluster.launcher.spawn_worker", no_process)
        os.kill(served.pid("prefill worker 0"), signal.SIGKILL)
        served.until(lambda: served.supervisor.status()[-1].stage != "serving")
        before = served.stats.transfers.sent_requests
        served.submit(*workload())
        assert served.finish()[len(LENGTHS) + 1 :] == alone(*workload())
        assert served.stats.transfers.sent_requests == before


@pytest.mark.parametrize("count", pairs.some([1, 2], [1]))
def test_a_prefill_worker_that_keeps_dying_is_given_up(count: int) -> None:
    """Its prompts go to the other one, or to the attention worker if there is none."""
    with prefill_cluster(prefill_workers=count) as served:
        served.supervisor._rule = RestartRule(first_delay=0.01)
        served.submit(*workload(40))
        killed: set[int] = set()

        def given_up() -> bool:
            [one] = [one for one in served.supervisor.status() if one.name == "prefill worker 0"]
            if one.pid is not None and one.pid not in killed:
                killed.add(one.pid)
                os.kill(one.pid, signal.SIGKILL)
            return one.stage == "stopped"

        served.until(given_up)
        assert served.finish() == alone(*workload(40))
        served.submit(*workload(4))
        assert served.finish()[len(LENGTHS) + 1 :] == alone(*workload(4))
        nothing_is_left(served)
        report = served.supervisor.report()
        [gone] = [one for one in report.processes if one.stage != "serving"]
        assert (gone.name, gone.stage, gone.deaths, gone.pid) == ("prefill worker 0", "stopped", 6, None)
        assert "signal 9" in (gone.last_failure or "")
        assert "prefill worker 0 keeps dying; " in report.failures[-1].what


@pytest.mark.slow
def test_the_statistics_of_each_worker_have_its_name() -> None:
    with prefill_cluster(expert_servers=0) as served:
        served.submit(*workload())
        served.finish()
        served.until(lambda: served.stats.transfers.received_requests == 6)
        workers = served.supervisor.worker_stats()
        assert set(workers) == {"attention worker 0", "prefill worker 0"}
        assert workers["attention worker 0"].transfers.received_requests == 6
        assert workers["prefill worker 0"].transfers.received_requests == 0


@pytest.mark.slow
def test_cancelled_requests_leave_nothing() -> None:
    with prefill_cluster(expert_servers=0, attention_workers=2) as served:
        for _ in range(3):
            first = len(served.running.answers)
            served.submit(*workload(40))
            for number in range(first, first + len(LENGTHS)):
                served.cancel(number)
                served.take(0.005)
            served.finish()
        nothing_is_left(served)


@pytest.mark.slow
def test_a_frozen_prefill_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", 1.0)
    with prefill_cluster(expert_servers=0) as served:
        served.submit(*workload())
        os.kill(served.pid("prefill worker 0"), signal.SIGSTOP)
        assert served.finish() == alone(*workload())
        nothing_is_left(served)
        assert served.supervisor.status()[-1].deaths == 1


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, '{"method": "ngram", "num_speculative_tokens": 3}'])
def test_scores_of_prompts_and_forms_of_answers_are_those_of_one_process(drafts: str | None) -> None:
    """The prefill worker scores the prompt. Both workers know the form of the answer and what may follow."""
    form = StructuredOutputsParams(regex="[a-z]{3,9} [0-9]{4,}")
    repeated = [7, 8, 9, 10, 11] * 12
    params = [
        SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=2, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.7, seed=3, structured_outputs=form, logprobs=1),
        SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0),
    ]
    asked = [repeated, repeated[1:], repeated[2:]]
    shape = ClusterConfig(attention_workers=1, prefill_workers=1)
    worker = WorkerConfig(
        ModelConfig("demo", threads=1),
        CacheConfig("32MiB"),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, speculative_config=drafts),
    )
    outputs: dict[int, list[RequestOutput]] = {}
    with launch(worker, shape, seed=0) as launched:
        engine, open_requests = launched.engine, set()
        while engine.info is None:
            for _ in engine.receive(launched.connection.receive(60)):  # type: ignore[arg-type]
                pass
        for prompt, one in zip(asked, params, strict=True):
            open_requests.add(engine.submit(prompt, one))
        while open_requests:
            for output in engine.receive(launched.connection.receive(60)):  # type: ignore[arg-type]
                outputs.setdefault(output.request_id, []).append(output)
                if output.finished:
                    open_requests.discard(output.request_id)
        deadline = time.monotonic() + PATIENCE
        while launched.connection.stats().transfers.received_requests < 3:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
            launched.connection.receive(0.1)
    alone = LLM("demo", threads=1, kv_cache_memory="64MiB").generate(asked, params)
    for number, completion in enumerate(alone):
        got, [wanted] = outputs[number], completion.outputs
        assert [token for one in got for token in one.token_ids] == wanted.token_ids
        assert [entry for one in got for entry in one.logprobs or []] == (wanted.logprobs or [])
        scores = [one.prompt_logprobs for one in got if one.prompt_logprobs is not None]
        assert scores == ([wanted.prompt_logprobs] if number == 0 else [])


@pytest.mark.slow
def test_a_known_prompt_of_which_one_row_is_computed_again_ends_no_worker() -> None:
    """Its only step is recorded, and torch's operations cannot be part of that. All its KV is to be sent."""
    prompts, params = [list(range(3, 388))], [SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)]
    with prefill_cluster(expert_servers=0, max_num_batched_tokens=512) as served:
        for _ in range(2):
            served.submit(prompts, params)
            served.finish()
        assert served.finish() == 2 * alone(prompts, params)
        assert served.supervisor.report().counters.process_deaths == 0
