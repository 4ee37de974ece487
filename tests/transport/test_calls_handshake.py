"""Who may connect, and what becomes of those who may not."""

from __future__ import annotations

import array
import fcntl
import hmac
import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.call_pairs import SECRET, accepted, ask, descriptors, incoming, lost, noise, until

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.version import __version__
from moesaic.transport import _shm, address, authentication, listening
from moesaic.transport.authentication import GREETING, MAGIC, NONCE, PROOF, Deadline, Terms
from moesaic.transport.calls import MAX_HEAP
from moesaic.transport.frames import HEADER, REQUEST
from moesaic.transport.listening import Listener, connect

Peer = Callable[[socket.socket], object]
HEAP = 1 << 20
pytestmark = pytest.mark.slow


@pytest.fixture(params=["unix:{}/s", "unix:@", "tcp:127.0.0.1:0"], ids=["file", "name", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    one = Listener(request.param.format(tmp_path), SECRET, handshake_seconds=0.5)
    yield one
    one.close()


def raw(listener: Listener) -> socket.socket:
    sock = address.dial(address.parse(listener.address), 10.0)
    sock.settimeout(10.0)
    return sock


def prove(sock: socket.socket, kind: bytes = b"stream", heap: int = HEAP, secret: bytes = SECRET) -> None:
    """The client's side of the handshake, by hand."""
    mine = os.urandom(NONCE)
    sock.sendall(GREETING + mine)
    theirs = authentication.read_exactly(sock, len(GREETING) + NONCE, Deadline(10.0))[len(GREETING) :]
    terms = struct.pack("<8sQ", kind, heap)
    sock.sendall(terms + hmac.digest(secret, b"client" + GREETING + mine + theirs + terms, "sha256"))


def hand_over(*handed: int) -> Peer:
    """Asks for shared memory and sends these file descriptors for it."""

    def peer(sock: socket.socket) -> None:
        prove(sock, b"shm")
        authentication.read_exactly(sock, PROOF, Deadline(10.0))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handed))] if handed else []
        sock.sendmsg([b"+"], rights)

    return peer


def truncated(sock: socket.socket) -> None:
    sock.sendall(GREETING + bytes(NONCE))
    sock.shutdown(socket.SHUT_WR)


BAD_PEERS: dict[str, Peer] = {
    "leaves": lambda sock: sock.shutdown(socket.SHUT_RDWR),
    "stalls": lambda sock: None,
    "stalls after a byte": lambda sock: sock.sendall(MAGIC[:1]),
    "garbage": lambda sock: sock.sendall(noise(500)),
    "speaks HTTP": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 100),
    "oversized": lambda sock: sock.sendall(GREETING + bytes(100_000)),
    "truncated": truncated,
    "wrong secret": lambda sock: prove(sock, secret=b"another secret of the tests"),
    "unknown kind": lambda sock: prove(sock, b"\xff\n!"),
    "no memory": lambda sock: prove(sock, heap=0),
    "too much memory": lambda sock: prove(sock, heap=MAX_HEAP + 1),
}


@pytest.mark.parametrize("name", BAD_PEERS)
def test_a_bad_peer_is_one_line_in_the_log(
    listener: Listener, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    with caplog.at_level(logging.DEBUG), raw(listener) as sock:
        host_and_port = sock.getsockname()
        try:
            BAD_PEERS[name](sock)
        except OSError:
            pass  # dropped before it was done
        until(lambda: caplog.records)
        until(lambda: not listener._acceptors[0]._pending)
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    peer = "tcp:{}:{}".format(*host_and_port) if host_and_port else f"process {os.getpid()}"
    assert message.startswith(f"dropped {peer} at {listener.address}: ") and "\n" not in message
    assert listener.take_connections() == []
    assert descriptors() == before
    meets_an_honest_client(listener)


def meets_an_honest_client(listener: Listener) -> None:
    caller = connect(listener.address, SECRET)
    answerer = accepted(listener)
    ask(caller, b"hello", 1, 1)
    (call,) = incoming(caller, answerer)
    assert bytes(call.request) == b"hello"
    caller.close()
    answerer.close()


def memory(size: int, sealed: bool) -> int:
    descriptor = os.memfd_create("moesaic-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


RIGHT_SIZE = _shm.HEAP + HEAP


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (list, "no memory"),
        (lambda: list(os.pipe()), "a different size"),
        (lambda: [os.open("/dev/zero", os.O_RDWR)], "a different size"),
        (lambda: [memory(4096, sealed=True)], "a different size"),
        (lambda: [memory(RIGHT_SIZE + 4096, sealed=True)], "a different size"),
        (lambda: [memory(RIGHT_SIZE, sealed=False)], "sealed"),
        (lambda: [memory(RIGHT_SIZE, sealed=True)], "another version"),
    ],
    ids=["none", "pipes", "device", "small", "large", "unsealed", "empty"],
)
def test_memory_that_cannot_be_trusted(
    make: Callable[[], list[int]], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(f"unix:{tmp_path}/s", SECRET)
    before = descriptors()
    handed = make()
    with raw(listener) as sock:
        hand_over(*handed)(sock)
        until(lambda: caplog.records and not listener._acceptors[0]._pending)
    for descriptor in handed:
        os.close(descriptor)
    assert len(caplog.records) == 1 and why in caplog.text
    assert listener.take_connections() == []
    assert descriptors() == before
    listener.close()


def test_stalling_peers_hold_up_nobody(listener: Listener) -> None:
    stalling = [raw(listener) for _ in range(40)]
    meets_an_honest_client(listener)
    for sock in stalling:
        sock.close()


def test_handshakes_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "MAX_PENDING", 2)
    listener = Listener(f"unix:{tmp_path}/s", SECRET, handshake_seconds=1e6)
    stalling = [raw(listener) for _ in range(3)]
    assert len(stalling[0].recv(100)) == 0, "the first one is dropped for the third"
    meets_an_honest_client(listener)
    listener.close()
    assert caplog.text.count("it was the oldest of 2 handshakes") == 2
    for sock in stalling:
        sock.close()


def test_closing_ends_open_handshakes(tmp_path: Path) -> None:
    listener = Listener(f"unix:{tmp_path}/s", SECRET, handshake_seconds=1e6)
    with raw(listener) as sock:
        until(lambda: listener._acceptors[0]._pending)
        listener.close()
        listener.close()
        assert len(sock.recv(100)) == 0
    assert not (tmp_path / "s").exists()


def test_the_wrong_secret(listener: Listener) -> None:
    with pytest.raises(ConnectionLost, match="no connection to .*: the server does not accept this secret"):
        connect(listener.address, b"another secret of the tests")


def rogue(replies: Callable[[socket.socket], None]) -> tuple[str, socket.socket, threading.Thread]:
    """A server that does not know the secret."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            replies(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return f"tcp:127.0.0.1:{server.getsockname()[1]}", server, thread


def reflect(sock: socket.socket) -> None:
    """Sends the client's own nonce and proof back to it."""
    sock.sendall(sock.recv(len(GREETING) + NONCE, socket.MSG_WAITALL))
    sock.sendall(sock.recv(16 + PROOF, socket.MSG_WAITALL)[16:])


def guess(sock: socket.socket) -> None:
    sock.sendall(GREETING + sock.recv(len(GREETING) + NONCE, socket.MSG_WAITALL)[len(GREETING) :])
    sock.sendall(b"x" * PROOF)
    sock.recv(1)


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        (reflect, "does not know the secret"),
        (guess, "does not know the secret"),
        (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)), "is not moesaic"),
        (lambda sock: None, "no connection to"),
    ],
    ids=["reflects", "guesses", "HTTP", "leaves"],
)
def test_the_server_has_to_prove_itself_too(replies: Callable[[socket.socket], None], why: str) -> None:
    where, server, thread = rogue(replies)
    with pytest.raises(ConnectionLost, match=why):
        connect(where, SECRET)
    thread.join()
    server.close()


def refuse(sock: socket.socket) -> None:
    sock.sendall(GREETING + bytes(NONCE))
    sock.recv(len(GREETING) + NONCE + 16 + PROOF, socket.MSG_WAITALL)
    sock.sendall(authentication.REFUSAL)


def break_off(sock: socket.socket) -> None:
    sock.sendall(GREETING + bytes(NONCE))
    sock.recv(len(GREETING) + NONCE + 16 + PROOF, socket.MSG_WAITALL)


@pytest.mark.parametrize(("replies", "refused"), [(refuse, True), (break_off, False)])
def test_a_refusal_is_told_from_a_connection_that_broke(
    replies: Callable[[socket.socket], None], refused: bool
) -> None:
    """A server that has lost its cluster tries again only after the latter."""
    where, server, thread = rogue(replies)
    sock = address.dial(address.parse(where), 10.0)
    with sock, pytest.raises(ConnectionLost) as raised:
        authentication.prove_as_client(sock, SECRET, Terms("stream", HEAP), Deadline(10.0))
    assert isinstance(raised.value, authentication.PeerRefused) == refused, raised.value
    thread.join()
    server.close()


OTHERS = {
    b"moesaic1": f"speaks protocol 'moesaic1', this end '{MAGIC.decode()}' of moesaic '{__version__}'",
    MAGIC + b"0.0.1".ljust(16, b"\0"): f"is moesaic '0.0.1', this end '{__version__}'",
    MAGIC + b"\n" * 16: rf"is moesaic '{chr(92)}n{chr(92)}n",
}


@pytest.mark.parametrize("greeting", OTHERS, ids=["protocol", "version", "nonsense"])
def test_versions_that_differ_refuse_each_other_by_name(
    greeting: bytes, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    """On both sides, and though both know the secret."""
    with raw(listener) as sock:
        sock.sendall(greeting + bytes(NONCE))
        answer = authentication.read_exactly(sock, len(GREETING) + NONCE, Deadline(10.0))
        assert answer.startswith(GREETING), "the other one reads why it is refused"
        until(lambda: caplog.records)
    assert f"the other end {OTHERS[greeting]}" in caplog.text
    assert "both need the same version of moesaic" in caplog.text
    where, server, thread = rogue(lambda sock: sock.sendall(greeting + sock.recv(56)[24:]))
    with pytest.raises(ConnectionLost, match=re.escape(OTHERS[greeting])):
        connect(where, SECRET)
    thread.join()
    server.close()


def test_both_ends_get_the_same_keys_and_new_ones_each_time() -> None:
    seen = set()
    for _ in range(3):
        one, two = socket.socketpair()
        found: list[Any] = []

        def serve(end: socket.socket = two, found: list[Any] = found) -> None:
            found.append(authentication.prove_as_server(end, SECRET, Deadline(10.0)))

        thread = threading.Thread(target=serve)
        thread.start()
        with one, two:
            keys = authentication.prove_as_client(one, SECRET, Terms("stream", HEAP), Deadline(10.0))
            thread.join()
        [(terms, others)] = found
        assert terms == Terms("stream", HEAP) and others == keys.swap()
        seen |= set(keys)
    assert len(seen) == 6


def test_who_sends_without_encryption_over_tcp_is_dropped() -> None:
    """Though it knows the secret. No message asks for a connection without encryption."""
    listener = Listener("tcp:127.0.0.1:0", SECRET)
    with raw(listener) as sock:
        prove(sock)
        authentication.read_exactly(sock, PROOF, Deadline(10.0))
        answerer = accepted(listener)
        sock.sendall(HEADER.pack(REQUEST, 1, 1, 1, 5) + b"hello")
        assert lost(answerer).startswith("encrypted record 1 is damaged")
    answerer.close()
    listener.close()


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match="timed out"):
            connect(where, SECRET, timeout=0.1)


def test_nobody_listens(tmp_path: Path) -> None:
    for where in (f"unix:{tmp_path}/nothing", "tcp:127.0.0.1:1"):
        with pytest.raises(ConnectionLost, match=f"no connection to {where}"):
            connect(where, SECRET)


def test_a_dead_servers_path_is_taken_over_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = Listener(f"unix:{path}", SECRET)
    meets_an_honest_client(listener)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"address: .* free"):
        Listener(f"unix:{path}", SECRET)
    meets_an_honest_client(listener)
    listener.close()


def test_a_name_is_free_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = Listener("unix:@", SECRET), Listener("unix:@", SECRET)
    assert one.address.startswith("unix:@moesaic-") and one.address != two.address
    for listener in (one, two):
        meets_an_honest_client(listener)
    with pytest.raises(ConfigError, match=r"address: .* free"):
        Listener(one.address, SECRET)
    one.close()
    again = Listener(one.address, SECRET)
    meets_an_honest_client(again)
    again.close()
    two.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["unix:{}/s", "unix:@"])
def test_another_users_process_is_dropped(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though it knows the secret."""
    listener = Listener(where.format(tmp_path), SECRET)
    with monkeypatch.context() as patched:
        me = os.geteuid()
        patched.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(ConnectionLost):
            connect(listener.address, SECRET)
    assert "a process of another user" in caplog.text
    meets_an_honest_client(listener)
    listener.close()


def test_bad_settings_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unix = f"unix:{tmp_path}/s"
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((unix, b"short"), "secret: got"),
        ((unix, SECRET, "rdma"), "kind: got 'rdma'; allowed: shm or stream"),
        ((unix, SECRET, "shm", 100), "heap_bytes: got 100"),
        (("tcp:127.0.0.1:1", SECRET, "shm"), "kind: got 'shm'; allowed: stream"),
        (("ftp:there", SECRET), "address: got 'ftp:there'"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            connect(*arguments)
    with pytest.raises(ConfigError, match="secret: got"):
        Listener(unix, b"")
    monkeypatch.setattr(listening, "shm", None)
    with pytest.raises(ConfigError, match="kind: got 'shm'; allowed: stream: the compiled module"):
        connect(unix, SECRET, "shm")


@pytest.mark.parametrize(
    "text",
    ["unix:/a/b", "unix:relative", "unix:@n", "tcp:localhost:0", "tcp:10.0.0.1:65535", "tcp:[::1]:80"],
)
def test_addresses(text: str) -> None:
    assert str(address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "unix:" + "a" * 108, "tcp:host", "tcp::80", "tcp:a:65536", "tcp:a:-1", "tcp:a:²", "x"],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="address: got"):
        address.parse(text)


def test_terms_are_part_of_the_proof() -> None:
    """Who changes the terms on the way is found out."""
    one, two = socket.socketpair()
    with one, two:
        thread = threading.Thread(target=relay, args=(two,))
        thread.start()
        with pytest.raises(ConnectionLost):
            authentication.prove_as_client(one, SECRET, Terms("stream", HEAP), Deadline(10.0))
        thread.join()


def relay(sock: socket.socket) -> None:
    """Between a client and a server, it asks for more memory than the client does."""
    near, far = socket.socketpair()
    deadline = Deadline(10.0)

    def server() -> None:
        with far, pytest.raises(ConnectionLost, match="secret"):
            authentication.prove_as_server(far, SECRET, deadline)

    thread = threading.Thread(target=server)
    thread.start()
    with near:
        near.sendall(authentication.read_exactly(sock, len(GREETING) + NONCE, deadline))
        sock.sendall(authentication.read_exactly(near, len(GREETING) + NONCE, deadline))
        terms = bytearray(authentication.read_exactly(sock, 16 + PROOF, deadline))
        terms[8:16] = struct.pack("<Q", 2 * HEAP)
        near.sendall(terms)
        thread.join()
    sock.shutdown(socket.SHUT_RDWR)
