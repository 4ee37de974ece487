"""`moesaic cluster init` makes a secret once, and its commands are understood."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from moesaic.commands import cli, join, serve
from moesaic.transport.secret import read_secret


def test_it_writes_a_secret_that_only_this_user_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a secret"
    assert cli.main(["cluster", "init", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    secret = read_secret(file, "--secret-file")
    assert len(bytes.fromhex(secret.decode())) == 32
    said = capsys.readouterr().out
    assert secret.decode() not in said and f"--secret-file {shlex.quote(str(file))}\n" in said


def test_every_secret_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["cluster", "init"]) == 0, "without a name it is cluster.secret"
    assert cli.main(["cluster", "init", "other"]) == 0
    assert Path("cluster.secret").read_text() != Path("other").read_text()


def test_it_replaces_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "secret"
    file.write_text("precious")
    assert cli.main(["cluster", "init", str(file)]) == 2
    assert file.read_text() == "precious"
    expected = f"moesaic: FILE: got '{file}'; allowed: a new file, since a secret is never replaced\n"
    assert capsys.readouterr() == ("", expected)
    assert cli.main(["cluster", "init", str(tmp_path / "none" / "secret")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_its_commands_are_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a secret"
    assert cli.main(["cluster", "init", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(file) and set(said) == {"file", "serve", "join"}
    asked: list[Any] = []
    monkeypatch.setattr(serve, "run", lambda *settings: asked.append(settings[1]) or 0)
    monkeypatch.setattr(join, "run", lambda options, as_json: asked.append(options) or 0)
    for line in (said["serve"], said["join"]):
        program, *words = shlex.split(line.replace("MODEL", "demo"))
        assert program == "moesaic" and cli.main(words) == 0
    cluster, joining = asked
    assert cluster.cluster_secret_file == joining.secret_file == str(file)
    assert cluster.cluster_address == f"tcp:{joining.address}"
