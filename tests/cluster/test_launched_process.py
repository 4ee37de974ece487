"""A process that a launcher starts elsewhere, with a host that does what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining.options import JoinOptions
from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.member import Member, Role
from moesaic.config import ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.transport.stream import StreamConnection, stream_pair

JOINING = JoinOptions("tcp:127.0.0.1:1", "attention-worker", model="/m", ticket="t")
SETTINGS = WorkerConfig(ModelConfig("/m"))


class FakeRoom:
    """A host. The process there ends when the test says how."""

    node, name = "n1", "node 1"

    def __init__(self, why_not: str | None = None) -> None:
        self.why_not = why_not
        self.how: str | Exception = ""
        self.done = threading.Event()
        self.killed = self.freed = 0

    def start(self, joining: JoinOptions) -> str | None:
        assert joining is JOINING
        return self.why_not

    def wait(self) -> str:
        assert self.done.wait(20.0)
        if isinstance(self.how, Exception):
            raise self.how
        return self.how

    def end(self, how: str | Exception) -> None:
        self.how = how
        self.done.set()

    def kill(self) -> None:
        self.killed += 1
        self.end("killed")

    def free(self) -> None:
        self.freed += 1


Start = Callable[..., LaunchedProcess]


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def start(lost: list[str]) -> Iterator[Start]:
    started: list[LaunchedProcess] = []

    def begin(
        room: FakeRoom | None, find: Callable[[LaunchedProcess], FakeRoom] | None = None
    ) -> LaunchedProcess:
        member = Member(Role.WORKER, 0)
        process = LaunchedProcess(member, JOINING, SETTINGS, find or (lambda _: room), lost.append)
        started.append(process)
        process.thread.start()
        return process

    yield begin
    for process in started:
        process.kill()
        process.thread.join(20.0)
        assert not process.thread.is_alive()


@pytest.fixture
def call() -> Iterator[Callable[[LaunchedProcess], StreamConnection]]:
    """The process calls. Returns its end of the connection."""
    ends: list[StreamConnection] = []

    def calls(process: LaunchedProcess, kernels: str | None = None) -> StreamConnection:
        ours, theirs = (StreamConnection(one) for one in stream_pair())
        ends.extend((ours, theirs))
        process.take(RemoteProcess(ours, "10.0.0.3:80", Role.WORKER), "w", kernels)  # type: ignore[arg-type]
        return theirs

    yield calls
    for end in ends:
        end.close()


def ended(process: LaunchedProcess) -> str:
    while True:
        try:
            process.connection.receive(20.0)
        except ConnectionLost as error:
            return str(error)


def test_it_gets_its_settings_and_what_waited_once_it_calls(start: Start, call: Start) -> None:
    room = FakeRoom()
    process = start(room)
    process.connection.send(messages.DirectorySettled(1))
    theirs = cast("StreamConnection", call(process, "avx2"))
    enlisted = theirs.receive(20.0)
    assert isinstance(enlisted, messages.EnlistReply)
    assert (enlisted.model, enlisted.weights) == ("/m", "w")
    assert WorkerConfig.from_json(enlisted.config).model.kernels == "avx2"
    assert theirs.receive(20.0) == messages.DirectorySettled(1)
    assert process.member.host == "10.0.0.3"
    theirs.send(messages.WorkerFailed("no memory", user_error=True))
    assert process.connection.receive(20.0) == messages.WorkerFailed("node 1: no memory", user_error=True)
    theirs.close()
    room.end("exited with code 1")
    assert "closed the connection" in ended(process)
    assert process.describe_end() == "node 1: exited with code 1"
    process.thread.join(20.0)
    assert (room.freed, room.killed) == (1, 0)


def test_what_the_host_lacks_is_told_as_a_mistake_of_the_user(start: Start) -> None:
    process = start(FakeRoom("--model: no such path"))
    line = "node 1: --model: no such path"
    assert process.connection.receive(20.0) == messages.WorkerFailed(line, user_error=True)
    assert ended(process) == line and process.describe_end() == line


def test_a_process_that_ends_before_it_calls_says_why(start: Start) -> None:
    room = FakeRoom()
    process = start(room)
    room.end("no connection to tcp:127.0.0.1:1")
    assert ended(process) == "node 1: no connection to tcp:127.0.0.1:1"
    room = FakeRoom()
    process = start(room)
    room.end(ConnectionLost("its Ray actor died"))
    assert ended(process) == "node 1: its Ray actor died" and room.freed == 1


def test_a_host_that_does_not_answer_counts_as_lost(
    start: Start, call: Start, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.launched_process.ANSWER_SECONDS", 0.01)
    process = start(FakeRoom())
    cast("StreamConnection", call(process)).close()
    ended(process)
    why = process.describe_end()
    assert why.startswith("the connection to 10.0.0.3:80 is lost") and why.endswith("node 1 does not answer")
    assert lost == ["n1"]


def test_one_that_waits_for_a_host_can_be_given_up(start: Start) -> None:
    def find(process: LaunchedProcess) -> None:
        process.set_waiting("waiting for a host: none")
        assert process.cancel_event.wait(20.0)

    process = start(None, find)
    while not process.member.waiting:
        time.sleep(0.001)
    process.stop()
    assert "closed" in ended(process)
    assert process.describe_end() == "it was given up before it was started"


def test_stop_asks_first_and_kills_whoever_stays(
    start: Start, call: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.launched_process.STOP_SECONDS", 0.05)
    room = FakeRoom()
    process = start(room)
    theirs = cast("StreamConnection", call(process))
    process.stop()
    heard = [theirs.receive(20.0), theirs.receive(20.0)]
    assert isinstance(heard[0], messages.EnlistReply) and heard[1] == messages.Shutdown()
    assert room.killed == 1


def test_who_calls_too_late_is_sent_away(start: Start, call: Start) -> None:
    room = FakeRoom()
    process = start(room)
    process.kill()
    theirs = cast("StreamConnection", call(process))
    assert isinstance(theirs.receive(20.0), messages.EnlistReply)
    with pytest.raises(ConnectionLost):
        theirs.receive(20.0)


def test_a_cpu_that_would_compute_other_bits_is_refused(start: Start) -> None:
    room = FakeRoom()
    process = start(room)
    ours, theirs = (StreamConnection(one) for one in stream_pair())
    process.refuse(RemoteProcess(ours, "10.0.0.3:80", Role.WORKER), "--kernels: it lacks avx512")
    message = process.connection.receive(20.0)
    assert message is not None and isinstance(message, messages.WorkerFailed) and message.user_error
    assert message.error.endswith("--kernels: it lacks avx512")
    with pytest.raises(ConnectionLost):
        theirs.receive(20.0)
    theirs.close()
