"""A server joins over TCP from another address, serves, leaves, dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import ClusterConfig
from moesaic.core.cluster_status import ProcessStatus
from moesaic.core.errors import ConfigError
from moesaic.transport.secret import create_secret, read_secret
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Answer, Cluster, cluster

COUNT, TOKENS = 6, 48


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


@contextmanager
def joiner(served: Cluster, secret_file: str | Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`moesaic join` as a person types it."""
    address = served.supervisor.report().join_address
    assert address is not None
    command = [sys.executable, "-m", "moesaic", "join", address.removeprefix("tcp:")]
    command += ["--secret-file", str(secret_file), "--role", "expert-server", "--threads", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def newcomer(served: Cluster) -> ProcessStatus | None:
    """The server that is no child, once it is in service for good."""
    found = [m for m in served.supervisor.status() if m.address.startswith("tcp:") and m.stage == "serving"]
    return found[0] if found and served.supervisor.report().change is None else None


@pytest.mark.slow
def test_a_server_joins_during_traffic_and_its_death_costs_a_pause(
    expected: list[Answer], door: dict[str, Any]
) -> None:
    with cluster(**door) as served, joiner(served, door["cluster_secret_file"]) as process:
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: newcomer(served) is not None)
        member = newcomer(served)
        assert member is not None and member.experts > 0 and member.pid is None
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: newcomer(served) is not None and newcomer(served).stats.pairs > 0)  # type: ignore[union-attr]
        process.kill()
        served.until(lambda: len(served.supervisor.status()) == 2)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 3 * expected
        report = served.supervisor.report()
        assert report.processes[1].experts == sum(layer.least for layer in report.replicas) * 24
        assert report.counters.process_deaths == 1


@pytest.mark.slow
def test_a_server_that_is_sent_away_ends(expected: list[Answer], door: dict[str, Any]) -> None:
    flags = ("--listen", "127.0.0.2:0")
    with cluster(**door) as served, joiner(served, door["cluster_secret_file"], *flags) as process:
        served.until(lambda: newcomer(served) is not None)
        member = newcomer(served)
        assert member is not None and member.address.startswith("tcp:127.0.0.2:")
        served.submit(*workload(COUNT, TOKENS))
        future = served.supervisor.scale(expert_servers=1)
        served.until(future.done)
        future.result()
        assert process.wait(60) == 0
        assert served.finish() == expected
        assert served.broken_off == 0


@pytest.mark.slow
def test_a_server_that_was_frozen_for_too_long_joins_again(
    expected: list[Answer], door: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(**door) as served, joiner(served, door["cluster_secret_file"]) as process:
        served.until(lambda: newcomer(served) is not None)
        first = newcomer(served)
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: served.running.tokens >= 20)
        monkeypatch.setattr("moesaic.cluster.supervisor.FROZEN_SECONDS", 2.0)
        process.send_signal(signal.SIGSTOP)
        served.until(lambda: len(served.supervisor.status()) == 2)
        process.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        served.until(lambda: newcomer(served) is not None)
        again = newcomer(served)
        assert first is not None and again is not None and again.number > first.number
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: newcomer(served) is not None and newcomer(served).stats.pairs > 0)  # type: ignore[union-attr]
        assert served.finish() == 2 * expected
        assert process.poll() is None


@pytest.mark.slow
def test_a_server_ends_with_its_cluster(door: dict[str, Any]) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(cluster(**door))
        process = stack.enter_context(joiner(served, door["cluster_secret_file"]))
        served.until(lambda: newcomer(served) is not None)
        served._launched.supervisor.stop()  # type: ignore[union-attr]
        assert process.wait(60) == 0


@pytest.mark.slow
def test_who_does_not_know_the_secret_stays_outside(door: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "other"
    create_secret(other)
    with cluster(**door) as served, joiner(served, other) as process:
        assert process.wait(60) == 1
        assert process.stderr is not None
        error = process.stderr.read()
        assert "no connection to tcp:127.0.0.1:" in error and "it has another secret" in error
        assert len(served.supervisor.status()) == 2
        served.until(lambda: served.supervisor.report().counters.refused_connections == 1)


@pytest.mark.slow
def test_without_the_checkpoint_nothing_changes(door: dict[str, Any], tmp_path: Path) -> None:
    flags = ("--model", str(tmp_path / "nowhere"))
    with cluster(**door) as served, joiner(served, door["cluster_secret_file"], *flags) as process:
        assert process.wait(60) == 2
        assert process.stderr is not None and "--model: got" in process.stderr.read()
        served.until(lambda: bool(served.supervisor.report().failures))
        served.until(lambda: len(served.supervisor.status()) == 2)


def test_the_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secret = create_secret(file)
    assert len(secret) == 64 and create_secret(file) == read_secret(file, "--secret-file") == secret
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"--secret-file: got .*mode 640.*; allowed: mode 600"):
        read_secret(file, "--secret-file")
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="5 bytes"):
        read_secret(file, "--secret-file")
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "none", "--secret-file")


def test_address_and_secret_belong_together() -> None:
    with pytest.raises(ConfigError, match="--cluster-secret-file"):
        ClusterConfig(expert_servers=1, cluster_address="tcp:127.0.0.1:0")
