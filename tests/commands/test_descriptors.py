"""The limit on open files, as a shell sets it with ulimit."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import pairs

from moesaic.commands import cli, descriptors
from moesaic.core.errors import ConfigError

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


def limited(limits: str, *command: str) -> list[str]:
    return ["bash", "-c", f'{limits}; exec "$0" -m moesaic "$@"', sys.executable, *command]


COMMANDS = {
    "serve": ("serve", "demo", "--port", "0", "--threads", "1"),
    "run-batch": ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "demo"),
    "join": ("join", "127.0.0.1:9", "--secret-file", "secret"),
}
TOO_SMALL = list(itertools.product(COMMANDS, (14, 20)))
NOW = [("serve", 20), ("run-batch", 20), ("join", 14)]


@pytest.mark.parametrize(("name", "number"), pairs.some(TOO_SMALL, NOW))
def test_a_limit_that_is_too_small_is_one_line(name: str, number: int, tmp_path: Path) -> None:
    command = COMMANDS[name]
    (tmp_path / "in.jsonl").write_text(LINE)
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32 + "\n")
    secret.chmod(0o600)
    done = subprocess.run(
        limited(f"ulimit -n {number}", *command),
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"moesaic: the limit of open files (ulimit -n): got {number}; allowed: at least 48; "
        "raise it with ulimit -n 1024\n"
    )


@pytest.mark.slow
def test_the_soft_limit_is_raised() -> None:
    command = limited("ulimit -Sn 100; ulimit -Hn 3000", "serve", "demo", "--port", "0", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "serving"
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert next(line for line in limits.splitlines() if "open files" in line).split()[3:5] == ["3000"] * 2


def test_more_processes_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    descriptors.prepare(5)
    with pytest.raises(ConfigError, match=r"got 64; allowed: at least 68"):
        descriptors.prepare(6)


def test_running_out_later_is_one_line_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(as_json: bool) -> int:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr("moesaic.commands.doctor.run", exhausted)
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("moesaic: too many open files; the limit of this process is ")
    assert said.count("\n") == 1 and "ulimit -n" in said
