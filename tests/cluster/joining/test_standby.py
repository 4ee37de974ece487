"""A standby watches the first serve, and takes over when that one is gone without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cluster.joining.test_loop import OTHER, SECRET, checkpoint, layout, listener
from tests.support.hosts import soon

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining import enlisting, standby
from moesaic.cluster.joining.options import JoinOptions
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport.authentication import PeerRefused


class Watching:
    """A standby in a thread."""

    def __init__(self, address: str, weights: str | None = None, secret: bytes = SECRET) -> None:
        self.said: list[str] = []
        self.error: Exception | None = None
        arguments = address, secret, weights or layout().weights, self.said.append, lambda seconds: None
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def _run(self, *arguments: object) -> None:
        try:
            standby.watch(*arguments)  # type: ignore[arg-type]
        except Exception as error:
            self.error = error

    @property
    def watching(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> list[str]:
        self._thread.join(60)
        assert not self.watching
        if self.error is not None:
            raise self.error
        return self.said


def answering(peers: list[RemoteProcess]) -> Callable[[RemoteProcess], None]:
    """What `moesaic serve` does with a standby."""

    def welcome(process: RemoteProcess) -> None:
        assert process.is_standby
        with suppress(ConnectionLost):  # of one that ends meanwhile
            process.connection.send(messages.EnlistReply("m", layout().weights, ""))
        peers.append(process)

    return welcome


def test_it_takes_over_once_the_first_one_is_gone() -> None:
    peers: list[RemoteProcess] = []
    with listener(answering(peers)) as listening:
        watching = Watching(listening.address)
        soon(lambda: any(line.startswith("watching") for line in watching.said))
        assert watching.watching
    peers[0].connection.close()
    assert watching.end()[-1].endswith("Connection refused: taking over")


def test_a_broken_connection_to_a_first_one_that_lives_is_made_again() -> None:
    peers: list[RemoteProcess] = []
    with listener(answering(peers)) as listening:
        watching = Watching(listening.address)
        for number in (1, 2):
            soon(lambda number=number: len(peers) == number)  # type: ignore[misc]
            peers[-1].connection.close()
        soon(lambda: len(peers) == 3)
        assert watching.watching and "taking over" not in " ".join(watching.said)
    peers[-1].connection.close()
    watching.end()


def test_an_end_on_purpose_is_none_to_take_over_from() -> None:
    peers: list[RemoteProcess] = []
    with listener(answering(peers)) as listening:
        watching = Watching(listening.address)
        soon(lambda: peers)
        address = listening.address
        peers[0].connection.send(messages.Shutdown())
        soon(lambda: f"{address} was shut down: waiting for it" in watching.said)
        peers[0].connection.close()
    assert watching.watching
    with listener(answering(peers), address):
        soon(lambda: len(peers) > 1)
    for peer in peers:
        peer.connection.close()
    assert watching.end()[-1].endswith("taking over")


def test_another_checkpoint_or_secret_is_refused() -> None:
    peers: list[RemoteProcess] = []
    with listener(answering(peers)) as listening:
        other = ".".join(["0" * 16, *layout().weights.split(".")[1:]])
        with pytest.raises(ConfigError, match=r"--standby-for: got .* that one has other config.json"):
            Watching(listening.address, other).end()
        with pytest.raises(PeerRefused, match="another secret"):
            Watching(listening.address, secret=OTHER).end()
    peers[0].connection.close()


def test_addresses_are_tried_in_turn(tmp_path: Path) -> None:
    peers: list[RemoteProcess] = []
    with listener(peers.append) as gone:
        pass
    with listener(peers.append) as there:
        both = JoinOptions(f"{gone.address},{there.address}", model=str(checkpoint(tmp_path)))
        connection, here = enlisting.connect(both, SECRET, None, lambda: None)
        assert here == "127.0.0.1"
        connection.send(messages.Enlist("standby"))
        soon(lambda: peers)
        connection.close()
        peers[0].connection.close()
    with pytest.raises(ConnectionLost) as lost:
        enlisting.connect(both, SECRET, None, lambda: None)
    assert gone.address in str(lost.value) and there.address in str(lost.value)
