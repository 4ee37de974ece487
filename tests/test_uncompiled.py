"""Installed without a compiler: no compiled module anywhere, and all but groups of ranks still serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from moesaic import LLM, SamplingParams

BLOCK = """
import sys
for name in ("moesaic.kernels.native._native", "moesaic.transport._shm"):
    sys.modules[name] = None  # to import it is an ImportError
"""
PROMPT = "def add(a, b):"
ASK = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which no process finds a compiled module."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.fixture(scope="module")
def wanted() -> str:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return LLM("demo", kernels="reference").generate(PROMPT, params)[0].text


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moesaic", *command],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.full),
        pytest.param(("--expert-servers", "2", "--schedule", "async"), marks=pytest.mark.slow),
    ],
)
def test_a_server_answers(environment: dict[str, str], wanted: str, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--json", *flags]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = json.loads(process.stdout.readline())
            assert found["kernels"] == "reference (torch)"
            answer = httpx.post(f"{found['url']}/v1/completions", json=ASK, timeout=60, trust_env=False)
        finally:
            process.terminate()
    assert answer.json()["choices"][0]["text"] == wanted
    assert process.returncode == 0


@pytest.mark.full
def test_a_batch_runs(environment: dict[str, str], wanted: str, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ASK}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    out = tmp_path / "out.jsonl"
    done = run(environment, "run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", "demo")
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["response"]["body"]["choices"][0]["text"] == wanted


@pytest.mark.slow
def test_a_group_of_ranks_is_refused_in_one_line(environment: dict[str, str]) -> None:
    refused = run(environment, "serve", "demo", "--port", "0", "--tensor-parallel-size", "2")
    assert refused.returncode == 2
    says = "--tensor-parallel-size: got 2; allowed: 1: the compiled module moesaic.transport._shm is missing"
    assert says in refused.stderr and "Traceback" not in refused.stderr
