"""An expert server in this process: real weights, real connections, a loop that the test turns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import model_configs, tiny_models

from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import ExpertLayout
from moesaic.experts import wire
from moesaic.experts.backend import ExpertBackend
from moesaic.experts.server import ExpertServer
from moesaic.experts.torch_backend import TorchBackend
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.policy.scheduling.microqueue import MostTokensFirst
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, ExpertServerScheduler, StartRule
from moesaic.transport.calls import Call, Caller
from moesaic.transport.listening import Listener, connect

SECRET = b"a secret of the tests"
EXPERTS = 4
PATIENCE = 120.0
"""Seconds after which something hangs."""
Rows = np.ndarray


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose middle layer is dense."""
    options = model_configs.qwen3(num_experts=EXPERTS, num_experts_per_tok=2, mlp_only_layers=[1])
    return tiny_models.save(tiny_models.build("qwen3_moe", options), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def layout(path: Path) -> ExpertLayout:
    return registry.expert_layout(path, table.pick("cpu", "auto"))


@dataclass
class Client:
    """One end of a connection, and what came back on it."""

    caller: Caller
    found: dict[int, list[int]] = field(default_factory=dict)
    """Call -> its rows, in the order in which they came."""

    def ask(
        self, layer: int, hidden: Rows, experts: list[int], rows: list[int], partial: bool = False
    ) -> Call:
        """Weights of a partial call are 1, 2, 3, ..."""
        width = hidden.shape[1]
        answers = len(hidden) if partial else len(experts)
        call = self.caller.open(wire.size(len(hidden), len(experts), width, partial), answers, 4 * width)
        assert call is not None
        weights = np.arange(len(experts), dtype=np.float32) + 1 if partial else None
        wire.write(call.request, layer, np.array(experts), np.array(rows), weights, hidden)
        self.caller.post(call)
        self.found[call.number] = []
        return call

    def arrive(self, hidden: int, work: bool) -> Call:
        """At the gate of the first step."""
        call = self.caller.open(wire.ARRIVAL_BYTES, 1, 4 * hidden)
        assert call is not None
        wire.write_arrival(call.request, hidden, work, 1)
        self.caller.post(call)
        self.found[call.number] = []
        return call

    def poll(self) -> None:
        for call, rows in self.caller.poll():
            self.found[call.number] += rows.tolist()

    def has(self, call: Call) -> bool:
        self.poll()
        return len(self.found[call.number]) == call.rows

    def lost(self) -> bool:
        try:
            self.poll()
        except ConnectionLost:
            return True
        return False


def answer(call: Call) -> Rows:
    return np.frombuffer(call.answer, dtype=np.float32).reshape(call.rows, -1)


class Place:
    """A server and its clients."""

    def __init__(
        self,
        layout: ExpertLayout,
        arithmetic: ExpertBackend,
        listener: Listener,
        service: ExpertServerScheduler,
    ) -> None:
        self.listener = listener
        self.server = ExpertServer(layout, arithmetic, listener, service, time.monotonic)
        self.clients: list[Client] = []

    def join(self, kind: str = "shm") -> Client:
        count = self.server.clients
        client = Client(connect(self.listener.address, SECRET, kind, heap_bytes=1 << 20))
        self.clients.append(client)
        self.until(lambda: self.server.clients == count + 1)
        return client

    def until(self, done: Callable[[], object]) -> None:
        """Turn the server until something is so."""
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, "nothing happened"
            self.server.turn(0.001)

    def close(self) -> None:
        for client in self.clients:
            client.caller.close()
        self.server.close()


Serve = Callable[..., Place]


@pytest.fixture
def serve(path: Path, layout: ExpertLayout, tmp_path: Path) -> Iterator[Serve]:
    """Start a server that holds some experts."""
    places = []

    def start(
        held: dict[int, list[int]] | None = None,
        rule: StartRule | None = None,
        groups: int = 1,
        native: bool = False,
    ) -> Place:
        arithmetic: ExpertBackend = TorchBackend(path, layout, "cpu", "reference", 1)
        if native:
            plain = pytest.importorskip("moesaic.experts.native_backend")
            arithmetic = plain.NativeBackend(path, layout, "auto", 1)
        arithmetic.load({0: range(EXPERTS), 2: range(EXPERTS)} if held is None else held)
        listener = Listener(f"unix:{tmp_path}/server", SECRET)
        service = ExpertServerScheduler(layout.layers, MostTokensFirst(), rule or EnoughPairs(), groups)
        places.append(Place(layout, arithmetic, listener, service))
        return places[-1]

    yield start
    for place in places:
        place.close()


Direct = Callable[[int, Rows, list[int], list[int]], Rows]


@pytest.fixture(params=["reference", "auto"])
def direct(request: pytest.FixtureRequest, path: Path) -> Direct:
    """Row i of the pairs through its expert, by a direct call."""
    return _direct(path, request.param)


def _direct(path: Path, name: str) -> Direct:
    kernels = table.pick("cpu", name)
    weights = registry.load_experts(path, kernels, {0: range(EXPERTS), 2: range(EXPERTS)})

    def run(layer: int, hidden: Rows, experts: list[int], rows: list[int]) -> Rows:
        ids = torch.tensor(experts)[:, None]
        found: Rows = kernels.experts(weights[layer], torch.from_numpy(hidden[rows]), ids)[:, 0].numpy()
        return found

    return run


def noise(rows: int, width: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


# ---- answers


@pytest.mark.parametrize("kind", ["shm", "stream"])
def test_the_rows_of_a_direct_call(serve: Serve, path: Path, layout: ExpertLayout, kind: str) -> None:
    """The native kernels give the same bits, wherever they run and whatever runs along."""
    place = serve(native=True)
    direct = _direct(path, "auto")
    asked = []
    for number, client in enumerate([place.join(kind), place.join("stream")]):
        hidden = noise(3, layout.hidden, number)
        for layer, experts, rows in ((0, [1, 3, 1, 0], [0, 0, 2, 1]), (2, [2], [1]), (0, [3, 3], [2, 0])):
            wanted = direct(layer, hidden, experts, rows)
            asked.append((client, client.ask(layer, hidden, experts, rows), wanted))
    for client, call, wanted in asked:
        place.until(lambda client=client, call=call: client.has(call))  # type: ignore[misc]
        assert answer(call).tobytes() == wanted.tobytes()
        client.caller.release(call)
    assert place.server.waiting_pairs == 0


def test_several_clients_in_one_run(serve: Serve, path: Path, layout: ExpertLayout) -> None:
    """Enough is when both are there: one run, in which each expert's weights are read once."""
    place = serve(rule=EnoughPairs(pairs=100, wait=1e9))
    one, other = place.join(), place.join()
    hidden = noise(2, layout.hidden)
    first = one.ask(0, hidden, [1, 2], [0, 1])
    for _ in range(5):
        place.server.turn(0.0)
    assert place.server.waiting_pairs == 2 and not one.has(first)
    second = other.ask(0, hidden, [2, 2, 1], [0, 1, 1])
    place.until(lambda: one.has(first) and other.has(second))
    served = place.server.counters
    assert (served.runs, served.pairs, served.expert_runs) == (1, 5, 2)
    wanted = _direct(path, "reference")(0, hidden, [2, 2, 1], [0, 1, 1])
    np.testing.assert_allclose(answer(second), wanted, rtol=1e-4, atol=1e-6)


def test_a_run_waits_for_the_clients_that_are_in_a_step(serve: Serve, layout: ExpertLayout) -> None:
    """Not for one that stands at the gate, which every client must reach before it opens."""
    place = serve(rule=EnoughPairs(pairs=100, wait=1e9))
    one, other = place.join(), place.join()
    hidden = noise(1, layout.hidden)
    outside = other.arrive(layout.hidden, work=False)
    place.until(lambda: place.server.counters.calls == 1)
    call = one.ask(0, hidden, [1], [0])
    place.until(lambda: one.has(call))
    assert not other.has(outside)
    inside = one.arrive(layout.hidden, work=True)
    place.until(lambda: one.has(inside) and other.has(outside))
    call = one.ask(0, hidden, [1], [0])
    for _ in range(5):
        place.server.turn(0.0)
    assert not one.has(call), "the other one is in the step now"
    late = other.ask(0, hidden, [2], [0])
    place.until(lambda: one.has(call) and other.has(late))


@pytest.mark.parametrize("groups", [1, EXPERTS])
def test_pairs_of_a_call_may_come_one_by_one(
    serve: Serve, path: Path, layout: ExpertLayout, groups: int
) -> None:
    """With a queue for each expert, a call's answer comes in as many portions as it has experts."""
    place = serve(groups=groups)
    client = place.join()
    hidden = noise(2, layout.hidden)
    call = client.ask(2, hidden, [3, 0, 3, 1], [0, 0, 1, 1])
    place.until(lambda: client.has(call))
    assert place.server.counters.runs == (1 if groups == 1 else 3)
    wanted = _direct(path, "reference")(2, hidden, [3, 0, 3, 1], [0, 0, 1, 1])
    np.testing.assert_allclose(answer(call), wanted, rtol=1e-4, atol=1e-6)
    if groups > 1:
        assert client.found[call.number] == [0, 2, 1, 3]


@pytest.mark.parametrize("groups", [1, EXPERTS])
def test_a_partial_answer_is_the_weighted_sum(
    serve: Serve, path: Path, layout: ExpertLayout, groups: int
) -> None:
    """Also where its pairs are computed one by one."""
    place = serve(groups=groups)
    client = place.join()
    hidden = noise(3, layout.hidden)
    experts, rows = [3, 0, 2], [0, 2, 0]
    call = client.ask(0, hidden, experts, rows, partial=True)
    place.until(lambda: client.has(call))
    wanted = np.zeros_like(hidden)
    np.add.at(
        wanted,
        rows,
        _direct(path, "reference")(0, hidden, experts, rows) * np.array([[1], [2], [3]], np.float32),
    )
    np.testing.assert_allclose(answer(call), wanted, rtol=1e-4, atol=1e-6)
    assert not answer(call)[1].any()


def test_stats(serve: Serve, layout: ExpertLayout) -> None:
    place = serve()
    client = place.join()
    hidden = noise(2, layout.hidden)
    for layer, experts in ((0, [1, 1]), (2, [3, 1]), (0, [1, 2])):
        call = client.ask(layer, hidden, experts, [0, 1])
        place.until(lambda call=call: client.has(call))  # type: ignore[misc]
    served = place.server.counters
    assert (served.calls, served.pairs, served.runs, served.expert_runs) == (3, 6, 3, 5)
    assert served.load.tolist() == [[0, 3, 1, 0], [0, 1, 0, 1]]
    assert served.busy_seconds > 0.0 and place.server.clients == 1 and place.server.waiting_pairs == 0


# ---- clients that go, and clients that are wrong


def test_a_client_that_dies_with_calls_waiting(serve: Serve, layout: ExpertLayout) -> None:
    place = serve(rule=EnoughPairs(pairs=100, wait=1e9))
    one, other = place.join(), place.join()
    hidden = noise(2, layout.hidden)
    one.ask(0, hidden, [1, 2], [0, 1])
    place.until(lambda: place.server.waiting_pairs == 2)
    one.caller.close()
    place.until(lambda: place.server.clients == 1)
    assert place.server.waiting_pairs == 0
    call = other.ask(0, hidden, [3], [1])
    place.until(lambda: other.has(call))
    assert place.server.counters.pairs == 1, "nobody computes for the dead"


def test_a_client_that_dies_between_two_parts_of_its_answer(serve: Serve, layout: ExpertLayout) -> None:
    place = serve(groups=EXPERTS)
    client, other = place.join(), place.join()
    hidden = noise(2, layout.hidden)
    call = client.ask(0, hidden, [1, 2, 2], [0, 1, 0])
    place.until(lambda: place.server.counters.runs == 1)
    client.caller.close()
    place.until(lambda: place.server.clients == 1)
    assert place.server.waiting_pairs == 0 and call.rows == 3
    call = other.ask(0, hidden, [1], [0])
    place.until(lambda: other.has(call))


@pytest.mark.parametrize("native", [False, True])
def test_an_expert_that_is_not_held_drops_its_client_alone(
    serve: Serve, path: Path, layout: ExpertLayout, native: bool
) -> None:
    """Both clients' pairs are in one run; the one whose placement is right gets its answer."""
    place = serve({0: [0, 1]}, rule=EnoughPairs(pairs=4, wait=1e9), native=native)
    wrong, right = place.join(), place.join()
    hidden = noise(2, layout.hidden)
    wrong.ask(0, hidden, [1, 3], [0, 1])
    call = right.ask(0, hidden, [0, 1], [0, 1])
    place.until(lambda: right.has(call))
    assert wrong.lost() and place.server.clients == 1
    wanted = _direct(path, "reference")(0, hidden, [0, 1], [0, 1])
    np.testing.assert_allclose(answer(call), wanted, rtol=1e-4, atol=1e-6)
    assert place.server.counters.pairs == 2 and place.server.waiting_pairs == 0


def junk(client: Client, request_bytes: bytes, rows: int, row_bytes: int) -> None:
    call = client.caller.open(len(request_bytes), rows, row_bytes)
    assert call is not None
    call.request[:] = request_bytes
    client.caller.post(call)
    client.found[call.number] = []


@pytest.mark.parametrize("case", ["bytes", "dense layer", "rows", "row bytes"])
def test_what_is_no_request_drops_its_client_alone(
    serve: Serve, layout: ExpertLayout, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = serve()
    hostile, good = place.join("stream"), place.join()
    memory = bytearray(wire.size(1, 1, layout.hidden, False))
    layer, first = 1 if case == "dense layer" else 0, np.zeros(1, np.int64)
    wire.write(memoryview(memory), layer, first, first, None, noise(1, layout.hidden))
    wide = 4 * layout.hidden
    data = b"no request" if case == "bytes" else bytes(memory)
    junk(hostile, data, 2 if case == "rows" else 1, wide - 4 if case == "row bytes" else wide)
    call = good.ask(0, noise(1, layout.hidden), [1], [0])
    place.until(lambda: good.has(call) and place.server.clients == 1)
    place.until(hostile.lost)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith("dropped client 0: a request")


def test_a_client_that_just_leaves_is_not_worth_a_line(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    place = serve()
    for kind in ("shm", "stream"):
        place.join(kind).caller.close()
        place.until(lambda: place.server.clients == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_closing_is_seen_by_every_client(serve: Serve, layout: ExpertLayout) -> None:
    place = serve()
    client = place.join()
    place.server.close()
    assert client.lost() or client.lost()
    assert place.server.clients == 0
