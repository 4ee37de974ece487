"""Commands of a user who has no home directory and may write nowhere but into one folder.

So does a container run a program under a number that no file of users has. The program belongs to another
user, who lets everybody read it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.troubled_server import PROCESSES, find_free_port, start

from moesaic.commands import doctor, larger_than_memory
from moesaic.commands.cli import main
from moesaic.commands.larger_than_memory import find_machine
from moesaic.commands.machine import examine
from moesaic.config import ModelConfig, OffloadConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home
from moesaic.models import files, fingerprint

USER = "54321"
RIGHT = "+dac_read_search"
"""The user may read what root may: this Python may stand in root's home directory."""


@pytest.fixture
def user() -> tuple[str, ...]:
    """The beginning of a command that this user runs."""
    prefix = ("env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "HF_HOME", "-u", "HF_HUB_CACHE")
    prefix += ("setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", f"--inh-caps=-all,{RIGHT}")
    prefix += (f"--ambient-caps={RIGHT}", f"--bounding-set=-all,{RIGHT}")
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(f"no other user can be had here: {done.stderr.strip()}")
    return prefix


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    os.chown(folder, int(USER), int(USER))
    return folder


def test_a_path_of_a_user_without_a_home_is_refused() -> None:
    assert expand_home("/a/~") == Path("/a/~")
    with pytest.raises(
        ConfigError, match=r"^~no-such-user/m: ~no-such-user has no home directory; give a path"
    ):
        expand_home("~no-such-user/m")


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names a folder, and no file of users has this user."""
    for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: int(USER))


NO_FOLDER = "allowed: a folder, in the environment, since this user has no home directory"


@pytest.mark.usefixtures("without_home")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve org/model", f"HF_HOME: got '~/.cache/huggingface'; {NO_FOLDER}"),
        ("doctor org/model --hardware none", f"HF_HOME: got '~/.cache/huggingface'; {NO_FOLDER}"),
        ('serve demo --hf-overrides {"head_dim":1}', f"XDG_CACHE_HOME: got '~/.cache'; {NO_FOLDER}"),
        ("serve ~/model", "~/model: ~ has no home directory; give a path without ~"),
        ("compress demo ~/out", "~/out: ~ has no home directory; give a path without ~"),
        ("--install-completion", "~: ~ has no home directory; give a path without ~"),
    ],
)
def test_who_needs_a_home_and_has_none_gets_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"moesaic: {message}\n"


@pytest.mark.usefixtures("without_home")
def test_what_is_only_a_convenience_goes_without_a_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint._compute.cache_clear()
    assert fingerprint.compute_fingerprint(files.resolve("demo"))
    assert examine().hub_cache is None
    monkeypatch.setattr(larger_than_memory.hardware, "now", lambda *_: "measured")
    _, _ = find_machine(WorkerConfig(ModelConfig("demo")), OffloadConfig(), is_automatic=True)
    assert capsys.readouterr().err.startswith("moesaic: the next start measures again: XDG_CACHE_HOME: got ")


def test_a_file_without_rights_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no command expects it."""

    def refuse(_: bool) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/other/file")

    monkeypatch.setattr(doctor, "run", refuse)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "moesaic: /other/file: Permission denied\n"


@pytest.mark.slow
def test_a_user_without_rights_is_served(user: tuple[str, ...], own_folder: Path) -> None:
    """A cache is a convenience: digests and figures of the machine are found anew at each start."""
    port = find_free_port()
    folder = own_folder.parent
    with contextlib.closing(start(folder, Path("demo"), *PROCESSES, prefix=user, port=port)) as server:
        server.url = f"http://127.0.0.1:{port}"
        server.until(lambda: server.health().status == 200 or server.process.poll() is not None)
        assert server.ask().tokens == 4 and server.ask(chat=True).tokens == 4, server.log
        assert server.stop() == 0
        assert "Traceback" not in server.log
    body = {"model": "demo", "prompt": "hi", "max_tokens": 4}
    (folder / "in").write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
    )
    words = f"run-batch -i {folder}/in -o {own_folder}/out --model demo"
    command = [*user, sys.executable, "-m", "moesaic", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert json.loads((own_folder / "out").read_text())["response"]["status_code"] == 200
