"""Log lines of real servers: a request's id goes through all processes, and keys are never printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import NO_TLS
from tests.test_serve import COMMAND

pytestmark = pytest.mark.slow
NOTHING_ALLOWED = {"structured_outputs": {"choice": ["a"]}, "min_tokens": 9, "max_tokens": 20}
"""A form that ends before `min_tokens` does: the worker ends the request and says so."""


def test_a_request_keeps_its_id_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("log-level: debug\nthreads: 1\napi-key: geheim\n")
    flags = ["--config", str(tmp_path / "server.yaml"), "--attention-workers", "1", "--expert-servers", "1"]
    process = subprocess.Popen(
        [*COMMAND, *flags, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"MOESAIC_MAX_NUM_SEQS": "4", "MOESAIC_ADMIN_KEY": "geheimer"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        info = json.loads(process.stdout.readline())
        assert info["max_num_seqs"] == 4
        headers = {"Authorization": "Bearer geheim", "X-Request-Id": "chat-17"}
        with httpx.Client(base_url=info["url"], trust_env=False, verify=NO_TLS, timeout=60) as client:
            body = {"prompt": "Hello", **NOTHING_ALLOWED}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 400
            body = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    lines = text.splitlines()
    settings = [line for line in lines if line.startswith("moesaic: from the environment: ")]
    assert len(settings) == 1 and "MOESAIC_MAX_NUM_SEQS=4" in settings[0] and "geheim" not in text
    about = [line for line in lines if "[chat-17]" in line]
    expected = (
        "DEBUG server {pid} [chat-17]: request 0: 1 prompt tokens, n 1",
        "WARNING attention worker {worker} [chat-17]: request 0 ended: no token is allowed",
        "DEBUG server {pid} [chat-17]: request 1: completion 0: length",
    )
    worker = next(one["pid"] for one in info["cluster"]["processes"] if one["role"] == "attention worker")
    for part in expected:
        found = part.format(pid=process.pid, worker=worker)
        assert any(found.replace("1 prompt tokens, ", "") in _short(line) for line in about), (found, text)


def _short(line: str) -> str:
    """The line without its number of prompt tokens, which depends on the tokenizer."""
    before, comma, after = line.partition(" prompt tokens, ")
    return before.rpartition(" ")[0] + " " + after if comma else line
