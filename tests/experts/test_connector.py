"""Which way leads to a server: shared memory or a socket."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from tests.support.call_pairs import PATIENCE, SECRET

from moesaic.core.experts import ServerEntry
from moesaic.experts.connector import Connector
from moesaic.transport.calls import Caller
from moesaic.transport.listening import Listener
from moesaic.transport.shm import ShmCaller
from moesaic.transport.sockets import StreamCaller
from moesaic.transport.waiting import wait
from moesaic.transport.wakeup import Wakeup


@pytest.mark.parametrize(
    ("transport", "address", "kind"),
    [
        ("shm", "unix:{}/s", ShmCaller),
        ("socket", "unix:{}/s", StreamCaller),
        ("shm", "tcp:127.0.0.1:0", StreamCaller),
        ("socket", "tcp:127.0.0.1:0", StreamCaller),
    ],
)
def test_the_way_to_a_server(
    transport: Literal["shm", "socket"], address: str, kind: type[Caller], tmp_path: Path
) -> None:
    listener, wakeup = Listener(address.format(tmp_path), SECRET), Wakeup()
    connector = Connector(1 << 16, wakeup, transport)
    entry = ServerEntry(3, 1, listener.endpoint)
    try:
        connector.start(entry, SECRET)
        assert wait([], [wakeup.fileno()], PATIENCE)
        [(found, caller)] = connector.made()
        assert found == entry and type(caller) is kind
        caller.close()
    finally:
        connector.stop(3)
        listener.close()
