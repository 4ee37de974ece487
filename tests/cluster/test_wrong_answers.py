"""Expert servers that answer NaN where the checkpoint gives finite numbers are sent away or restarted."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.models import files
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_other_weights import answers, failures
from tests.support import nan_server, pairs
from tests.support.cluster_driver import cluster

COUNT, TOKENS = 6, 48
HANGING = 30.0
"""Seconds between two tokens after which a server was not replaced in time, on a busy machine too."""
REASON = "answered NaN or infinities for expert"


RESTARTED = list(itertools.product(("lockstep", "async", "barrier"), (1, 2)))
NOW = (("async", 2), ("barrier", 1))
"""Schedule, and copies of each expert."""


@pytest.mark.parametrize(("schedule", "replicas"), pairs.some(RESTARTED, NOW))
def test_a_server_of_this_host_is_restarted(tmp_path: Path, schedule: str, replicas: int) -> None:
    expected = alone(*workload(COUNT, TOKENS))
    with (
        nan_server.one_broken_server(tmp_path / "broken"),
        cluster(expert_servers=2, min_replicas=replicas, schedule=schedule) as served,
    ):
        assert answers(served) == expected
        assert failures(served).count(REASON) == 1 and ": killing it" in failures(served)
        assert served.running.longest_gap < HANGING
        served.until(lambda: all(member.stage == "serving" for member in served.supervisor.status()))
        assert answers(served) == expected


@pytest.mark.slow
def test_a_joiner_is_refused_on_both_sides(door: dict[str, Any], tmp_path: Path) -> None:
    expected = alone(*workload(COUNT, TOKENS))
    with cluster(**door) as served:
        address = (served.supervisor.report().join_address or "").removeprefix("tcp:")
        flags = ["--secret-file", door["cluster_secret_file"], "--threads", "1", "--role", "expert-server"]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.support.nan_server", "join", address, *flags],
            env=os.environ | nan_server.environment(tmp_path / "broken"), stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            while REASON not in failures(served):
                assert answers(served) == expected
            said = process.communicate(timeout=60)[1]
        assert process.returncode == 1
        assert f"refused this server: it {REASON}" in said.splitlines()[-1]
        served.until(lambda: len(served.supervisor.status()) == 2)
        assert answers(served) == expected


@pytest.mark.slow
def test_nan_in_the_checkpoint_ends_requests_and_no_server(tmp_path: Path) -> None:
    """An expert that each prompt of the workload meets has NaN on every server."""
    path = tmp_path / "model"
    shutil.copytree(files.resolve("demo"), path)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if "layers.0.mlp.experts" in name and "down_proj" in name:
            tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, path / "new", metadata={"format": "pt"})
    (path / "new").replace(path / "model.safetensors")
    with cluster(str(path), expert_servers=2, min_replicas=2) as served:
        assert [tokens for tokens, _ in answers(served)] == [[]] * COUNT
        assert failures(served) == ""
        assert served.broken_off == 0
