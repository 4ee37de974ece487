"""A server whose client is a mailbox: requests that no kernel of ours wrote must not end it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import model_configs, tiny_models

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.experts import ExpertLayout
from moesaic.experts import wire
from moesaic.experts.server import ExpertServer
from moesaic.experts.torch_backend import TorchBackend
from moesaic.gpu.exchange.mailbox import (
    HEAD,
    REQUEST,
    MailboxClient,
    MailboxServer,
    connect_mailbox,
    mailbox_kind,
)
from moesaic.gpu.exchange.mailbox_answerer import MailboxAnswerer
from moesaic.gpu.exchange.server_mailbox import RowMemory
from moesaic.gpu.ipc.device_rows import ServerRows
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.policy.scheduling.microqueue import MostTokensFirst
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, ExpertServerScheduler
from moesaic.transport.listening import Listener

# a backend on a CPU looks at arrays that are read-only
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
SECRET = b"a secret of the tests"
EXPERTS, ROWS, PAIRS = 4, 3, 6


class Memory:
    """SharedMemory of the CPU."""

    def __init__(self, name: bytes, size: int) -> None:
        self.name, self.tensor, self.closed = name, torch.zeros(size, dtype=torch.uint8), False

    def close(self) -> None:
        self.closed = True


class Sharing:
    """DeviceSharing in one process."""

    def __init__(self) -> None:
        self.made: dict[bytes, Memory] = {}

    def open(self, name: bytes) -> Memory:
        return self.made[name]

    def make(self, name: bytes, size: int) -> Memory:
        return self.made.setdefault(name, Memory(name, size))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = model_configs.qwen3(num_experts=EXPERTS, num_experts_per_tok=2)
    return tiny_models.save(tiny_models.build("qwen3_moe", options), tmp_path_factory.mktemp("model"))


class Place:
    """A server, and the memory of its clients."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.layout: ExpertLayout = registry.expert_layout(path, table.pick("cpu", "reference"))
        self.sharing, width = Sharing(), self.layout.hidden
        rows = self.sharing.make(b"rows", 4 * ROWS * width)
        answers = self.sharing.make(b"answers", 4 * PAIRS * width)
        self.hidden = rows.tensor.view(torch.float32).view(ROWS, width)
        self.answers = answers.tensor.view(torch.float32)
        arithmetic = TorchBackend(path, self.layout, "cpu", "reference", 1)
        arithmetic.load({layer: range(EXPERTS - 1) for layer in self.layout.layers})
        listener = Listener(f"unix:{folder}/s", SECRET, kinds=mailbox_kind(self.opened))
        service = ExpertServerScheduler(self.layout.layers, MostTokensFirst(), EnoughPairs())
        rows = ServerRows(torch.device("cpu"), width)
        self.server = ExpertServer(self.layout, arithmetic, listener, service, time.monotonic, memory=rows)
        self.address, self.number = listener.address, 0
        self.clients: list[MailboxClient] = []

    def opened(self, end: MailboxServer) -> MailboxAnswerer:
        return MailboxAnswerer(end, self.sharing.open, self.layout.hidden)

    def client(self, rows: int = ROWS, pairs: int = PAIRS, answers: bytes = b"answers") -> MailboxClient:
        names = RowMemory(rows, self.layout.hidden, pairs, b"rows", answers)
        self.clients.append(connect_mailbox(self.address, SECRET, names.request_bytes, names.pack()))
        return self.clients[-1]

    def close(self) -> None:
        self.server.close()
        for client in self.clients:
            client.close()

    def post(self, client: MailboxClient, experts: list[int], rows: list[int], count: int = ROWS) -> None:
        """As the kernels write it, whether it makes sense or not."""
        header = wire.header(self.layout.layers[0], self.layout.hidden, 5).copy()
        header[wire.ROWS_WORD], header[wire.PAIRS_WORD] = count, len(experts)
        words = np.concatenate([header, experts, rows, np.arange(min(count, 64))]).astype(np.int32)
        room = client.memory[HEAD:].view(np.int32)
        room[: len(words)] = words[: len(room)]
        self.number += 1
        client.memory[:HEAD].view(np.int64)[REQUEST] = self.number

    def answered(self, client: MailboxClient) -> bool:
        """Whether it is, before the connection ends."""
        end = time.monotonic() + 60
        while client.answer_number != client.request_number and client.look(force=True):
            assert time.monotonic() < end
            self.server.turn(0.01)
        return client.answer_number == client.request_number


@pytest.fixture
def place(path: Path, tmp_path: Path) -> Iterator[Place]:
    made = Place(path, tmp_path)
    yield made
    made.close()


def test_answers_are_in_the_clients_memory(place: Place) -> None:
    place.hidden.copy_(torch.randn(place.hidden.shape))
    client = place.client()
    for experts, rows in (([2, 0, 1], [0, 2, 0]), ([1], [1])):
        place.post(client, experts, rows)
        assert place.answered(client)
        found = place.answers[: len(experts) * place.layout.hidden].view(len(experts), -1)
        wanted = [place.hidden[row] for row in rows]
        assert len(found) == len(wanted) and found.isfinite().all() and found.abs().sum() > 0
    assert place.server.counters.pairs == 4


def test_the_client_is_told_of_answers_that_are_not_finite(place: Place) -> None:
    client = place.client()
    for number, doubts in ((0.5, False), (torch.nan, True), (0.5, False)):
        place.hidden.fill_(number)
        place.post(client, [1], [0])
        assert place.answered(client) and client.doubts() == doubts


DAMAGED = {
    "too many pairs": ([0] * (PAIRS + 1), [0] * (PAIRS + 1), ROWS),
    "an expert that does not exist": ([EXPERTS], [0], ROWS),
    "a negative expert": ([-1], [0], ROWS),
    "a row that does not exist": ([0], [ROWS], ROWS),
    "rows beyond the memory": ([0], [0], ROWS + 1),
    "rows beyond any memory": ([0], [0], (1 << 31) - 1),
    "an expert that is not held": ([EXPERTS - 1], [0], ROWS),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_requests_end_the_connection_only(place: Place, what: str) -> None:
    client, other = place.client(), place.client()
    place.post(client, *DAMAGED[what])
    assert not place.answered(client)
    place.post(other, [0], [0])
    assert place.answered(other)


def test_a_client_of_another_model_is_refused(place: Place) -> None:
    for wrong in ({"answers": b"rows"}, {"rows": 1 << 23}, {"pairs": 0}):
        with pytest.raises(ConnectionLost):
            place.client(**wrong)  # type: ignore[arg-type]
    names = RowMemory(ROWS, place.layout.hidden + 1, PAIRS, b"rows", b"answers")
    with pytest.raises(ConnectionLost):
        connect_mailbox(place.address, SECRET, names.request_bytes, names.pack())


def test_memory_is_closed_before_the_client_can_notice(place: Place) -> None:
    client = place.client()
    client.leave()
    end = time.monotonic() + 60
    while not client.has_server_left:
        assert time.monotonic() < end
        place.server.turn(0.01)
    assert all(memory.closed for memory in place.sharing.made.values())


def test_memory_that_cannot_be_closed_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes on. The client is not told that it has left."""
    client, other = place.client(), place.client()
    place.post(other, [0], [0])
    assert place.answered(other)

    def refused(memory: Memory) -> None:
        raise ConfigError("the GPU is broken")

    monkeypatch.setattr(Memory, "close", refused)
    client.leave()
    end = time.monotonic() + 20
    while client.look(force=True):
        assert time.monotonic() < end
        place.server.turn(0.01)
    assert not client.has_server_left
    place.post(other, [1], [1])
    assert place.answered(other)
