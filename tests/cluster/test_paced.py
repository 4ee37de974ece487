"""The timing of modelled devices: the same tokens, under every schedule and a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moesaic.core.errors import ConfigError
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import cluster

DEVICES = """
source = "made up"
attention = { points_ms = [[8, 1.5], [64, 6]] }
experts = { points_ms = [[8, 1], [64, 4]], per_expert_ms = 0.02 }
link = { latency_us = 100, gb_per_s = 0.05 }
"""


@pytest.fixture
def devices(tmp_path: Path) -> str:
    file = tmp_path / "devices.toml"
    file.write_text(DEVICES)
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"schedule": "lockstep", "attention_workers": 2, "inflight_batches": 2},
        {"schedule": "barrier", "attention_workers": 2},
        {"schedule": "async", "transport": "socket", "queue_policy": "mtfs", "combine": "exact"},
    ],
    ids=["lockstep, two in flight", "barrier", "async, sockets"],
)
def test_the_same_bits_and_a_kill(shape: dict[str, Any], devices: str) -> None:
    with cluster(**shape, expert_servers=2, min_replicas=2, paced=devices) as served:
        served.connected()
        served.submit(*workload(6, 12))
        killed: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 20 and not killed:
                killed.append(served.pid("expert server 1"))
                os.kill(killed[0], signal.SIGKILL)

        assert served.finish(disturb) == alone(*workload(6, 12))
        assert killed
        assert served.supervisor.report().paced == f"{devices}: made up"
        served.until(lambda: served.supervisor.report().counters.paced_runs > 0)  # told a little later


def test_a_wrong_file_is_found_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text("source = 'x'")
    with (
        pytest.raises(ConfigError, match="--paced: .*attention: got None"),
        cluster(expert_servers=1, paced=str(tmp_path / "devices.toml")),
    ):
        pass


def test_it_needs_expert_servers() -> None:
    with (
        pytest.raises(ConfigError, match="--expert-servers: got 0; allowed: at least 1 with --paced"),
        cluster(attention_workers=2, expert_servers=0, paced="x.toml"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["exact", "partial"])
def test_the_same_bits_where_every_part_runs_alone(tmp_path: Path, combine: str) -> None:
    """Workers hear of each part, go on with single rows, and each expert has a queue of its own."""
    file = tmp_path / "policy.toml"
    rules = "[thresholds]\nseparate_rows = 1\ntold_rows = 0\nwaited_pairs = 0\nqueue_pairs = 0\n"
    file.write_text(DEVICES + rules)
    shape = {"schedule": "async", "attention_workers": 2, "expert_servers": 2, "combine": combine}
    with cluster(**shape, schedule_policy_file=str(file)) as served:
        served.connected()
        served.submit(*workload(6, 12))
        answers, wanted = served.finish(), alone(*workload(6, 12))
        assert combine == "partial" or answers == wanted, "partial sums are equal up to rounding"
        assert len(answers) == len(wanted) and served.supervisor.report().paced is None


def test_a_wrong_policy_file_is_found_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(DEVICES + "[thresholds]\nwaited_pairs = -1\n")
    with (
        pytest.raises(
            ConfigError, match="--schedule-policy-file: .*thresholds.waited_pairs: got -1; allowed"
        ),
        cluster(expert_servers=1, schedule_policy_file=str(tmp_path / "policy.toml")),
    ):
        pass


def test_only_one_file_has_the_curves() -> None:
    with (
        pytest.raises(ConfigError, match="--paced and --schedule-policy-file: give one"),
        cluster(expert_servers=1, paced="x.toml", schedule_policy_file="x.toml"),
    ):
        pass
