"""Rounds among the processes of one host, through memory that all of them map. csrc/peers.h has the layout.

A round needs no system call while all processes are awake. A waiting process polls for a moment, then sleeps
on its sockets. There is a socket between any two ranks. When it closes, the peer has died. The rank that
completes a round wakes each sleeping rank with one byte.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence

from moesaic.core.errors import ConnectionLost
from moesaic.transport import _shm
from moesaic.transport.peers import refuse
from moesaic.transport.waiting import SPIN_SECONDS

MAX_PEERS = _shm.PEERS


class SharedPeers:
    """A Peers on `mapping`, which rank 0 has made with `shm.make_segment`.

    sockets: rank -> the socket to it. They belong to this object from now on.
    spin: seconds to poll before sleeping.

    Raises ConnectionLost if the memory is not that of this group.
    """

    def __init__(
        self,
        mapping: _shm.Mapping,
        rank: int,
        sockets: Mapping[int, socket.socket],
        spin: float = SPIN_SECONDS,
    ) -> None:
        self.rank, self.size, self.sent_bytes = rank, len(sockets) + 1, 0
        try:
            self._core = _shm.Peers(mapping, rank, self.size)
        except (_shm.Broken, ValueError) as error:
            raise ConnectionLost(f"the group's memory was refused: {error}") from None
        self._spin, self._round_bytes, self._loss_reason = spin, 0, ""
        self._sockets = dict(sockets)
        self._ranks = {sock.fileno(): peer for peer, sock in sockets.items()}
        self._gone_ranks: set[int] = set()
        self._poller = select.poll()
        for sock in sockets.values():
            sock.setblocking(False)
            self._poller.register(sock, select.POLLIN)

    def open(self, sizes: Sequence[int]) -> list[memoryview]:
        self._check()
        try:
            views = self._core.open(sizes)
        except ValueError:
            raise refuse(sum(sizes), self._core.capacity) from None
        self._round_bytes = sum(sizes) - sizes[self.rank]
        return views

    def open_for_all(self, count: int) -> memoryview:
        self._check()
        try:
            view = self._core.open_for_all(count)
        except ValueError:
            raise refuse(count, self._core.capacity) from None
        self._round_bytes = count * (self.size - 1)
        return view

    def exchange(self) -> list[memoryview]:
        self._check()
        for rank in self._core.post():
            self._wake(rank)
        self.sent_bytes += self._round_bytes
        try:
            while not self._core.wait(self._spin):
                self._sleep()
            return self._core.take()
        except _shm.Broken as error:
            raise ConnectionLost(self._end(str(error))) from None
        except BaseException:  # an interrupted round ends the group for all ranks
            self._end("a round was interrupted")
            raise

    def close(self) -> None:
        self._loss_reason = self._loss_reason or "this end of the group is closed"
        self._core.close()
        for sock in self._sockets.values():
            sock.close()

    def _sleep(self) -> None:
        """Sleep until the round is complete or a rank is gone. It may return too early."""
        self._check_missing()
        try:
            if not self._core.arm():
                for descriptor, _ in self._poller.poll():
                    self._drain(descriptor)
        finally:
            self._core.disarm()

    def _drain(self, descriptor: int) -> None:
        """Read the wakeup bytes of a peer. When the peer closed its socket, mark its rank as gone."""
        rank = self._ranks[descriptor]
        try:
            if self._sockets[rank].recv(4096):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # a reset connection counts as closed
        self._gone_ranks.add(rank)
        self._poller.unregister(descriptor)

    def _check_missing(self) -> None:
        """Raise ConnectionLost if a rank is gone that has not posted.

        What a rank posted before it died counts.
        """
        missing_ranks = self._gone_ranks.intersection(self._core.missing())
        if missing_ranks:
            raise ConnectionLost(self._end(f"rank {min(missing_ranks)} of the group is gone"))

    def _wake(self, rank: int) -> None:
        try:
            self._sockets[rank].send(b"!", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # a full socket wakes the peer anyway; a closed one is found when it is read

    def _end(self, reason: str) -> str:
        """End the group for this reason, or keep the first one. Returns the reason."""
        self._loss_reason = self._loss_reason or reason
        self.close()
        return self._loss_reason

    def _check(self) -> None:
        if self._loss_reason:
            raise ConnectionLost(self._loss_reason)
