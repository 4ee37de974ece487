"""No process without a GPU loads what only a GPU runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

PROGRAMS = (
    "moesaic.runtime.__main__",
    "moesaic.runtime.build",
    "moesaic.runtime.group.build_rank",
    "moesaic.experts.__main__",
    "moesaic.experts.process",
    "moesaic.cluster.supervisor",
    "moesaic.cluster.joining.__main__",
    "moesaic.cluster.joining.loop",
    "moesaic.commands.serve",
    "moesaic.commands.doctor",
    "moesaic.commands.hardware",
    "moesaic.server.run",
    "moesaic.llm",
)
IMPORTED = "import time:"
"""Begins each line in which Python says what it has imported."""


def loaded_parts(modules: set[str]) -> list[str]:
    """Modules of what only a GPU runs."""
    return sorted(name for name in modules if name == "moesaic.gpu" or name.startswith("moesaic.gpu."))


def test_programs_load_nothing_of_a_gpu() -> None:
    imports = "; ".join(f"importlib.import_module({name!r})" for name in PROGRAMS)
    code = f"import importlib, json, sys; {imports}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout))
    assert modules.issuperset(PROGRAMS)
    assert loaded_parts(modules) == [], "let shared code ask core/gpu_parts.py for it"


@pytest.mark.slow
def test_a_cluster_on_a_cpu_loads_nothing_of_a_gpu(tmp_path: Path) -> None:
    """Python itself says what each process of the cluster imports, until they end."""
    command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--threads", "1", "--json"]
    flags = ["--attention-workers", "1", "--expert-servers", "1", "--device", "cpu"]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        )
        with process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            fields = {"model": "demo", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
            body = json.dumps(fields).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(IMPORTED)]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    assert modules.issuperset({"moesaic.runtime.build", "moesaic.experts.process", "moesaic.experts.remote"})
    assert "moesaic.cluster.supervisor" in modules
    assert loaded_parts(modules) == []
