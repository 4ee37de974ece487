"""Every transport passes the same checks."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.metrics import BlockStats, ExpertServerStats, TransferStats, WorkerStats
from moesaic.core.request import FinishReason, Request, SamplingParams, TokenLogprob
from moesaic.core.worker_info import WorkerInfo
from moesaic.transport.awaited_connection import AwaitedConnection
from moesaic.transport.base import Connection
from moesaic.transport.local import local_pair
from moesaic.transport.sealed_socket import SealedSocket, Wire
from moesaic.transport.sealing import Keys
from moesaic.transport.stream import MAX_FRAME, StreamConnection, decode, stream_pair

Pair = tuple[Connection, Connection]

REQUEST = Request(
    request_id=7,
    prompt_token_ids=[1, 2, 3],
    params=SamplingParams(max_tokens=4, logit_bias={5: -1.5}, stop=["\n", "é"], stop_token_ids=(9,), seed=-3),
    eos_token_ids=(0, 2),
    arrival=12.5,
)
INFO = WorkerInfo("t", "cpu", "k", "float32", 2, 10, 40, 1, 8, 2, 300, 64, 16, 8, 4096, "float32", 4, 64)
LOGPROB = TokenLogprob(11, -0.5, [(11, -0.5)])
EVERY_MESSAGE: list[messages.Message] = [
    messages.Submit([REQUEST]),
    messages.Cancel([1, 2**40]),
    messages.Submit([REQUEST, REQUEST], [[4, 5], []]),
    messages.Shutdown(),
    messages.Serving(
        Directory(3, [ServerEntry(0, 2, Endpoint("unix:/a", "tcp:10.0.0.1:1", "one"))], {0: {1: [5, 6]}}),
        b"\0secret",
    ),
    messages.Layout(ExpertLayout({1: "a.1"}, "g", "u", "d", 8, 4, 16, 2, "bfloat16")),
    messages.Submit([REQUEST], [[]], {1: messages.KVTarget(7, Endpoint("unix:@a"), b"\0secret")}),
    messages.Submit([REQUEST], [[4]], received_transfers={1: 7}),
    messages.ReceivesKV(Endpoint("unix:@a"), b"\0secret"),
    messages.RanksMeet("tcp:10.0.0.1:5", b"\0secret", 2),
    messages.KVReceived(7),
    messages.KVNotSent([7, 8]),
    messages.DropKV([2**40]),
    messages.Alive(),
    messages.KVSent(TransferStats(sent_requests=2, sent_bytes=64)),
    messages.DirectorySettled(4),
    messages.Enlist("expert-server", 2.5, "one", ["avx2"], "t"),
    messages.LinkTest(bytes(3)),
    messages.EnlistReply("m", "a.b.c", "{}"),
    messages.RanksWait("a.b.c"),
    messages.Hold(2, {1: [0, 3]}, b"secret"),
    messages.HoldReply(2, Endpoint("tcp:127.0.0.1:80"), "native", 1, "a.b.c"),
    messages.HoldReply(2, Endpoint("tcp:127.0.0.1:80"), "triton", nvshmem=True),
    messages.JoinJob(b"\0name", pe=3, workers=2, servers=4),
    messages.Digests({1: {0: "ab", 3: "cd"}}),
    messages.Neighbours([ServerEntry(0, 2, Endpoint("unix:/a", "", "one"))]),
    messages.Refuse("other weights"),
    messages.FaultyServer(2, 1, "answered NaN"),
    messages.ServerReport(ExpertServerStats(clients=1), [[1, 2]]),
    messages.Loading(3, 10),
    messages.Ready(INFO),
    messages.Ready(INFO, "a.b.c", b"\0name"),
    messages.RequestsAdmitted([7], [0.25], [16]),
    messages.RequestsMoved([0, 7]),
    messages.Outage("no attention worker serves", True),
    messages.Tokens([7, 8], [11, 12], [None, FinishReason.STOP], [LOGPROB, None]),
    messages.PromptLogprobs(7, 1, [TokenLogprob(2, -1.0, [])]),
    messages.Stats(WorkerStats(running=1, blocks=BlockStats(num_total=8, num_free=8))),
    messages.WorkerFailed("no room", user_error=True),
]


def stream_connections() -> Pair:
    one, two = stream_pair()
    return StreamConnection(one), StreamConnection(two)


def tcp_connections() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    return StreamConnection(one), StreamConnection(two)


def sealed_connections() -> Pair:
    keys = Keys(b"1" * 32, b"2" * 32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    return StreamConnection(SealedSocket(one, keys)), StreamConnection(SealedSocket(two, keys.swap()))


def awaited_connections() -> Pair:
    one, two = stream_connections()
    awaited = AwaitedConnection()
    assert awaited.connect(one)
    return awaited, two


PAIRS = {
    "awaited": awaited_connections,
    "local": local_pair,
    "unix": stream_connections,
    "tcp": tcp_connections,
    "sealed tcp": sealed_connections,
}


@pytest.fixture(params=PAIRS.values(), ids=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    make: Callable[[], Pair] = request.param
    ends = make()
    yield ends
    for end in ends:
        end.close()


def test_every_message_arrives_as_it_was_sent_and_in_order(pair: Pair) -> None:
    one, two = pair
    for message in EVERY_MESSAGE:
        one.send(message)
    assert [two.receive(60.0) for _ in EVERY_MESSAGE] == EVERY_MESSAGE
    assert {type(message) for message in EVERY_MESSAGE} == set(messages.Message.__args__)


def test_both_directions_are_independent(pair: Pair) -> None:
    one, two = pair
    one.send(messages.Shutdown())
    two.send(messages.Cancel([1]))
    assert one.receive(60.0) == messages.Cancel([1])
    assert two.receive(60.0) == messages.Shutdown()


def test_receive_times_out_and_polls(pair: Pair) -> None:
    one, _ = pair
    assert one.receive(0.0) is None
    before = time.monotonic()
    assert one.receive(0.05) is None
    assert time.monotonic() - before >= 0.04


def test_receive_waits_for_a_message_from_another_thread(pair: Pair) -> None:
    one, two = pair
    threading.Timer(0.05, lambda: one.send(messages.Shutdown())).start()
    assert two.receive(None) == messages.Shutdown()


def test_what_was_sent_before_the_end_still_arrives(pair: Pair) -> None:
    one, two = pair
    one.send(messages.Cancel([4]))
    one.close()
    one.close()
    assert two.receive(60.0) == messages.Cancel([4])
    raised = []
    for _ in range(2):
        with pytest.raises(ConnectionLost) as lost:
            two.receive(60.0)
        raised.append(lost.value)
    assert raised[0] is not raised[1], "a traceback that grows each time"


def test_a_sender_never_waits_for_a_busy_peer(pair: Pair) -> None:
    one, two = pair
    large = messages.Submit([Request(i, list(range(20_000)), SamplingParams()) for i in range(20)])
    for _ in range(10):
        one.send(large)  # far more than any socket buffer, and nobody receives
    assert two.receive(60.0) == large


LARGE = messages.Cancel(list(range(1 << 40, (1 << 40) + 300_000)))
"""2.7 MB, more than any socket buffer here."""


def frames_of(sock: socket.socket, count: int) -> list[messages.Message]:
    """Read by hand, from a socket that nobody drains."""

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = sock.recv(size - len(data))
            assert part, f"the end, {size - len(data)} bytes early"
            data += part
        return data

    lengths = iter(lambda: struct.unpack("<Q", exactly(8))[0], None)
    return [decode(exactly(length)) for _, length in zip(range(count), lengths, strict=False)]


def in_background(action: Callable[[], None]) -> bool:
    """Whether `action` comes to its end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(60.0)
    return not thread.is_alive()


def sends(connection: StreamConnection, *wanted: messages.Message) -> bool:
    def send() -> None:
        for message in wanted:
            connection.send(message)

    return in_background(send)


def test_a_sender_never_waits_for_a_frozen_peer() -> None:
    """Nothing is lost or out of order once it thaws."""
    ours, theirs = stream_pair()
    connection = StreamConnection(ours)
    wanted: list[messages.Message] = [LARGE, messages.Cancel([1]), LARGE, messages.Shutdown()]
    assert sends(connection, *wanted)
    assert frames_of(theirs, len(wanted)) == wanted
    assert sends(connection, LARGE, messages.Cancel([2]))
    assert frames_of(theirs, 2) == [LARGE, messages.Cancel([2])]
    connection.close()
    theirs.close()


def test_the_end_of_a_frozen_peer_ends_what_was_to_be_sent() -> None:
    before = threading.active_count()
    ours, theirs = stream_pair()
    connection = StreamConnection(ours)
    assert sends(connection, LARGE)
    theirs.close()
    with pytest.raises(ConnectionLost):
        connection.receive(60.0)
    while threading.active_count() > before:
        time.sleep(0.01)
    with pytest.raises(ConnectionLost):
        connection.send(LARGE)
    connection.close()


def test_closing_does_not_wait_for_a_frozen_peer() -> None:
    before = threading.active_count()
    ours, theirs = stream_pair()
    connection = StreamConnection(ours)
    assert sends(connection, LARGE)
    assert in_background(connection.close)
    while threading.active_count() > before:
        time.sleep(0.01)
    theirs.close()


def test_a_peer_that_takes_nothing_for_too_long_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.transport.stream.MAX_UNSENT", 1 << 20)
    ours, theirs = stream_pair()
    connection = StreamConnection(ours)
    connection.send(LARGE)
    with pytest.raises(ConnectionLost, match="the other end has not read \\d+ bytes"):
        connection.send(messages.Cancel([1]))
    with pytest.raises(ConnectionLost):
        connection.receive(60.0)
    connection.close()
    theirs.close()


SAYING = """
import socket, sys
from moesaic.core import messages
from moesaic.transport.stream import StreamConnection
connection = StreamConnection(socket.socket(fileno=int(sys.argv[1])))
connection.send(messages.Cancel(list(range(300_000))))
connection.send(messages.Shutdown())
"""


def test_the_last_words_of_a_process_arrive() -> None:
    """Also when nobody listens while it says them: it ends once they were taken."""
    ours, theirs = stream_pair()
    with theirs:
        command = [sys.executable, "-c", SAYING, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    assert frames_of(ours, 2) == [messages.Cancel(list(range(300_000))), messages.Shutdown()]
    assert process.wait(60.0) == 0
    ours.close()


def test_closing_wakes_a_waiting_receiver(pair: Pair) -> None:
    one, two = pair
    threading.Timer(0.05, one.close).start()
    with pytest.raises(ConnectionLost):
        two.receive(None)


def test_closing_a_local_end_wakes_who_waits_there() -> None:
    one, _ = local_pair()
    threading.Timer(0.05, one.close).start()
    with pytest.raises(ConnectionLost):
        one.receive(60.0)


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<Q", MAX_FRAME + 1),
        struct.pack("<Q", 0),
        struct.pack("<Q", 3) + b"\xff\x00\x00",
        struct.pack("<Q", 2) + b"\x00\xc1",
        struct.pack("<Q", 100) + b"cut",
    ],
    ids=["too long", "empty", "unknown type", "no MessagePack", "cut short"],
)
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    ours, theirs = stream_pair()
    lost = threading.Event()
    connection = StreamConnection(ours, on_lost=lost.set)
    theirs.sendall(garbage)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionLost):
        connection.receive(60.0)
    assert lost.wait(60.0)
    connection.close()
    theirs.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_reader_ends_the_connection_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(payload: memoryview) -> messages.Message:
        raise RecursionError("too deep")

    monkeypatch.setattr("moesaic.transport.stream.decode", broken)
    ours, theirs = stream_pair()
    connection, sender = StreamConnection(ours), StreamConnection(theirs)
    sender.send(messages.Shutdown())
    with pytest.raises(ConnectionLost, match="too deep"):
        connection.receive(60.0)
    connection._reader.join(60.0)
    connection.close()
    sender.close()


def test_a_message_with_a_refused_value_ends_the_connection() -> None:
    """SamplingParams refuses temperature -1; a peer that sends it is not one of ours."""
    ours, theirs = stream_pair()
    connection = StreamConnection(ours)
    sender = StreamConnection(theirs)
    params = SamplingParams()
    object.__setattr__(params, "temperature", -1.0)
    sender.send(messages.Submit([Request(1, [1], params)]))
    with pytest.raises(ConnectionLost):
        connection.receive(60.0)
    connection.close()
    sender.close()


# ---- signs of life


def sealed_pair() -> tuple[SealedSocket, SealedSocket]:
    one, two = stream_pair()
    keys = Keys(b"a" * 32, b"b" * 32)
    return SealedSocket(one, keys), SealedSocket(two, keys.swap())


@pytest.mark.slow
@pytest.mark.parametrize("ends", [stream_pair, sealed_pair])
def test_ends_with_nothing_to_say_keep_a_connection_that_has_a_limit(
    ends: Callable[[], tuple[Wire, Wire]],
) -> None:
    """And no sign of life is received, which `receive` would return at once."""
    one, two = ends()
    near, far = StreamConnection(one, silent_limit=0.6), StreamConnection(two, silent_limit=0.6)
    assert near.receive(1.5) is None and far.receive(0.1) is None
    far.send(messages.Cancel([1]))
    assert near.receive(60.0) == messages.Cancel([1])
    near.close()
    far.close()


def test_a_peer_that_is_silent_is_given_up() -> None:
    ours, theirs = stream_pair()
    lost = threading.Event()
    connection = StreamConnection(ours, on_lost=lost.set, silent_limit=0.2)
    with pytest.raises(ConnectionLost, match="sent nothing for 0.2 s"):
        connection.receive(30.0)
    assert lost.wait(30.0) and connection.silence >= 0.2
    connection.close()
    theirs.close()


@pytest.mark.slow
def test_a_process_that_was_stopped_itself_accuses_nobody() -> None:
    """What arrived meanwhile waits in the socket."""
    ours, theirs = stream_pair()
    program = "import socket, sys; from moesaic.transport.stream import StreamConnection as C;"
    program += "c = C(socket.socket(fileno=int(sys.argv[1])), silent_limit=1.0); print('up', flush=True);"
    program += "print(type(c.receive(None)).__name__)"
    command = [sys.executable, "-c", program, str(theirs.fileno())]
    far = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    theirs.close()
    assert far.stdout is not None and far.stdout.readline() == "up\n"
    connection = StreamConnection(ours, silent_limit=60.0)
    far.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    far.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    connection.send(messages.Shutdown())
    assert far.communicate(timeout=60)[0] == "Shutdown\n"
    connection.close()
