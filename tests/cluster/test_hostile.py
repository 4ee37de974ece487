"""Who knows the secret and sends garbage is dropped with one line in the cluster's log, and that is all."""

from __future__ import annotations

import re
import time
from functools import partial

import pytest

from moesaic.core.errors import ConnectionLost
from moesaic.transport.calls import Caller
from moesaic.transport.listening import connect
from moesaic.transport.sockets import StreamCaller
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Cluster, cluster

COUNT, TOKENS = 4, 24


def client(served: Cluster, kind: str) -> Caller:
    """Another client of expert server 0."""
    [address] = [one.address for one in served.supervisor.status() if one.name == "expert server 0"]
    return connect(address, served.supervisor._secret, kind, 1 << 20)


def is_dropped(caller: Caller) -> bool:
    try:
        caller.poll()
    except ConnectionLost:
        return True
    time.sleep(0.01)
    return False


@pytest.mark.slow
def test_one_line_for_each_hostile_client(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(expert_servers=2) as served:
        pid = served.pid("expert server 0")
        served.submit(*workload(COUNT, TOKENS))
        for kind in ("shm", "stream"):
            caller = client(served, kind)
            call = caller.open(64, 1, 16)
            assert call is not None
            call.request[:] = b"x" * 64
            caller.post(call)
            served.until(partial(is_dropped, caller))
            caller.close()
        raw = client(served, "stream")
        assert isinstance(raw, StreamCaller)
        raw._frames.push([memoryview(b"y" * 4096)])
        served.until(lambda: is_dropped(raw))
        raw.close()
        assert served.finish() == alone(*workload(COUNT, TOKENS))
        assert served.supervisor.report().counters.process_deaths == 0
    lines = capfd.readouterr().err.splitlines()
    found = [re.sub(r"client \d+", "client N", line.partition(" WARNING ")[2]) for line in lines]
    what = "a request has a damaged header or is meant for another model"
    assert found[:2] == [f"expert server {pid}: dropped client N: {what}"] * 2
    assert found[2].startswith(f"expert server {pid}: dropped client N: the client sent a damaged frame")
    assert len(found) == 3, found
