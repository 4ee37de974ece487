"""Somebody between a cluster and a server that joined over TCP changes bits: every token is right."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import cluster
from tests.support.flipping_relay import Change, relay

COUNT, TOKENS = 6, 48
JOIN = """
import sys
from moesaic.core.endpoint import Endpoint
from moesaic.transport import listening
made = listening.Listener.__init__

def told(self, *arguments, **named):
    made(self, *arguments, **named)
    self.endpoint = Endpoint({address!r}, {address!r})  # what it tells the cluster: the relay's

listening.Listener.__init__ = told
from moesaic.__main__ import main
raise SystemExit(main())
"""
IN_THE_HANDSHAKE = [Change("up", 45, 2), Change("down", 12, 6)]
CONTROL = [Change("up", 2000, 3), Change("down", 700, 0), Change("up", 700, 7), Change("down", 350, 5)]
BULK = [
    *(Change("up", 3000, 1), Change("down", 9000, 6), Change("down", 150, 0), Change("up", 400, 2)),
    *(Change("up", 50_001, 4), Change("down", 30_000, 7), Change("up", -1, 0), Change("down", -3, 0)),
]


HOST = "127.0.0.10"
"""Where the server listens. Nobody else binds here, so a port that was free stays free."""


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.slow
def test_changed_bits_cost_a_pause_and_no_token(tmp_path: Path) -> None:
    secret, port, batches = tmp_path / "secret", free_port(), 0
    changes = [CONTROL[0], *IN_THE_HANDSHAKE, *CONTROL[1:]]
    shape = {"cluster_address": "tcp:127.0.0.1:0", "cluster_secret_file": str(secret), "expert_servers": 1}
    with (
        cluster(**shape, rebalance_interval=0.0) as served,  # type: ignore[arg-type]
        relay(served.supervisor.report().join_address or "", *changes) as control,
        relay(f"{HOST}:{port}", *BULK) as bulk,
    ):
        command = [sys.executable, "-c", JOIN.format(address=f"tcp:127.0.0.1:{bulk.port}")]
        command += ["join", f"127.0.0.1:{control.port}", "--secret-file", str(secret), "--threads", "1"]
        command += ["--role", "expert-server", "--listen", f"{HOST}:{port}"]
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=log) as joiner,
        ):
            try:
                while len(control.flipped) < len(changes) or len(bulk.flipped) < len(BULK):
                    served.submit(*workload(COUNT, TOKENS))
                    batches += 1
                    served.finish()
                    assert joiner.poll() is None, (tmp_path / "log").read_text()
                before = served.supervisor.report()
                served.until(lambda: any(one.address for one in served.supervisor.status()[2:]))
                served.submit(*workload(COUNT, TOKENS))
                answers = served.finish()
            finally:
                joiner.kill()
    assert answers == (batches + 1) * alone(*workload(COUNT, TOKENS))
    assert before.counters.process_deaths == len(CONTROL)
    lines = [failure.what for failure in before.failures if "encrypted record" in failure.what]
    assert lines and all("the connection to 127.0.0.1:" in line and "on the way" in line for line in lines)
    assert "encrypted record" in (tmp_path / "log").read_text()
