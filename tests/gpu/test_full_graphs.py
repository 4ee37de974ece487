"""Decode steps that are one CUDA graph each, with expert servers in processes of their own.

All processes are on the sanitizer's device, and Triton's interpreter runs the kernels. A graph is replayed
beside the thread that launched it, as on a GPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.support import gpu_cases, pairs, prediction, served_worker, tiny_models
from tests.support.gpu_graphs import Graph, graphs
from tests.support.gpu_sanitizer import DEVICE, WAITS, sanitized
from tests.support.gpu_server_process import SECRET, servers
from tests.support.gpu_shared_memory import shared_memory
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic import LLM
from moesaic.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConfigError
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.request import SamplingParams, TokenRoute
from moesaic.gpu.exchange import full_graphs
from moesaic.gpu.exchange.exchange import DeviceExchange, _Server
from moesaic.gpu.exchange.exchange_launches import GraphKernels
from moesaic.policy.fleet.replicas import Replicas
from moesaic.policy.scheduling.step_prices import StepPrices
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.runtime.token_routes import TokenRoutes
from moesaic.runtime.worker import Worker

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
NEW = 6
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
PROMPTS = gpu_cases.prompts()[:2]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, seed=0)
Held = dict[int, list[int]]


def config(path: Path, device: str, **model: Any) -> WorkerConfig:
    chosen = ModelConfig(str(path), device=device, threads=1, **model)  # type: ignore[arg-type]
    schedule = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    return WorkerConfig(chosen, CacheConfig("1MiB"), schedule, remote_experts=True, supervised=True)


def full(path: Path) -> WorkerConfig:
    whole = config(path, "cuda", kernels="triton", cudagraph_mode="full")
    return replace(whole, transport="cuda_ipc")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return folder


@pytest.fixture(scope="module")
def layout(path: Path) -> ExpertLayout:
    return read_expert_layout(config(path, "cpu").model)


@pytest.fixture(scope="module")
def expected(
    path: Path, layout: ExpertLayout, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[int]]:
    """With all on the CPU."""
    on_cpu = config(path, "cpu", kernels="reference")
    with served_worker.server(path, layout, tmp_path_factory.mktemp("cpu")) as directory:
        return served_worker.generated(on_cpu, directory, PROMPTS, PARAMS)


def held(layout: ExpertLayout, *parts: int) -> Held:
    """The experts of these halves."""
    half = layout.num_experts // 2
    some = [expert for part in parts for expert in range(part * half, (part + 1) * half)]
    return dict.fromkeys(layout.layers, some)


class Replays:
    """Looks at each graph of a step. Before the graph with a number of `then` it calls that.

    Steps wait until there are mailboxes, so that each decode step is a graph.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exchange: DeviceExchange | None = None
        self.then: dict[int, Callable[[], object]] = {}
        self.begun = self.failed = self._replayed = self._waited = 0
        self.graphs: list[int] = []
        """Graphs that were replayed in each step."""
        self.waits: list[list[str]] = []
        """What the host waited for in each step."""
        self.tables: list[bytes] = []
        """The servers of the experts in each step."""
        self._begin, self._end, self._ready, self._replay = (
            DeviceExchange.begin,
            DeviceExchange._end,
            DeviceExchange.ready,
            Graph.replay,
        )
        monkeypatch.setattr(DeviceExchange, "begin", lambda one, live: self.begins(one, live))
        monkeypatch.setattr(DeviceExchange, "_end", lambda one: self.ends(one))
        monkeypatch.setattr(DeviceExchange, "ready", lambda one: self.is_ready(one))
        monkeypatch.setattr(Graph, "replay", lambda one: self.replays(one))
        monkeypatch.setattr(Graph, "beside", True)

    def begins(self, exchange: DeviceExchange, live: int) -> None:
        self.begun, self.exchange = self.begun + 1, exchange
        self._begin(exchange, live)
        self.then.get(self.begun, lambda: None)()
        self._waited, self._replayed = len(WAITS.of), 0

    def ends(self, exchange: DeviceExchange) -> None:
        self._end(exchange)
        self.failed += exchange.has_failed
        self.graphs.append(self._replayed)
        self.waits.append(WAITS.of[self._waited :])
        assert exchange._routes is not None
        self.tables.append(exchange._routes.tobytes())

    def is_ready(self, exchange: DeviceExchange) -> bool:
        until = time.monotonic() + 60
        while not (found := self._ready(exchange)) and time.monotonic() < until:
            exchange._remote.arrivals()
            time.sleep(0.005)
        return found

    def replays(self, graph: Graph) -> None:
        self._replayed += 1
        self._replay(graph)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    with np.errstate(all="ignore"), sanitized(), graphs(), shared_memory():
        yield Replays(monkeypatch)


@pytest.mark.slow
def test_a_placement_that_changes_between_steps(
    path: Path,
    layout: ExpertLayout,
    expected: dict[int, list[int]],
    replays: Replays,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The experts of two servers change places. A step is one graph, and the host waits for nothing in it."""
    first, second = held(layout, 0), held(layout, 1)
    calls: list[int] = []
    routes: list[TokenRoute | None] = []

    def routes_of(*given: Any) -> list[TokenRoute | None]:
        routes.extend(found := of_routes(*given))
        return found

    of_routes = TokenRoutes.collect
    monkeypatch.setattr(TokenRoutes, "collect", routes_of)

    def looked_at(worker: Worker) -> None:
        calls.append(worker.stats().experts.calls)

    with servers(path, layout, [held(layout, 0, 1), held(layout, 0, 1)]) as both:
        entries = both.directory.servers
        begin = Directory(1, entries, {0: first, 1: second})
        changes = [Directory(3, entries, {0: first, 1: second}), Directory(2, entries, {0: second, 1: first})]

        def after(tokens: int) -> None:
            if changes and tokens >= 4:
                assert replays.exchange is not None
                replays.exchange.update(changes.pop(), SECRET)

        asking = replace(PARAMS, return_routed_experts=True)
        found = served_worker.generated(full(path), begin, PROMPTS, asking, looked_at, after=after)
    assert found == expected and not changes
    assert (replays.begun, replays.failed) == (NEW - 1, 0)
    assert replays.graphs[1:] == [1] * (NEW - 2), "the first step is recorded"
    assert not any(replays.waits[1:])
    assert len(set(replays.tables)) == 2 and calls[0] > replays.begun
    assert len(routes) == 2 * NEW
    for route in routes:
        assert route is not None and len(route.experts) == len(layout.model_layers)
        swapped = {
            server ^ (expert >= layout.num_experts // 2)
            for experts, servers_ in zip(route.experts, route.servers, strict=True)
            for expert, server in zip(experts, servers_, strict=True)
        }
        assert swapped in ({0}, {1}), "all of a token's pairs went by one placement"


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_server_that_is_lost_while_a_graph_waits_for_it(
    path: Path,
    layout: ExpertLayout,
    expected: dict[int, list[int]],
    replays: Replays,
    signal_number: signal.Signals,
) -> None:
    """Both servers have all experts, so the other one takes the rows. A frozen one wakes up later."""
    every, frozen, kept = held(layout, 0, 1), signal_number == signal.SIGSTOP, []

    def wake() -> None:
        assert replays.exchange is not None
        kept.append(len(replays.exchange._leaving))
        if frozen:
            os.kill(pid, signal.SIGCONT)

    def looked_at(worker: Worker) -> None:
        until = time.monotonic() + 60
        while replays.exchange is not None and replays.exchange._leaving and time.monotonic() < until:
            replays.exchange._follow()
        kept.append(len(replays.exchange._leaving) if replays.exchange is not None else -1)

    with servers(path, layout, [every, every]) as both:
        pid = both.children[0].pid
        replays.then = {2: lambda: os.kill(pid, signal_number), 4: wake}
        found = served_worker.generated(full(path), both.directory, PROMPTS, PARAMS, looked_at)
    assert found == expected
    assert (replays.begun, replays.failed) == (NEW - 1, 1)
    assert len(set(replays.tables)) >= 2, "the table leaves the server out that is gone"
    assert kept == [int(frozen), 0], "memory is kept while the server may still write into it"


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(None, marks=pairs.REST),
        pytest.param(4, marks=pairs.REST, id="lost in drafts"),
        pytest.param(5, marks=pairs.REST, id="lost in a step"),
    ],
)
def test_the_layer_that_drafts_tokens_is_one_graph_too(
    tmp_path: Path, replays: Replays, lost: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and drafts take turns. lost: the graph in which a server is killed."""
    monkeypatch.setattr(StepPrices, "record_duration", lambda self, rows, seconds: None)
    path, drafts = prediction.save("glm4_moe", tmp_path / "glm", strength=0.02), MTP
    layout = read_expert_layout(config(path, "cpu").model, predicting=True)
    prompts = [tiny_models.prompt(length, prediction.VOCAB, seed=length) for length in (2, 3)]
    wanted = LLM(str(path), threads=1, device="cpu", kernels="reference").generate(prompts, PARAMS)
    asking, counted = full(path), list[int]()
    asking = replace(asking, scheduler=replace(asking.scheduler, speculative_config=drafts))

    def looked_at(worker: Worker) -> None:
        counted.append(worker.stats().speculation.draft_tokens)

    every = held(layout, 0, 1)
    with servers(path, layout, [every, every]) as both:
        if lost is not None:
            replays.then = {lost: lambda: os.kill(both.children[0].pid, signal.SIGKILL)}
        found = served_worker.generated(asking, both.directory, prompts, PARAMS, looked_at)
    assert found == {number: one.outputs[0].token_ids for number, one in enumerate(wanted)}
    assert counted[0] > 0 and replays.failed == (lost is not None)
    assert replays.begun > 4 and replays.begun % 2 == 0, "each step is followed by drafts"
    assert set(replays.graphs[1::2]) == {1} and not any(replays.waits[1::2])
    assert set(replays.graphs[::2]) == {1, 2}, "the first step of a kind is recorded"


@pytest.mark.slow
def test_a_server_that_answers_nan_is_found_and_left(
    path: Path, layout: ExpertLayout, expected: dict[int, list[int]], replays: Replays
) -> None:
    every, blamed = held(layout, 0, 1), []

    def looked_at(worker: Worker) -> None:
        assert replays.exchange is not None
        blamed.extend(entry.server for entry in replays.exchange._remote._blamed_servers)

    with servers(path, layout, [every, every], broken=0) as both:
        found = served_worker.generated(full(path), both.directory, PROMPTS, PARAMS, looked_at, faults=True)
    assert found == expected and blamed == [0]
    assert replays.begun == NEW - 1


def test_models_with_states_say_that_their_steps_stay_in_parts(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that is computed once more would change a state twice."""
    kernels = Mock(GraphKernels, recorder=object(), exchange=object())
    model = SimpleNamespace(kernels=kernels, spec=SimpleNamespace(states=object()))
    stages: Any = SimpleNamespace(model=model, block_size=16, device=DEVICE)
    context: Any = SimpleNamespace(limits=SimpleNamespace(max_model_len=64))
    parts, remote = object(), SimpleNamespace(stats=object())
    given: Any = (context, stages, None, remote, None, parts)
    found = full_graphs.full_graphs(*given)
    assert found.runner is parts and found.servers is remote
    assert ["this model keeps states" in one.message for one in caplog.records] == [True]
    kernels.exchange = None
    with pytest.raises(ConfigError, match="^--cudagraph-mode full: this Triton has no atomic loads"):
        full_graphs.full_graphs(*given)


def test_a_second_mailbox_at_a_server_is_left() -> None:
    """Two attempts to connect may both succeed. Nobody would wait until the server has left a lost one."""
    entry, exchange = ServerEntry(0, 1, Endpoint("unix:@")), DeviceExchange.__new__(DeviceExchange)
    exchange._servers, exchange._target_servers, exchange._leaving = {}, {0: entry}, []
    exchange._memory = SimpleNamespace(exchange=SimpleNamespace(slots=2))  # type: ignore[assignment]
    first, second = Mock(), Mock()
    exchange._join(entry, first)
    exchange._join(entry, second)
    assert exchange._servers[0].mailbox is first and exchange._leaving == [second]
    assert second.leave.called and not first.leave.called


def test_the_table_does_not_depend_on_what_servers_owe_between_steps() -> None:
    """Else a server that has a prompt's rows just then would get no rows of graphs, for as long as nothing
    changes."""
    entries = [ServerEntry(server, 1, Endpoint("unix:@")) for server in range(2)]
    exchange, replicas = DeviceExchange.__new__(DeviceExchange), Replicas()
    every = {0: list(range(4))}
    replicas.place({0: every, 1: every}, 4)
    box = SimpleNamespace(progress=lambda: (0, 0), alive=lambda: True, is_quiet=True, addresses=(1, 2, 3, 4))
    memory = Mock(exchange=SimpleNamespace(slots=2))
    exchange.__dict__ |= {
        "_replicas": replicas, "_memory": memory, "_leaving": [],
        "_remote": SimpleNamespace(connected_servers=dict(enumerate(entries))),
        "_connecting": SimpleNamespace(take_connections=list),
        "_directory": Directory(1, entries, {0: every, 1: every}),
        "_layout": SimpleNamespace(num_experts=4, layers=[0]), "_target_servers": dict(enumerate(entries)),
        "_table_sources": (), "_routes": None, "_is_whole_graph": None, "_clock": time.monotonic,
        "_servers": {one.server: _Server(one, box, one.server) for one in entries},  # type: ignore[arg-type]
    }  # fmt: skip
    for server in range(2):
        replicas.add_server(server)
    replicas.record_sent(1, 100, 0.0)
    exchange._follow()
    replicas.record_answer(1, 100, 1.0)
    assert exchange.ready() and set(memory.place.call_args.args[1].flatten().tolist()) == {0, 1}


def test_what_needs_servers_with_gpus_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = full(path)
    full_graphs.check_full_graphs(whole)
    full_graphs.check_full_graphs(replace(whole, transport="nvshmem"))
    for flag, change in (
        ("--expert-servers", {"remote_experts": False}),
        ("--transport", {"transport": "shm"}),
        ("--device", {"model": replace(whole.model, device="cpu")}),
        ("--cudagraph-mode full: each process needs a GPU", {"beside": 1}),
    ):
        with pytest.raises(ConfigError, match=f"^{flag}"):
            full_graphs.check_full_graphs(replace(whole, **change))  # type: ignore[arg-type]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="aarch64"):
        full_graphs.check_full_graphs(whole)
