"""Groups over several hosts: the rounds of a group on one host, also for large parts and in any speed."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.linked_ends import PATIENCE, SECRET, linked

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.experts.collectives.one_shot import OneShotGroup
from moesaic.transport import address as addresses
from moesaic.transport.authentication import Deadline, Terms, prove_as_client
from moesaic.transport.gathering import gather
from moesaic.transport.linked_peers import LinkedPeers
from moesaic.transport.linking import Door, Place, link
from moesaic.transport.peers import Peers, local_peers

CAPACITY = 1 << 20


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Each in a thread of its own: what it returned, or the error it raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(PATIENCE) or future.result() for future in futures]


def shared(folder: Path) -> Callable[[int], list[Peers]]:
    """Makes groups with shared memory, one after the other."""
    numbers = itertools.count()

    def make(size: int) -> list[Peers]:
        name = str(folder / str(next(numbers)))
        calls = [
            lambda rank=rank: gather(name, SECRET, rank, size, CAPACITY, PATIENCE) for rank in range(size)
        ]
        return together(calls)  # type: ignore[arg-type]

    return make


def test_collectives_have_the_bits_of_one_host(tmp_path: Path) -> None:
    """Sums of numbers of very different sizes, which differ with the order of the ranks."""
    random, size = np.random.default_rng(3), 4
    rows = [
        (random.standard_normal((37, 65)) * 10.0 ** random.integers(-6, 6, (37, 65))).astype(np.float32)
        for _ in range(size)
    ]
    order = random.permutation(37)
    one = shared(tmp_path)(size)
    found = []
    for ends in (
        local_peers(size, CAPACITY),
        one,
        linked(2, 2, CAPACITY, shared(tmp_path)),
        linked(4, 1, CAPACITY),
    ):
        groups = [OneShotGroup(end) for end in ends]

        def steps(group: OneShotGroup) -> list[bytes]:
            mine = rows[group.rank]
            part = group.reduce_scatter(mine, [10, 0, 20, 7], order)
            gathered = group.all_gather(part, order)
            told = group.announce(b"from %d" % group.rank)
            notes = group.gather_notes(np.array([group.rank]), np.arange(size))
            summed = group.all_reduce(mine)
            return [part.tobytes(), gathered.tobytes(), summed.tobytes(), told, notes.tobytes()]

        results = together([partial(steps, group) for group in groups])
        assert [result[3] for result in results] == [b"from 0"] * size
        found.append((results, [group.traffic for group in groups]))
        for group in groups:
            group.close()
    assert found[0] == found[1] == found[2] == found[3]


def test_parts_that_no_socket_takes_at_once_and_ranks_of_any_speed() -> None:
    """Every rank sends as much as fits. One rank sleeps before each round, the others do not."""
    ends, rounds = linked(2, 2, CAPACITY), 4

    def run(end: LinkedPeers) -> None:
        for turn in range(rounds):
            threading.Event().wait(0.05 * (end.rank == turn))
            for to, part in enumerate(end.open([CAPACITY // 4] * 4)):
                part[:] = bytes([turn, end.rank, to, 7]) * (CAPACITY // 16)
            for whose, part in enumerate(end.exchange()):
                assert bytes(part) == bytes([turn, whose, end.rank, 7]) * (CAPACITY // 16)

    assert together([partial(run, end) for end in ends]) == [None] * 4
    assert [end.sent_bytes for end in ends] == [rounds * 3 * CAPACITY // 4] * 4
    for end in ends:
        end.close()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_of_any_host_that_ends_is_noticed_by_all(rank: int) -> None:
    ends = linked(2, 2, CAPACITY)
    for end in ends:
        end.open([0] * 4)
    ends[rank].close()
    found = together([end.exchange for end in ends if end.rank != rank])
    assert all(isinstance(one, ConnectionLost) for one in found), found
    for end in ends:
        with pytest.raises(ConnectionLost):
            end.open([0] * 4)
        end.close()


def test_an_interrupted_round_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = linked(2, 1, CAPACITY)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("moesaic.transport.linked_peers._sleep", interrupt)
        first.open([0, 0])
        with pytest.raises(KeyboardInterrupt):
            first.exchange()
    second.open([0, 0])
    second.exchange()  # the part had come
    second.open([0, 0])
    with pytest.raises(ConnectionLost, match="rank 0"):
        second.exchange()
    second.close()


@pytest.mark.parametrize("sent", [[1 << 62], [0, 0, 0]])
def test_a_rank_that_breaks_the_rules_is_refused(sent: list[int]) -> None:
    """It announces a part that is too large, or is more than one round ahead."""
    near, far = socket.socketpair()
    end = LinkedPeers(local_peers(1, CAPACITY)[0], 0, {1: near}, CAPACITY)
    with far:
        far.sendall(b"".join(count.to_bytes(8, "little") for count in sent))
        end.open([0, 0])
        far.settimeout(PATIENCE)
        if len(sent) > 1:
            end.exchange()
            end.open([0, 0])
            end.exchange()
            end.open([0, 0])
            far.sendall(bytes(8 * 3))
        with pytest.raises(ConnectionLost, match="rank 1"):
            while True:
                end.exchange()
                end.open([0, 0])
    end.close()


def test_strangers_at_the_door_do_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    """One says nothing, one knows another secret, and one knows the secret and says nonsense."""
    doors = [Door("tcp:127.0.0.1:0", SECRET, CAPACITY) for _ in range(2)]
    where = addresses.parse(doors[0].address)
    silent, other, mad = (addresses.dial(where, PATIENCE) for _ in range(3))
    terms = Terms("stream", CAPACITY)
    with silent, other, mad:
        with pytest.raises(ConnectionLost):
            prove_as_client(other, b"some other secret", terms, Deadline(PATIENCE))
        prove_as_client(mad, SECRET, terms, Deadline(PATIENCE))
        mad.sendall(b"not a record at all, and long enough to be one")
        ends = together(
            [
                lambda: link(local_peers(1, CAPACITY)[0], doors[0], Place(0, 2, 0, 1), "", PATIENCE),
                lambda: link(
                    local_peers(1, CAPACITY)[0], doors[1], Place(1, 2, 0, 1), doors[0].address, PATIENCE
                ),
            ]
        )
    assert all(isinstance(end, LinkedPeers) for end in ends), ends
    assert "dropped" in caplog.text
    for end in ends:
        end.close()


def test_a_rank_that_never_comes_is_given_up_and_nothing_stays_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    door = Door("tcp:127.0.0.1:0", SECRET, CAPACITY)
    with pytest.raises(ConnectionLost, match="rank 0 of 2 did not reach all ranks of other hosts: timed out"):
        link(local_peers(1, CAPACITY)[0], door, Place(0, 2, 0, 1), "", 0.2)
    for end in linked(2, 2, CAPACITY):
        end.close()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_more_than_a_round_holds_is_refused_and_the_group_goes_on() -> None:
    first, second = linked(2, 1, CAPACITY)
    with pytest.raises(ConfigError, match=f"bytes of a round: got {CAPACITY + 1}"):
        first.open([1, CAPACITY])
    for end in (first, second):
        end.open_for_all(CAPACITY)[:2] = b"ok"
    for parts in together([first.exchange, second.exchange]):
        assert [bytes(part[:2]) for part in parts] == [b"ok", b"ok"]
    for end in (first, second):
        end.close()
