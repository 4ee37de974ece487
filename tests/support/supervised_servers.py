"""Expert servers in threads of this process, and a supervisor that moves their experts while they serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from unittest import mock

from moesaic.config import ExpertServerConfig
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import Directory, ServerEntry
from moesaic.core.messages import Hold, HoldReply
from moesaic.experts import process
from moesaic.transport.stream import StreamConnection, stream_pair
from moesaic.transport.wakeup import Wakeup
from tests.support.served_worker import SECRET

Placement = Sequence[dict[int, list[int]]]
"""What each server holds: layer -> experts."""
Within = Callable[[], AbstractContextManager[object]]
"""What each thread of a server is in, such as another device."""


@contextmanager
def served(config: ExpertServerConfig, within: Within = nullcontext) -> Iterator[StreamConnection]:
    """A server in a thread of its own, and its supervisor's end of the connection."""
    ours, theirs = stream_pair()
    wakeup, run = Wakeup(), process._ExpertLoader._run
    there = StreamConnection(theirs, on_message=wakeup.ring)
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            with within():
                process.serve(there, config, wakeup)
        except BaseException as error:
            failed.append(error)
        finally:
            there.close()

    def load(loader: process._ExpertLoader) -> None:
        with within():
            run(loader)

    thread = threading.Thread(target=serve)
    with mock.patch.object(process._ExpertLoader, "_run", load):
        thread.start()
        here = StreamConnection(ours)
        try:
            yield here
        finally:
            with suppress(ConnectionLost):  # it failed
                here.send(messages.Shutdown())
            thread.join()
            here.close()
            wakeup.close()
            if failed:
                raise failed[0]


class Supervisor:
    """Moves experts from one placement to the next, as `cluster` does. They are loaded first, then the worker
    is told, and once it has no older calls they are dropped where they were."""

    def __init__(self, servers: Sequence[StreamConnection], placements: Sequence[Placement]) -> None:
        """Waits until the servers have the first placement."""
        self._servers, self._left = servers, list(placements)
        self._now, self._version, self._settled = self._left.pop(0), 0, True
        self._next: Placement | None = None
        """What is loaded for the next move."""
        self._missing: set[int] = set()
        self._endpoints: dict[int, Endpoint] = {}
        self.moves = 0
        self.pairs = [0] * len(servers)
        """Pairs that each server has computed, as it said last."""
        self._hold(self._now)
        while self._missing:
            self._listen(0.1)

    @property
    def directory(self) -> Directory:
        entries = [ServerEntry(server, 1, where) for server, where in sorted(self._endpoints.items())]
        return Directory(self._version, entries, dict(enumerate(self._now)))

    def follow(self, said: Sequence[object], send: Callable[[messages.Serving], object]) -> bool:
        """Go on, if the next move can. The first one can at once, so it is made while the worker computes.

        said: messages of the worker. send: tells it. Returns whether all moves are made.
        """
        self._listen(0.0)
        settled = any(
            isinstance(one, messages.DirectorySettled) and one.version >= self._version for one in said
        )
        if settled and not self._settled:
            self._settled = True
            self._hold(self._now)
        if self._settled and not self._missing and not self._next and self._left:
            self._next = self._left.pop(0)
            self._hold([_union(*both) for both in zip(self._now, self._next, strict=True)])
            while self._missing and not self.moves:
                self._listen(0.1)
        if self._settled and not self._missing and self._next:
            self._now, self._next, self._settled = self._next, None, False
            self.moves += 1
            send(messages.Serving(self.directory, SECRET))
        return not self._left and not self._next and self._settled and not self._missing

    def _hold(self, placement: Placement) -> None:
        self._version += 1
        self._missing = set(range(len(self._servers)))
        for server, held in zip(self._servers, placement, strict=True):
            server.send(Hold(self._version, held, SECRET))

    def _listen(self, timeout: float) -> None:
        for number, server in enumerate(self._servers):
            while (message := server.receive(timeout)) is not None:
                assert not isinstance(message, messages.WorkerFailed), message
                if isinstance(message, messages.ServerReport):
                    self.pairs[number] = message.stats.pairs
                if isinstance(message, HoldReply) and message.version == self._version:
                    self._endpoints[number] = message.endpoint
                    self._missing.discard(number)


def _union(one: dict[int, list[int]], other: dict[int, list[int]]) -> dict[int, list[int]]:
    return {layer: sorted({*one.get(layer, ()), *other.get(layer, ())}) for layer in {*one, *other}}
