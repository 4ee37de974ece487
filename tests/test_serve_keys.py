"""Keys of real servers: who gets to know them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.processes import all_children
from tests.test_serve import COMMAND

pytestmark = pytest.mark.slow
API_KEY, ADMIN_KEY = "k3y-of-clients", "k3y-of-admins"
CLUSTER = ("--attention-workers", "1", "--expert-servers", "1")


@contextmanager
def serving(
    log: Path, *flags: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A server and what it announced. Everything else that it prints goes to `log` in the end."""
    process = subprocess.Popen(
        [*COMMAND, *flags, "--json", "--access-log"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        log.write_text("".join(process.communicate(timeout=60)))
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def scale(url: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moesaic", "scale", "--base-url", url, "--expert-servers", "1"]
    return subprocess.run(
        [*command, *flags], env=os.environ | environment, capture_output=True, text=True, timeout=100
    )


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


GROUP = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    "flags",
    [(*CLUSTER, *GROUP), *(pytest.param(one, marks=pytest.mark.full) for one in (CLUSTER, GROUP, ()))],
    ids=str,
)
def test_no_child_has_a_key(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Neither in its environment nor on its command line, and no log nor metric has one."""
    keys = {"MOESAIC_API_KEY": API_KEY, "MOESAIC_ADMIN_KEY": ADMIN_KEY}
    with serving(tmp_path / "log", *flags, **keys) as (process, info):
        every = all_children(process.pid)
        first = [pid for pid in every if "templates/__main__.py" not in command_of(pid)]
        below = [pid for child in first for pid in all_children(child)]
        assert len(first) == (2 if "--expert-servers" in flags else 1) < len(every)
        assert len(below) == (1 if "--tensor-parallel-size" in flags else 0)
        for pid in every + below:
            environment = Path(f"/proc/{pid}/environ").read_text()
            seen = environment + command_of(pid)
            assert "k3y-of" not in seen and "MOESAIC_A" not in seen
            assert ("PATH=" in environment) == (pid in first + below)
        with httpx.Client(base_url=info["url"], trust_env=False) as client:
            for key in (API_KEY, ADMIN_KEY):
                headers = {"Authorization": f"Bearer {key}"}
                assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.get("/v1/models").status_code == 401
            assert "k3y-of" not in client.get("/metrics").text
        assert "k3y-of" not in json.dumps(info)
    log = (tmp_path / "log").read_text()
    assert "GET /v1/models" in log and "k3y-of" not in log


def test_a_key_is_made_where_none_is_given_and_printed_once(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *CLUSTER) as (process, info):
        key = info["admin_key"]
        assert len(key) >= 32 and key.isalnum()  # a first "-" would read as a flag
        refused = scale(info["url"])
        assert refused.returncode == 1 and "HTTP 401: wrong or missing admin key" in refused.stderr
        assert scale(info["url"], "--admin-key", key).returncode == 0
        assert scale(info["url"], MOESAIC_ADMIN_KEY=key).returncode == 0
        rebound = {"Host": "evil.example"}
        answer = httpx.post(f"{info['url']}/scale_elastic_ep", json={}, headers=rebound, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert process.stdout is not None
    assert key not in (tmp_path / "log").read_text()


def test_an_api_key_is_the_admin_key_unless_there_is_another(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *CLUSTER, MOESAIC_API_KEY=API_KEY) as (_, info):
        assert "admin_key" not in info
        assert scale(info["url"], MOESAIC_API_KEY=API_KEY).returncode == 0
    with serving(tmp_path / "log", *CLUSTER, "--api-key", API_KEY, "--admin-key", ADMIN_KEY) as (_, info):
        assert scale(info["url"], "--api-key", API_KEY).returncode == 1
        assert scale(info["url"], "--admin-key", ADMIN_KEY).returncode == 0
