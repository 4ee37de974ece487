"""An expert server that joined loads nothing again when it comes back, also to another supervisor."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster.joining import loop, server
from moesaic.cluster.joining.options import JoinOptions, OnJoined
from moesaic.experts.keeping import KeptExperts
from moesaic.experts.store import Store
from moesaic.transport.secret import read_secret
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Cluster, cluster

WORK = workload(4, 32)


class Joined:
    """An expert server that joins from a thread of this process."""

    def __init__(self, address: str, secret: Path, may_call: bool = True) -> None:
        self.kept = KeptExperts()
        self.may_call = threading.Event()
        """It does not connect before this is set."""
        if may_call:
            self.may_call.set()
        joining, word = JoinOptions(address, threads=1), read_secret(secret, "x")

        def life(on_joined: OnJoined) -> int:
            self.may_call.wait()
            return server.serve_once(joining, word, on_joined, self.kept)

        self._thread = threading.Thread(target=loop.join, args=(life, lambda model: None))
        self._thread.start()

    def end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(layer, expert) of each expert that servers of this process load."""
    found, take = [], Store._load_expert

    def counted(store: Store, layer: int, expert: int) -> None:
        found.append((layer, expert))
        take(store, layer, expert)

    monkeypatch.setattr(Store, "_load_expert", counted)
    return found


def serving(served: Cluster) -> list[int]:
    found = served.supervisor.status()
    return [one.number for one in found if one.role == "expert server" and one.stage == "serving"]


def settled(served: Cluster, servers: list[int]) -> None:
    served.until(lambda: serving(served) == servers and served.supervisor.report().change is None)


@pytest.mark.slow
def test_who_lost_its_cluster_loads_nothing_again(door: dict[str, Any], loads: list[tuple[int, int]]) -> None:
    """Its connection is closed twice: without a request, and while requests run."""
    with cluster(**door) as served:
        address = served.supervisor.report().join_address
        assert address is not None
        joined = Joined(address, Path(door["cluster_secret_file"]))
        settled(served, [0, 1])
        assert served.supervisor.placement is not None
        first = served.supervisor.placement.server_experts(1)
        loaded = len(loads)
        assert loaded == sum(map(len, first.values()))
        served.supervisor.kill("expert server 1")
        settled(served, [0, 2])
        served.submit(*WORK)
        served.until(lambda: served.running.tokens > 20)
        served.supervisor.kill("expert server 2")
        assert served.finish() == alone(*WORK)
        settled(served, [0, 3])
        assert served.supervisor.placement.server_experts(3) == first
        assert joined.kept.num_loads == 1 and len(loads) == loaded
        served.submit(*WORK)
        assert served.finish() == 2 * alone(*WORK)
    joined.end()
