"""What starts a process on another host, without such a host."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from moesaic.cluster.joining import child, watcher
from moesaic.cluster.joining.options import JoinOptions
from moesaic.cluster.joining.watcher import ProcessWatcher


def options(model: Path) -> JoinOptions:
    return JoinOptions("tcp:127.0.0.1:1", model=str(model), ticket="t")


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text("s" * 32)
    file.chmod(0o600)
    return str(file)


def test_a_checkpoint_that_is_not_on_the_host_is_named(tmp_path: Path, secret: str) -> None:
    why = ProcessWatcher().start(options(tmp_path / "none"), secret)
    assert why is not None and why.startswith(f"--model: got '{tmp_path / 'none'}'; allowed: a directory")


def test_a_secret_that_is_not_on_the_host_is_named_with_what_to_do(tmp_path: Path, secret: str) -> None:
    watching = ProcessWatcher()
    why = watching.start(options(tmp_path), str(tmp_path / "none"))
    assert why is not None and "none: No such file or directory; every node needs" in why
    Path(secret).chmod(0o644)
    why = watching.start(options(tmp_path), secret)
    assert why is not None and "allowed: mode 600" in why
    assert watching.wait() == "it was not started"


@pytest.mark.slow
def test_a_process_that_cannot_join_says_why(tmp_path: Path, secret: str) -> None:
    watching = ProcessWatcher()
    assert watching.start(options(tmp_path), secret) is None
    assert "no connection to tcp:127.0.0.1:1: Connection refused" in watching.wait()


@pytest.fixture
def sleeping(tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch) -> ProcessWatcher:
    """The watcher of a process that does nothing."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    watching = ProcessWatcher()
    assert watching.start(options(tmp_path), secret) is None
    return watching


def test_even_a_frozen_process_is_killed(sleeping: ProcessWatcher) -> None:
    assert sleeping._child is not None
    os.kill(sleeping._child.process.pid, signal.SIGSTOP)
    sleeping.kill()
    assert sleeping.wait() == f"the process {sleeping._child.process.pid} was killed by signal 9"
    sleeping.kill()


def test_the_secret_is_in_no_command_and_no_variable(
    tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def start(joining: JoinOptions, word: bytes, environment: dict[str, str]) -> None:
        seen.extend((joining.to_json(), str(environment), word.decode()))

    monkeypatch.setattr(child, "start", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_JOB_ID", "01")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    watcher.ProcessWatcher().start(options(tmp_path), secret)
    command, variables, word = seen
    assert word == "s" * 32 and word not in command + variables
    assert "'CUDA_VISIBLE_DEVICES': '3'" in variables
    assert "OMP_NUM_THREADS" not in variables and "RAY_" not in variables
