"""A child process that joins stays when its connection ends, if it can."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.cluster.joining import child, worker
from moesaic.cluster.joining.options import JoinOptions
from moesaic.config import ModelConfig, ParallelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.runtime.keeping import KeptModel
from moesaic.transport.authentication import PeerRefused

JOINING = JoinOptions("tcp:h:1", "attention-worker", model="m")


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that a child runs. Its first line of input is the secret."""
    program = tmp_path / "python"
    program.write_text("")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def script(*lines: str) -> str:
    return "\n".join(["#!/bin/sh", "read secret", *lines, ""])


def test_it_is_asked_again_and_not_started_again(says: Path) -> None:
    joined = """echo '["joined", "'$$'", false]'"""
    lost = """echo '["lost", "gone", true]'; read again"""
    says.write_text(script(joined, lost, """echo '["refused", "full", true]'; read again""", joined))
    models: list[str] = []
    with child.KeptChild() as serve_once:
        with pytest.raises(ConnectionLost, match="gone"):
            serve_once(JOINING, b"s" * 32, models.append)
        with pytest.raises(PeerRefused, match="full"):
            serve_once(JOINING, b"s" * 32, models.append)
        assert serve_once(JOINING, b"s" * 32, models.append) == 0
    assert len(models) == 2 and models[0] == models[1]


def test_one_that_has_ended_is_started_again(says: Path) -> None:
    says.write_text(script("""echo '["joined", "'$$'", false]'; echo '["lost", "gone", false]'; exit 1"""))
    models: list[str] = []
    with child.KeptChild() as serve_once:
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="gone"):
                serve_once(JOINING, b"s" * 32, models.append)
    assert len(set(models)) == 2


def test_it_ends_with_its_command(says: Path) -> None:
    says.write_text(script("""echo '["joined", "'$$'", false]'; echo '["lost", "gone", true]'; sleep 60"""))
    models: list[str] = []
    with child.KeptChild() as serve_once, pytest.raises(ConnectionLost, match="gone"):
        serve_once(JOINING, b"s" * 32, models.append)
    assert not Path(f"/proc/{models[0]}").exists()


class Cluster:
    """A cluster whose connection ends while the worker serves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: WorkerConfig, seconds: float) -> None:
        """seconds: that a step under way still takes."""
        self.ended: list[str] = []
        self.kept: object = "nobody served"
        step = threading.Event()

        def connect(joining: JoinOptions, secret: bytes, end: Any, ring: Any) -> tuple[Any, str]:
            self._reader = threading.Thread(target=end)
            return SimpleNamespace(close=lambda: None), "here"

        def serve(connection: Any, config: Any, wakeup: Any, weights: str, kept: KeptModel | None) -> int:
            self.kept = kept
            self._reader.start()
            step.wait(seconds)
            raise ConnectionLost("gone")

        def leave(code: int) -> None:
            self.ended.append(f"exit {code}")

        enlisted = messages.EnlistReply("m", "w", "")
        monkeypatch.setattr(worker.enlisting, "connect", connect)
        monkeypatch.setattr(worker.enlisting, "enlist", lambda connection, joining: enlisted)
        monkeypatch.setattr(worker.enlisting, "worker_config", lambda *_: config)
        monkeypatch.setattr(worker, "serve", serve)
        monkeypatch.setattr(os, "_exit", leave)

    def join(self, kept: KeptModel | None) -> list[str]:
        """How the process ended. Empty: it stays."""
        with pytest.raises(ConnectionLost, match="gone"):
            worker.serve_once(JOINING, b"s" * 32, lambda model: None, self.ended.append, kept)
        self._reader.join(30)
        return self.ended


ENDED = ["tcp:h:1: the connection is lost", "exit 1"]
ALONE = WorkerConfig(ModelConfig("m"))


@pytest.fixture
def loaded() -> KeptModel:
    kept = KeptModel()
    kept.get("settings", lambda: SimpleNamespace())  # type: ignore[arg-type, return-value]
    return kept


def test_a_worker_finishes_its_step_and_stays(loaded: KeptModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, ALONE, 0.1)
    assert cluster.join(loaded) == [] and cluster.kept is loaded


def test_a_worker_in_a_long_step_ends(loaded: KeptModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STEP_SECONDS", 0.05)
    assert Cluster(monkeypatch, ALONE, 0.5).join(loaded) == ENDED


def test_a_worker_that_still_loads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cluster(monkeypatch, ALONE, 0.1).join(KeptModel()) == ENDED
    assert Cluster(monkeypatch, ALONE, 0.1).join(None) == ENDED


def test_a_group_of_ranks_ends(loaded: KeptModel, monkeypatch: pytest.MonkeyPatch) -> None:
    group = WorkerConfig(ModelConfig("m"), parallel=ParallelConfig(tensor_parallel_size=2))
    cluster = Cluster(monkeypatch, group, 0.1)
    assert cluster.join(loaded) == ENDED and cluster.kept is None
