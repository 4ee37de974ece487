"""A recorded run of a real expert server, fed to the server of the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from moesaic.core.paced_devices import LinkModel
from moesaic.planning.sim.client import SimulatedExperts
from moesaic.planning.sim.connection import AtBarrier, Call, Connection, Hello, Submission
from moesaic.planning.sim.device import Device, Stream
from moesaic.planning.sim.server import SimulatedServer
from moesaic.planning.sim.timeline import Timeline
from moesaic.policy.fleet.replicas import Replicas
from moesaic.policy.scheduling.schedulers.expert_server import Run
from tests.support.recorded_cluster import RecordedService

EARLIER = 1e-8


def turns(log: list[tuple[Any, ...]]) -> Iterator[tuple[float, list[tuple[Any, ...]], Run | None]]:
    """(when it looked, what it took, its run) of each turn of the server's loop.

    What it took is (now, call, client, layer, experts) or, at the barrier, (now, whether it opened).
    """
    calls: list[tuple[Any, ...]] = []
    for kind, *rest in log:
        if kind == "arrived":
            calls.append(tuple(rest))
        elif kind == "barrier":
            calls.append((*rest, False))
        elif kind == "opened":
            calls[-1] = (calls[-1][0], True)
        else:
            yield (calls[0][0] if calls else rest[0]), calls, rest[1]
            calls = []


def replay(recorded: RecordedService, fresh: RecordedService, experts: int) -> list[Run]:
    """The runs of the simulation's server, which gets the recorded calls at the times at which the real one
    looked. Its runs take as long as they took.
    """
    found = list(turns(recorded.log))
    took = iter(
        [after[0] - now for (now, _, run), after in pairwise(found) if run is not None and _pairs(run)]
    )
    timeline = Timeline(found[0][0] - 1.0)
    link = LinkModel(0.0, 1e18)
    server = SimulatedServer(
        0,
        timeline,
        Device("server", timeline),
        Stream("server", timeline, link),
        fresh,
        lambda pairs, chosen: next(took, 0.0),
        (1 + max(fresh._layers), experts),
        1,
    )
    client = SimulatedExperts(timeline, Stream("worker", timeline, link), Replicas(), experts, 1)
    connection = Connection(0, client, server)
    client.take = lambda connection, news: None  # type: ignore[method-assign]
    server.take(connection, Hello())
    computing, step = False, 1
    for now, calls, run in found:
        for taken in calls:
            message = AtBarrier(taken[1], step) if len(taken) == 2 else _call(connection, taken)
            step += len(taken) == 2 and taken[1]
            timeline.schedule(now - EARLIER if computing else now, partial(server.take, connection, message))
        computing = run is not None
    timeline.run()
    return [run for _, _, run in turns(fresh.log) if run is not None]


def _pairs(run: Run) -> int:
    """Pairs of a run. One for empty calls alone takes no time."""
    return sum(len(pairs) for _, pairs in run.parts)


def _call(connection: Connection, taken: tuple[Any, ...]) -> Call:
    now, number, _, layer, ids = taken
    one = Submission(number, layer, ids, 1, len(ids))
    pairs = len(ids)
    call = connection.calls[number] = Call(number, one, np.arange(pairs), ids, pairs, max(1, pairs), now)
    return call
