"""A worker that knows the secret, joins, and sends what no worker of moesaic sends. The service goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from moesaic.cluster.joining import enlisting
from moesaic.cluster.joining.options import JoinOptions
from moesaic.core import messages
from moesaic.core.experts import ExpertLayout
from moesaic.transport.stream import StreamConnection
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Cluster, cluster

COUNT, TOKENS = 3, 16
LAYOUT = ExpertLayout({0: "a"}, "g", "u", "d", 64, 32, 4, 2, "bfloat16")


def damaged(request_ids: list[int]) -> messages.Tokens:
    """Requests without tokens."""
    found = messages.Tokens([], [], [])
    object.__setattr__(found, "request_ids", request_ids)
    return found


@contextmanager
def liar(served: Cluster) -> Iterator[tuple[StreamConnection, messages.Ready]]:
    """A worker that has joined. It gets requests once it sends what it could say of itself."""
    options = JoinOptions(served.supervisor.report().join_address or "", "attention-worker")
    connection, _ = enlisting.connect(options, served.supervisor._secret, None, lambda: None)
    try:
        enlisted = enlisting.enlist(connection, options)
        info = served._launched.engine.info
        assert info is not None
        yield connection, messages.Ready(info, enlisted.weights)
    finally:
        connection.close()


def names(served: Cluster, stage: str = "") -> list[str]:
    return [one.name for one in served.supervisor.status() if one.stage == stage or not stage]


@pytest.mark.slow
def test_lies_of_a_worker_end_its_connection_and_change_no_token(door: dict[str, Any]) -> None:
    expected = alone(*workload(COUNT, TOKENS))
    with cluster(**door | {"expert_servers": 0}) as served:
        for field in ("block_size", "max_model_len"):
            with liar(served) as (connection, ready):
                connection.send(messages.Layout(LAYOUT))
                connection.send(replace(ready, info=replace(ready.info, **{field: 0})))
                served.until(partial(connection.wait_for_end, 0.01))
            assert f"{field}: got 0" in served.supervisor.report().failures[-1].what
        for number, wrong in enumerate((messages.Tokens, damaged)):
            served.until(lambda: names(served) == ["attention worker 0"])
            with liar(served) as (connection, ready):
                connection.send(ready)
                served.until(lambda: len(names(served, "serving")) == 2)
                served.submit(*workload(COUNT, TOKENS))
                ids = list(range(number * COUNT, (number + 1) * COUNT))
                told = (
                    damaged(ids) if wrong is damaged else messages.Tokens(ids, [-1] * COUNT, [None] * COUNT)
                )
                connection.send(told)
                served.until(partial(connection.wait_for_end, 0.01))
                assert served.finish() == (number + 1) * expected
        assert served._launched.engine.dead is None
