"""Peaks of workers beside their caps."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import make_checkpoint
import pytest
from offloading import memory
from rich.console import Console

from moesaic.cost.machines import MACHINES
from moesaic.kernels import table
from moesaic.planning.hardware import file

MIB = 1 << 20


def test_the_longest_prompt_is_as_long_as_is_said() -> None:
    found = [json.loads(line) for line in memory.lines(5, longest=30, generate=3)]
    lengths = [len(one["body"]["prompt"]) for one in found]
    assert max(lengths) == lengths[0] == 30 and min(lengths) >= 1
    assert len({one["custom_id"] for one in found}) == 5
    assert {one["body"]["max_tokens"] for one in found} == {3}


def test_a_refusal_tells_the_smallest_cap() -> None:
    said = "moesaic: --fast-memory: got '1MiB'; allowed: at least 625MiB for it and these requests"
    assert memory.told(said) == "at least 625MiB" and memory.told("it fell over") == "it fell over"


CHILD = "import subprocess, sys; b = bytes([1]) * (60 << 20); "
GRANDCHILD = (
    "subprocess.run([sys.executable, '-c', 'b = bytes([1]) * (120 << 20); import time; time.sleep(1)'])"
)


@pytest.mark.slow
def test_peaks_are_of_the_process_and_its_children() -> None:
    own, child = memory.watched(subprocess.Popen([sys.executable, "-c", CHILD + GRANDCHILD]))
    assert 60 * MIB <= own < 110 * MIB and 120 * MIB <= child < 180 * MIB


def test_a_table_of_what_was_run_and_refused() -> None:
    rows = [
        {"cap": "300MiB", "longest": 200, "worker": 534 * MIB, "api": 290 * MIB, "refused": None},
        {"cap": "300MiB", "longest": 2000, "worker": None, "api": None, "refused": "at least 391MiB"},
    ]
    said = io.StringIO()
    memory.show({"model": "it", "libraries": 231 * MIB, "rows": rows}, Console(file=said, width=120))
    for text in ("libraries 231", "534", "234", "290", "refused: at least 391MiB"):
        assert text in said.getvalue(), text


@pytest.mark.full
@pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
def test_a_worker_is_measured_and_a_cap_refused(tmp_path: Path) -> None:
    make_checkpoint.write("qwen3-moe-0.01b", tmp_path / "model")
    machine = next(iter(MACHINES.values()))
    file.save(replace(machine, slow=replace(machine.slow, processor=None)), tmp_path / "this.toml")
    parser = argparse.ArgumentParser()
    memory.add(parser)
    given = ["--caps", "1MiB", "11MiB", "--prompt-lens", "30", "--requests", "4", "--gen-len", "2"]
    found = memory.measure(
        parser.parse_args([str(tmp_path / "model"), *given, "--hardware", str(tmp_path / "this.toml")])
    )
    refused, run = found["rows"]
    assert refused["worker"] is None and refused["refused"].startswith("at least ")
    assert run["refused"] is None and 50 * MIB < run["worker"] < 1000 * MIB and run["api"] > 50 * MIB
    assert found["libraries"] > 50 * MIB
