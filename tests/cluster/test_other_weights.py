"""Servers, workers and ranks whose checkpoint is not the one that the cluster began with are refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.cluster import weight_check
from moesaic.core.errors import ConnectionLost
from moesaic.models import files, fingerprint
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_join_listener import joiner, newcomer
from tests.support import tiny_models
from tests.support.cluster_driver import Answer, Cluster, cluster

COUNT, TOKENS = 6, 48


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


def copied(to: Path) -> Path:
    shutil.copytree(files.resolve("demo"), to)
    return to


def without_down_projections(path: Path) -> Path:
    """The checkpoint with zeroed down projections of the experts, in a file that replaces the old one."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "experts" in name and "down_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, path / "new")
    (path / "new").replace(file)
    return path


def answers(served: Cluster) -> list[Answer]:
    served.submit(*workload(COUNT, TOKENS))
    return served.finish()[-COUNT:]


def failures(served: Cluster) -> str:
    return "\n".join(failure.what for failure in served.supervisor.report().failures)


@pytest.mark.slow
def test_a_joiner_with_zeroed_experts_is_refused_on_both_sides(
    expected: list[Answer],
    door: dict[str, Any],
    tmp_path: Path,
) -> None:
    other = without_down_projections(copied(tmp_path / "other"))
    with cluster(**door) as served:
        served.submit(*workload(COUNT, TOKENS))
        with joiner(served, door["cluster_secret_file"], "--model", str(other)) as process:
            said = process.communicate(timeout=60)
        assert (process.returncode, said[0].count("\n")) == (2, 1)
        assert said[1].count("\n") == 1 and f"--model: got '{other}'" in said[1]
        assert "this one has other bytes of tensors" in said[1]
        served.until(lambda: "other bytes of tensors" in failures(served))
        served.until(lambda: len(served.supervisor.status()) == 2)
        assert served.finish() == expected


@pytest.mark.slow
def test_a_joiner_serves_a_checkpoint_whose_config_it_changes_by_hand(
    expected: list[Answer], door: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = copied(tmp_path / "other")
    tiny_models.edit(other, attention_sinks=4)
    flags = ["--model", str(other)]
    with cluster(**door) as served:
        with joiner(served, door["cluster_secret_file"], *flags) as process:
            said = process.communicate(timeout=60)
        assert process.returncode == 2 and said[1].count("\n") == 1 and str(other) in said[1]
        flags += ["--hf-overrides", '{"attention_sinks": null}']
        with joiner(served, door["cluster_secret_file"], *flags):
            served.until(lambda: newcomer(served) is not None)
            assert answers(served) == expected


PRETENDING = """
import sys
from moesaic.models import fingerprint
fingerprint.compute_fingerprint = lambda path: {same!r}
from moesaic.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("patience", [60.0, 0.0], ids=["before it serves", "while it serves"])
def test_a_joiner_whose_samples_are_equal_is_refused_by_its_digests(
    expected: list[Answer],
    door: dict[str, Any],
    tmp_path: Path,
    patience: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its down projections are zeros, and the fingerprint that it computes does not show it."""
    monkeypatch.setattr(weight_check, "SECONDS", patience)
    other = without_down_projections(copied(tmp_path / "other"))
    program = PRETENDING.format(same=fingerprint.compute_fingerprint(files.resolve("demo")))
    with cluster(**door) as served:
        address = (served.supervisor.report().join_address or "").removeprefix("tcp:")
        flags = ["--secret-file", door["cluster_secret_file"], "--threads", "1", "--model", str(other)]
        command = [sys.executable, "-c", program, "join", address, *flags, "--role", "expert-server"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if patience:
            assert answers(served) == expected
        served.until(lambda: "is refused: expert" in failures(served))
        said = process.communicate(timeout=60)
        assert process.returncode == 1 and said[1].count("\n") == 1
        assert (
            "refused this server: expert" in said[1] and "not those of this cluster's checkpoint" in said[1]
        )
        served.until(lambda: len(served.supervisor.status()) == 2)
        assert answers(served) == expected


@pytest.mark.slow
def test_who_has_the_same_weights_serves_after_its_digests_were_compared(
    expected: list[Answer],
    door: dict[str, Any],
    tmp_path: Path,
) -> None:
    same = copied(tmp_path / "same")
    with cluster(**door) as served, joiner(served, door["cluster_secret_file"], "--model", str(same)):
        served.until(lambda: newcomer(served) is not None)
        assert answers(served) == expected
        served.until(lambda: (one := newcomer(served)) is not None and one.stats.pairs > 0)


@pytest.mark.slow
def test_a_refused_server_gets_no_rows_while_it_leaves(
    expected: list[Answer], door: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused while it serves, and does not leave at all."""
    same = copied(tmp_path / "same")
    with cluster(**door) as served, joiner(served, door["cluster_secret_file"], "--model", str(same)):
        served.until(lambda: newcomer(served) is not None)
        supervisor = served.supervisor
        [member] = [one for one in supervisor._members.servers if one.is_external]
        monkeypatch.setattr(supervisor._members, "refuse", lambda member, reason: None)
        supervisor._members.inbox.put(lambda: supervisor._trust.refuse(member, "of this test"))
        served.until(lambda: "of this test" in failures(served))
        placement = supervisor.placement
        assert placement is not None
        assert member.number not in supervisor._publisher.directory(placement).experts
        member.child.kill()  # type: ignore[union-attr]
        served.until(lambda: len(supervisor.status()) == 2)
        assert answers(served) == expected


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["attention worker 0", "expert server 0"])
def test_a_process_that_starts_again_after_the_files_changed_is_refused(
    expected: list[Answer], tmp_path: Path, killed: str
) -> None:
    path = copied(tmp_path / "model")
    with cluster(model=str(path), attention_workers=2, expert_servers=2, min_replicas=2) as served:
        without_down_projections(path)
        os.kill(served.pid(killed), signal.SIGKILL)
        served.until(lambda: "the files changed since they were first read" in failures(served))
        assert f"{killed}: {path}: " in failures(served)
        assert answers(served) == expected


@pytest.mark.slow
def test_a_rank_is_refused_if_the_files_change_while_a_group_starts(tmp_path: Path) -> None:
    path = copied(tmp_path / "model")
    stamp = fingerprint.stamp(path)
    without_down_projections(path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("moesaic.cluster.launch.fingerprint.stamp", lambda path: stamp)
        with (
            pytest.raises(ConnectionLost, match="the files changed since they were first read"),
            cluster(model=str(path), attention_workers=1, expert_servers=0, tensor_parallel_size=2),
        ):
            pass
