"""What is recorded of a request is what a plain forward pass of the whole sequence chooses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.cluster_driver import Cluster
from transformers import AutoModelForCausalLM

from moesaic import LLM, SamplingParams
from moesaic.cluster.launch import launch
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.profile import Profile, Routes, SmallArray
from moesaic.core.request import Request
from moesaic.core.routing import END_POSITION, Assembly, RoutedModel, Rows, draw, join_routes
from moesaic.core.tokens import TokenBatch
from moesaic.models import files
from moesaic.models.registry import routed_model
from moesaic.policy.scheduling.schedulers.actions import Admit, Release, StepPlan
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.routing_recorder import REQUESTS_TOGETHER, ROWS_TOGETHER, SEED, RoutingRecorder
from moesaic.trace.options import RecordConfig

NEW = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
DEMO = files.resolve("demo")
MODEL = routed_model(DEMO)
LENGTHS = (1, 7, 16, 17, 40, 90, 33, 120)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 900, length).tolist() for length in LENGTHS]


class Plain:
    """The routing of transformers, sequence by sequence."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[t, layers, E] router logits."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.inference_mode():
                found = self.model(torch.tensor([tokens]), output_router_logits=True).router_logits
            self.known[key] = torch.stack(found, dim=1)
        return self.known[key]

    def check(self, tokens: list[int], experts: SmallArray) -> None:
        """experts [t, layers, k] are the best ones, best first, short of ties within rounding."""
        logits = self.logits(tokens)
        best = logits.topk(experts.shape[2]).indices.numpy()
        assert experts.shape == best.shape
        wrong = np.nonzero(experts != best)
        mine, theirs = (
            logits.gather(2, torch.from_numpy(ids.astype(np.int64))).numpy()[wrong] for ids in (experts, best)
        )
        assert np.abs(mine - theirs).max(initial=0.0) < 1e-4
        assert len(wrong[0]) < 0.001 * best.size + 2


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


class Taken:
    """A RowSink that takes requests the moment they end: none comes twice."""

    def __init__(self) -> None:
        self.assembly = Assembly(MODEL, 1 << 30)
        self.ids: list[int] = []
        self.routes: list[Routes] = []

    def __call__(self, rows: Rows) -> None:
        self.assembly.add(rows)
        if (rows["position"] == END_POSITION).any():
            ids, routes = self.assembly.take()
            assert not set(ids.tolist()) & set(self.ids)
            self.ids += ids.tolist()
            self.routes.append(routes)

    def take(self) -> tuple[list[int], Routes]:
        """Ids, ascending, and routes."""
        ids, routes, self.routes = self.ids, join_routes(MODEL, self.routes), []
        self.ids = []
        order = sorted(range(len(ids)), key=ids.__getitem__)
        return sorted(ids), routes.select(order)


def recorded(**settings: Any) -> tuple[LLM, Taken]:
    """An engine, and where its rows go."""
    taken = Taken()
    return LLM("demo", threads=1, routing=taken, **settings), taken


def ran(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """What the model computed: the last token of each answer was never put in."""
    return [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]


def parts(routes: Routes) -> list[tuple[list[int], SmallArray]]:
    """Tokens and experts of each request."""
    spans = zip(routes.starts.tolist(), routes.starts[1:].tolist(), strict=False)
    return [(routes.tokens[a:b].tolist(), routes.experts[a:b]) for a, b in spans]


SETTINGS = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "torch reference": {"kernels": "reference"},
    "small chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "two batches in flight": {"inflight_batches": 2, "max_num_batched_tokens": 64},
    "blocks run out": {"kv_cache_memory": "640KiB", "max_model_len": 180},
    "blocks run out in small chunks": {
        "kv_cache_memory": "640KiB",
        "max_model_len": 180,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 12,
        "block_size": 4,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_routes_are_those_of_a_plain_forward_pass(
    prompts: list[list[int]], plain: Plain, settings: dict[str, Any]
) -> None:
    llm, taken = recorded(enable_prefix_caching=False, **settings)
    answers = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)]
    ids, routes = taken.take()
    assert ids == list(range(len(prompts)))
    assert routes.prompts.tolist() == list(LENGTHS)
    for (tokens, experts), expected in zip(parts(routes), ran(prompts, answers), strict=True):
        assert tokens == expected
        plain.check(tokens, experts)
    assert (llm.stats().preemptions > 0) == ("kv_cache_memory" in settings)
    assert not len(taken.assembly.take()[0])


@pytest.mark.slow
def test_tokens_are_the_same_without_a_recorder(prompts: list[list[int]]) -> None:
    llm, _ = recorded()
    assert [one.outputs for one in llm.generate(prompts, GREEDY)] == [
        one.outputs for one in LLM("demo", threads=1).generate(prompts, GREEDY)
    ]


def test_replays_of_one_recording_are_read_each_time(plain: Plain) -> None:
    """Decode steps of one row: the same memory every time."""
    llm, taken = recorded(enable_prefix_caching=False)
    for first in (5, 6):
        llm.generate([[first, 7, 8]], GREEDY)
    _, routes = taken.take()
    (tokens, experts), (others, more) = parts(routes)
    assert tokens != others
    assert len(np.unique(experts, axis=0)) > 4
    plain.check(tokens, experts)
    plain.check(others, more)


def test_rows_that_the_prefix_cache_spares_are_left_out(prompts: list[list[int]], plain: Plain) -> None:
    llm, taken = recorded(block_size=16)
    first, again = (llm.generate([prompts[-1]], GREEDY)[0].outputs[0].token_ids for _ in range(2))
    _, routes = taken.take()
    (whole, experts), (rest, theirs) = parts(routes)
    assert first == again
    assert whole == prompts[-1] + first[:-1]
    assert rest == whole[112:]  # seven blocks of 120 tokens
    assert routes.prompts.tolist() == [120, 8]
    assert (theirs == experts[112:]).all()
    plain.check(whole, experts)


def test_the_end_is_recorded_before_it_is_told() -> None:
    """Who hears the last token may end the worker's process at once."""
    rows: list[Rows] = []

    class Listening:
        """A connection that looks at the rows when tokens are sent."""

        def __init__(self) -> None:
            self.seen: list[list[int]] = []
            self.waiting = [messages.Submit([Request(0, [5, 6], SamplingParams(max_tokens=1, seed=0))])]

        def receive(self, timeout: float | None = None) -> messages.Message | None:
            return self.waiting.pop() if self.waiting else None

        def send(self, message: messages.Message) -> None:
            if isinstance(message, messages.Tokens):
                self.seen = [one["position"].tolist() for one in rows]

    connection = Listening()
    config = WorkerConfig(ModelConfig("demo", threads=1), CacheConfig("8MiB"))
    context = WorkerContext(config, connection, time.monotonic, routing=rows.append)  # type: ignore[arg-type]
    worker, _ = build_worker(context)
    while not connection.seen:
        worker.turn(timeout=0.0)
    assert connection.seen[-1] == [END_POSITION]


@pytest.mark.slow
def test_a_cancelled_request_is_what_was_computed_of_it(prompts: list[list[int]], plain: Plain) -> None:
    llm, taken = recorded()
    for _ in zip(llm.stream(prompts[4], GREEDY), range(3), strict=False):
        pass
    llm.generate([[5]], GREEDY)
    _, routes = taken.take()
    tokens, experts = parts(routes)[0]
    assert tokens[: len(prompts[4])] == prompts[4] and len(tokens) < len(prompts[4]) + NEW - 1
    plain.check(tokens, experts)


def test_a_share_of_the_requests(prompts: list[list[int]]) -> None:
    rows: list[Rows] = []
    recorder = RoutingRecorder(MODEL, rows.append, share=0.25)
    for request in range(4000):
        recorder.admit(admission(request))
    assert rows == []
    for request in range(4000):
        recorder.release(Release([request]))
    ended = {int(row["request"][0]) - 1 for row in rows}
    assert ended == {request for request in range(4000) if draw(request // REQUESTS_TOGETHER, SEED) < 0.25}
    assert 800 < len(ended) < 1200


def admission(request: int, prompt: int = 2) -> Admit:
    params = SamplingParams(temperature=0.0, max_tokens=4, seed=0)
    return Admit([Request(request, [5] * prompt, params)], [[]], [0.0], [0], [0])


def run(number: int, requests: list[int], *positions: range) -> StepPlan:
    """Rows of some requests; token p stands at position p."""
    where = np.concatenate([np.array(one) for one in positions])
    starts = np.concatenate(([0], np.cumsum([len(one) for one in positions])))
    none, tables = np.zeros(0, dtype=np.int64), np.zeros((len(requests), 1), dtype=np.int64)
    batch = TokenBatch(where, where, starts, np.array([one.stop for one in positions]), tables, none)
    return StepPlan(number, batch, np.array(requests), none, none, none)


SMALL = RoutedModel("moe-x", 100, 9, 2, (1, 3))


def choice(*rows: int) -> torch.Tensor:
    """[n, 2] ids that tell whose they are."""
    return torch.tensor([[row, row + 1] for row in rows])


def test_places_of_the_model_come_one_after_another() -> None:
    """Two requests that meet at the second layer; one of them begins again after a failure."""
    assembly = Assembly(SMALL, 1 << 20)
    recorder = RoutingRecorder(SMALL, assembly.add)
    recorder.admit(admission(0))
    recorder.admit(admission(1))
    recorder.record_segment(run(0, [0], range(2)), 0, choice(0, 1))
    recorder.record_segment(run(1, [1], range(2)), 0, choice(7, 7))
    recorder.record_segment(run(2, [1], range(2)), 0, choice(2, 3))
    recorder.record_segment(run(3, [1, 0], range(2), range(2)), 1, choice(4, 5, 6, 7))
    recorder.record_last_segment(run(4, [0, 1], range(2), range(2)))
    recorder.release(Release([0, 1]))
    ids, routes = assembly.take()
    assert ids.tolist() == [0, 1]
    assert routes.tokens.tolist() == [0, 1, 0, 1]
    assert routes.experts[:, :, 0].tolist() == [[0, 6], [1, 7], [2, 4], [3, 5]]


def test_a_unit_that_was_dropped_is_not_recorded() -> None:
    rows: list[Rows] = []
    recorder = RoutingRecorder(SMALL, rows.append)
    recorder.admit(admission(0))
    recorder.record_segment(run(0, [0], range(2)), 0, choice(0, 1))
    recorder.release(Release([0]))
    assert [row["position"].tolist() for row in rows] == [[END_POSITION]]
    recorder.record_last_segment(run(1, [0], range(2)))
    assert len(rows) == 1


def test_a_preempted_request_goes_on() -> None:
    assembly = Assembly(SMALL, 1 << 20)
    recorder = RoutingRecorder(SMALL, assembly.add)
    recorder.admit(admission(3))
    recorder.record_step(run(0, [3], range(2)), [choice(0, 1), choice(2, 3)])
    recorder.release(Release([3], is_preemption=True))
    assert assembly.take()[1].requests == 0
    recorder.admit(admission(3))
    recorder.record_step(run(1, [3], range(3)), [choice(0, 1, 4), choice(2, 3, 5)])
    recorder.release(Release([3]))
    ids, routes = assembly.take()
    assert (ids.tolist(), routes.tokens.tolist(), routes.prompts.tolist()) == ([3], [0, 1, 2], [2])


def test_rows_are_handed_over_together() -> None:
    """Steps of the same two sequences; one of them is recorded from the second step on."""
    rows: list[Rows] = []
    recorder = RoutingRecorder(SMALL, rows.append)
    recorder.admit(admission(0))
    recorder.record_step(run(0, [0, 1], range(1), range(1)), [choice(0, 8), choice(0, 8)])
    recorder.admit(admission(1))
    for at in range(1, ROWS_TOGETHER):
        here = range(at, at + 1)
        recorder.record_step(run(at, [0, 1], here, here), [choice(at, 7), choice(0, 6)])
    assert [len(one) for one in rows] == [ROWS_TOGETHER + 1]
    recorder.release(Release([0]))
    recorder.record_step(run(ROWS_TOGETHER, [0, 1], range(1), range(1)), [choice(3, 5), choice(3, 5)])
    recorder.release(Release([1]))
    assert [len(one) for one in rows] == [ROWS_TOGETHER + 1, ROWS_TOGETHER - 2, 1, 1, 1]
    found = np.concatenate(rows)
    for request, count in ((0, ROWS_TOGETHER), (1, ROWS_TOGETHER)):
        mine = found[(found["request"] == request + 1) & (found["position"] != END_POSITION)]
        assert len(mine) == count
        assert mine["token"].tolist() == mine["position"].tolist()
    assert found["experts"][:3, 0, 0].tolist() == [0, 1, 7]
    assert rows[3]["experts"].tolist() == [[[5, 6], [5, 6]]]


SHAPES = [
    pytest.param({"attention_workers": 2, "expert_servers": 0}, {}, id="2 workers that do everything"),
    pytest.param(
        {"expert_servers": 2}, {"inflight_batches": 2}, id="two batches in flight", marks=pytest.mark.full
    ),
    pytest.param(
        {"attention_workers": 2, "expert_servers": 1},
        {"schedule": "barrier"},
        id="barrier",
        marks=pytest.mark.full,
    ),
    pytest.param({"attention_workers": 2, "expert_servers": 2}, {"schedule": "async"}, id="async"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(("shape", "scheduler"), SHAPES)
def test_every_worker_writes_its_part_of_one_profile(
    tmp_path: Path,
    prompts: list[list[int]],
    plain: Plain,
    shape: dict[str, Any],
    scheduler: dict[str, Any],
) -> None:
    file = tmp_path / "p.npz"
    settings = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=32, **scheduler)
    worker = WorkerConfig(ModelConfig("demo", threads=1), CacheConfig("32MiB"), settings)
    with launch(worker, ClusterConfig(**shape), seed=0, record=RecordConfig(str(file), 1.0)) as launched:
        served = Cluster(launched)
        served.submit(prompts, [GREEDY] * len(prompts))
        answers = [tokens for tokens, _ in served.finish()]
        by = {path.name for path in tmp_path.glob("p.npz.parts/*.json")}
    assert len(by) == shape.get("attention_workers", 1)
    profile = Profile.load(file)
    assert profile.model == MODEL.model
    found = {tuple(tokens): experts for tokens, experts in parts(profile.routes)}
    assert sorted(found) == sorted(map(tuple, ran(prompts, answers)))
    for tokens, experts in found.items():
        plain.check(list(tokens), experts)
    assert sorted(profile.routes.prompts.tolist()) == sorted(LENGTHS)
    assert not (tmp_path / "p.npz.parts").exists()
