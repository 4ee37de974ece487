"""Attention workers and prefill workers join over TCP, serve, leave and die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moesaic.core.cluster_status import ProcessStatus
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_other_weights import copied, without_down_projections
from tests.support import pairs
from tests.support.cluster_driver import Answer, Cluster, cluster
from tests.support.processes import gone

COUNT, TOKENS = 6, 48
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


@contextmanager
def worker(
    served: Cluster, door: dict[str, Any], role: str = "attention-worker", *flags: str
) -> Iterator[subprocess.Popen[str]]:
    """`moesaic join` as a person types it."""
    address = served.supervisor.report().join_address
    assert address is not None
    command = [sys.executable, "-m", "moesaic", "join", address.removeprefix("tcp:"), "--role", role]
    command += ["--secret-file", str(door["cluster_secret_file"]), "--threads", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def joined(served: Cluster, role: str = "attention worker") -> ProcessStatus | None:
    """The member that joined, once it serves and gets requests, which is a moment later."""
    found = [one for one in served.supervisor.status() if one.host and one.role == role]
    known = bool(found) and found[0].name in served.supervisor.worker_stats()
    return found[0] if known and found[0].stage == "serving" else None


def child_of(process: subprocess.Popen[str]) -> int:
    """The process that computes."""
    [pid] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(pid)


def steps_of(served: Cluster, name: str) -> int:
    stats = served.supervisor.worker_stats().get(name)
    return 0 if stats is None else stats.steps


@pytest.mark.parametrize("servers", pairs.some([0, 1], [1]))
def test_a_worker_joins_serves_and_dies(servers: int, expected: list[Answer], door: dict[str, Any]) -> None:
    """Its requests go on at the others, and the command joins again as a new member."""
    with cluster(**door | {"expert_servers": servers}) as served, worker(served, door) as process:
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: joined(served) is not None)
        first = joined(served)
        assert first is not None and first.host == "127.0.0.1" and first.pid is None
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: steps_of(served, first.name) >= 20)
        child = child_of(process)
        subprocess.run(["kill", "-9", str(child)], check=True)
        served.until(lambda: (joined(served) or first).number > first.number)
        assert gone(child) and process.poll() is None
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 3 * expected
        assert served.supervisor.report().counters.process_deaths == 1


def test_a_worker_goes_when_it_is_sent_away_or_its_parent_dies(
    expected: list[Answer], door: dict[str, Any]
) -> None:
    with cluster(**door) as served, worker(served, door) as process:
        served.until(lambda: joined(served) is not None)
        served.submit(*workload(COUNT, TOKENS))
        future = served.supervisor.scale(attention_workers=1)
        served.until(future.done)
        future.result()
        assert process.wait(60) == 0
        with worker(served, door) as second:
            served.until(lambda: joined(served) is not None)
            child = child_of(second)
            second.kill()
            served.until(lambda: gone(child))
        assert served.finish() == expected
        assert served.broken_off == 0


def test_a_prefill_worker_joins_and_takes_prompts(expected: list[Answer], door: dict[str, Any]) -> None:
    with (
        cluster(**door | {"prefill_workers": 1}) as served,
        worker(served, door, "prefill-worker") as process,
    ):
        served.until(lambda: joined(served, "prefill worker") is not None)
        member = joined(served, "prefill worker")
        assert member is not None
        for _ in range(2):
            served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 2 * expected
        assert served.supervisor.worker_stats()[member.name].transfers.sent_requests > 0
        process.kill()
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 3 * expected


@pytest.mark.parametrize(
    ("role", "settings", "why"),
    [
        ("prefill-worker", {}, "the cluster was started without --prefill-workers"),
        ("expert-server", {"expert_servers": 0}, "the cluster was started without --expert-servers"),
    ],
)
def test_a_role_that_the_cluster_has_not_is_refused(
    role: str, settings: dict[str, Any], why: str, door: dict[str, Any]
) -> None:
    with cluster(**door | settings) as served, worker(served, door, role) as process:
        assert process.wait(30) == 1
        assert process.stderr is not None and f"--role {role}: {why}" in process.stderr.read()
        served.until(lambda: bool(served.supervisor.report().failures))
        assert f"is refused: --role {role}: {why}" in served.supervisor.report().failures[-1].what


def test_a_worker_with_another_checkpoint_is_refused(door: dict[str, Any], tmp_path: Path) -> None:
    other = without_down_projections(copied(tmp_path / "other"))
    with (
        cluster(**door) as served,
        worker(served, door, "attention-worker", "--model", str(other)) as process,
    ):
        said = process.communicate(timeout=60)
        assert (process.returncode, said[1].count("\n")) == (2, 1)
        assert f"--model: got '{other}'" in said[1] and "other bytes of tensors" in said[1]
        served.until(lambda: len(served.supervisor.status()) == 2)
