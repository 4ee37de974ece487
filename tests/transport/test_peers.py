"""Rounds among peers: parts, order of use, refusals, and what a peer that breaks the rules can do."""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.linked_ends import linked

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import _shm
from moesaic.transport.gathering import gather
from moesaic.transport.peers import Peers, local_peers
from moesaic.transport.shared_peers import MAX_PEERS, SharedPeers
from moesaic.transport.shm import make_segment

SECRET = b"a secret of the tests"
CAPACITY = 1 << 16
PATIENCE = 60.0
Ends = list[Peers]


def gathered(path: Path, size: int) -> Ends:
    """A shared group whose ranks are all in this process."""
    with ThreadPoolExecutor(size) as pool:
        calls = [
            pool.submit(gather, str(path / "s"), SECRET, rank, size, CAPACITY, PATIENCE)
            for rank in reversed(range(size))
        ]
        return [call.result() for call in reversed(calls)]


@pytest.fixture(params=["local", "shared", "linked"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Ends]]:
    makers: dict[str, Callable[[int], Ends]] = {
        "local": lambda size: [*local_peers(size, CAPACITY)],
        "shared": lambda size: gathered(tmp_path, size),
        "linked": lambda size: [*linked(size, 1, CAPACITY)],
    }
    made: Ends = []

    def make(size: int) -> Ends:
        made[:] = makers[request.param](size)
        return made

    yield make
    for end in made:
        end.close()


def together(*calls: Callable[[], object]) -> list[object]:
    """Each in a thread of its own: what it returned, or the error it raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(PATIENCE) or future.result() for future in futures]


def test_each_sends_to_each(group: Callable[[int], Ends]) -> None:
    ends = group(3)
    for turn in range(5):
        for end in ends:
            for to, part in enumerate(end.open([turn * (to + 1) for to in range(3)])):
                part[:] = bytes([10 * end.rank + to]) * len(part)
        found = together(*(end.exchange for end in ends))
        for to, parts in enumerate(found):
            wanted = [bytes([10 * rank + to]) * (turn * (to + 1)) for rank in range(3)]
            assert [bytes(part) for part in parts] == wanted  # type: ignore[attr-defined]
            assert all(part.readonly for part in parts)  # type: ignore[attr-defined]
    assert [end.sent_bytes for end in ends] == [10 * (2 + 3), 10 * (1 + 3), 10 * (1 + 2)]


def test_one_part_for_all_counts_once_for_each(group: Callable[[int], Ends]) -> None:
    ends = group(3)
    for end in ends:
        end.open_for_all(4)[:] = b"abc%d" % end.rank
    for parts in together(*(end.exchange for end in ends)):
        assert [bytes(part) for part in parts] == [b"abc0", b"abc1", b"abc2"]  # type: ignore[attr-defined]
    assert [end.sent_bytes for end in ends] == [8, 8, 8]


def test_parts_stay_until_the_next_exchange_begins(group: Callable[[int], Ends]) -> None:
    first, second = group(2)
    for end in (first, second):
        end.open_for_all(1)[:] = b"a"
    kept, _ = together(first.exchange, second.exchange)
    for end in (first, second):
        end.open_for_all(1)[:] = b"b"
    waiting = threading.Thread(target=second.exchange)
    waiting.start()
    waiting.join(0.05)
    assert bytes(kept[1]) == b"a"  # type: ignore[index]
    assert bytes(first.exchange()[1]) == b"b"
    waiting.join()


def test_a_group_of_one(group: Callable[[int], Ends]) -> None:
    (end,) = group(1)
    end.open([3])[0][:] = b"abc"
    assert bytes(end.exchange()[0]) == b"abc"
    assert end.sent_bytes == 0


def test_more_than_a_round_holds_is_refused_and_the_group_goes_on(group: Callable[[int], Ends]) -> None:
    (end,) = group(1)
    for ask in (lambda: end.open([CAPACITY + 1]), lambda: end.open_for_all(CAPACITY + 1)):
        with pytest.raises(ConfigError, match=f"bytes of a round: got {CAPACITY + 1}"):
            ask()
    end.open([5])
    end.open([1])[0][:] = b"x"  # what was opened before is given up
    assert bytes(end.exchange()[0]) == b"x"


def test_an_end_that_is_closed_ends_the_others(group: Callable[[int], Ends]) -> None:
    ends = group(3)
    for end in ends:
        end.open([0, 0, 0])
    ends[2].close()
    found = together(ends[0].exchange, ends[1].exchange)
    assert all(isinstance(each, ConnectionLost) for each in found)
    for end in ends:
        end.close()
        with pytest.raises(ConnectionLost):
            end.open([0, 0, 0])


def test_what_was_posted_before_the_end_counts(group: Callable[[int], Ends]) -> None:
    first, second = group(2)
    for end in (first, second):
        end.open_for_all(2)[:] = b"ok"

    def last_round() -> None:
        second.exchange()
        second.close()

    thread = threading.Thread(target=last_round)
    thread.start()
    assert bytes(first.exchange()[1]) == b"ok"
    thread.join()
    first.open([0, 0])
    with pytest.raises(ConnectionLost, match="rank 1"):
        first.exchange()


def pair() -> tuple[SharedPeers, SharedPeers, Any]:
    """Two ends, and the memory between them as words of eight bytes."""
    mapping, descriptor = make_segment(4 * CAPACITY)
    os.close(descriptor)
    near, far = socket.socketpair()
    first = SharedPeers(mapping, 0, {1: near})
    return first, SharedPeers(mapping, 1, {0: far}), np.frombuffer(memoryview(mapping), np.uint64)


def mapped_segments() -> int:
    """How many segments this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_until_the_end_that_waits_has_left_it() -> None:
    gc.collect()
    before = mapped_segments()
    mapping, descriptor = make_segment(4 * CAPACITY)
    near, far = socket.socketpair()
    end = SharedPeers(mapping, 0, {1: near}, spin=PATIENCE)
    del mapping  # the end alone keeps the memory
    end.open([0, 0])
    with ThreadPoolExecutor(1) as pool, far:
        waiting = pool.submit(end.exchange)
        while 0 in end._core.missing():
            time.sleep(0.001)
        [thread] = pool._threads
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        posted = time.clock_gettime(clock)
        while time.clock_gettime(clock) < posted + 0.01:  # it polls once it waits
            time.sleep(0.001)
        end.close()
        assert mapped_segments() == before + 1
        os.pwrite(descriptor, struct.pack("<Q", 1), 2 * 64)  # the other rank posts; see csrc/peers.h
        assert isinstance(waiting.exception(PATIENCE), ConnectionLost)
    os.close(descriptor)
    assert mapped_segments() == before


def place_of(sender: int, receiver: int, turn: int = 1) -> int:
    """Where the offset of a part stands, in words; its length follows. As in csrc/peers.h."""
    header, line, part = 64, 64, 16
    peers = 2 * line * MAX_PEERS
    return (header + peers + part * ((turn % 2 * MAX_PEERS + sender) * MAX_PEERS + receiver)) // 8


@pytest.mark.parametrize(
    ("offset", "count"), [(CAPACITY + 64, 0), (0, CAPACITY + 1), (8, 8), (1 << 63, 1 << 63)]
)
def test_a_part_outside_the_memory_is_refused(offset: int, count: int) -> None:
    first, second, words = pair()
    first.open([0, 0])
    second.open([8, 0])
    assert words[place_of(1, 0) + 1] == 8
    words[place_of(1, 0)], words[place_of(1, 0) + 1] = offset, count
    found, _ = together(first.exchange, second.exchange)
    assert isinstance(found, ConnectionLost) and "outside" in str(found)
    with pytest.raises(ConnectionLost, match="outside"):
        first.open([0, 0])
    first.close()
    second.close()


def test_memory_of_another_group_is_refused() -> None:
    first, second, words = pair()
    words[1] = 3
    near, far = socket.socketpair()
    mapping, descriptor = make_segment(CAPACITY)
    os.close(descriptor)
    with near, far, pytest.raises(ConnectionLost, match="refused"):
        SharedPeers(mapping, 1, {0: near})  # nobody has made it a group's yet
    first.close()
    second.close()


def test_rounds_out_of_turn_are_bugs() -> None:
    mapping, descriptor = make_segment(CAPACITY)
    os.close(descriptor)
    core = _shm.Peers(mapping, 0, 1)
    for call in (core.post, core.take, lambda: core.wait(0.0)):
        with pytest.raises(ValueError, match="follow one another"):
            call()
    core.open([4])
    core.post()
    with pytest.raises(_shm.Broken, match="the last round has not ended"):
        core.open([4])
    core.close()
    with pytest.raises(_shm.Broken, match="closed"):
        core.open([4])


def test_an_interrupted_round_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = pair()

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "_sleep", interrupt)
    first.open([0, 0])
    with pytest.raises(KeyboardInterrupt):
        first.exchange()
    second.open([0, 0])
    second.exchange()  # the part had come
    second.open([0, 0])
    with pytest.raises(ConnectionLost):
        second.exchange()
    second.close()


def test_who_does_not_know_the_secret_is_dropped_and_the_group_forms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "s")
    found = together(
        lambda: gather(path, SECRET, 0, 2, CAPACITY, PATIENCE),
        lambda: after_a_stranger(path),
    )
    assert all(isinstance(end, SharedPeers) for end in found), found
    assert "secret" in caplog.text
    for end in found:
        end.close()  # type: ignore[attr-defined]


def after_a_stranger(path: str) -> SharedPeers:
    with pytest.raises(ConnectionLost):
        gather(path, b"some other secret", 1, 2, CAPACITY, PATIENCE)
    return gather(path, SECRET, 1, 2, CAPACITY, PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "size", "capacity"), [(1, 3, CAPACITY), (1, 2, 2 * CAPACITY)])
def test_ranks_that_were_told_differently_do_not_meet(
    rank: int, size: int, capacity: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    found = together(
        lambda: gather(path, SECRET, 0, 2, CAPACITY, 1.0),
        lambda: gather(path, SECRET, rank, size, capacity, 1.0),
    )
    assert all(isinstance(each, ConnectionLost) for each in found), found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rank", "size", "name"), [(0, 0, "size"), (0, MAX_PEERS + 1, "size"), (2, 2, "rank")]
)
def test_a_place_that_is_none_is_refused(rank: int, size: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: got"):
        gather(str(tmp_path / "s"), SECRET, rank, size)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_path_that_is_too_long_is_named_with_what_is_allowed(rank: int) -> None:
    path = "/tmp/" + "long/" * 30
    with pytest.raises(ConfigError, match=f"address: got 'unix:{path}'; allowed: .*at most 107 bytes"):
        gather(path, SECRET, rank, 2)


def test_a_group_can_meet_at_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is made, so none can remain."""
    monkeypatch.chdir(tmp_path)
    found = together(
        *(partial(gather, f"@moesaic-test-{os.getpid()}", SECRET, i, 2, CAPACITY) for i in (0, 1))
    )
    assert all(isinstance(end, SharedPeers) for end in found), found
    assert not list(tmp_path.iterdir())
    for end in found:
        end.close()  # type: ignore[attr-defined]


def test_a_process_of_another_user_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    name = f"@moesaic-test-{os.getpid()}"
    found = together(*(partial(gather, name, SECRET, i, 2, CAPACITY, 0.5) for i in (0, 1)))
    assert all(isinstance(each, ConnectionLost) for each in found), found
    assert "a process of another user" in caplog.text


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for end in gathered(tmp_path, 4):
        end.close()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
