"""The offload benchmark's runs of a checkpoint from the disk, from end to end."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from offloading import contenders, disk, ours

from moesaic.cost.machines import MACHINES
from moesaic.kernels import table
from moesaic.planning.hardware import file

from .conftest import FOLDER

pytestmark = pytest.mark.slow


QUESTIONS = ["one", "two twice", "three and three more", "four"]
needs_native = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")


@needs_native
@pytest.mark.full
def test_schedules_run_side_by_side_and_agree(tmp_path: Path) -> None:
    model, found = tmp_path / "model", tmp_path / "found.json"
    _script("make_checkpoint.py", "qwen3-moe-0.01b", str(model))
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in QUESTIONS))
    hardware = _over_a_disk(tmp_path)
    printed = _script(
        *("offload.py", "disk", str(model), "--prompts", str(questions), "--hardware", str(hardware)),
        *("--cap", "11MiB", "--no-limit", "--schedules", "cgopipe", "--batches", "1", "balance"),
        *("--pad", "--json", str(found)),
        *("--prompt-len", "9", "--gen-len", "3", "--few", "2", "--rounds", "1"),
    )
    rows = json.loads(found.read_text())["rows"]
    assert [row["ended"] for row in rows] == ["done"] * 4, rows
    assert [row["batch"] for row in rows[:2]] == [1, 1]
    assert rows[2]["batch"] == rows[3]["batch"] > 1
    assert [row["tokens"] for row in rows] == [2, 2, *(3 * row["batch"] for row in rows[2:])]
    assert [(row["equal"], row["compared"]) for row in rows] == [(row["batch"], row["batch"]) for row in rows]
    for row in rows:
        [run] = row["runs"]
        assert run["known"]["policy"]["static_experts"] < 16, "not all experts fit: some come from the disk"
        assert run["measured"]["prefill"]["loaded_bytes"] > 0
        assert row["prefill_s"] + row["decode_s"] == pytest.approx(row["seconds"])
        padded = row["contender"] == "moesaic padded" and row["batch"] > 1
        assert bool(run["measured"]["prefill"]["padding_rows"]) is padded
    assert "moesaic cgopipe" in printed and "moesaic padded" in printed


@needs_native
def test_a_profile_tells_plans_how_few_experts_are_chosen(tmp_path: Path) -> None:
    model, seen = tmp_path / "model", tmp_path / "seen.npz"
    _script("make_checkpoint.py", "qwen3-moe-0.01b", str(model))
    (tmp_path / "prompts.txt").write_text("\n".join(["the same words"] * 4))
    recorded = ["profile", str(model), "--prompts", str(tmp_path / "prompts.txt"), "-o", str(seen)]
    subprocess.run([sys.executable, "-m", "moesaic", *recorded], check=True, capture_output=True, timeout=100)
    parser, loaded = argparse.ArgumentParser(), {}
    disk.add(parser)
    for name, more in {"even": [], "known": ["--profile", str(seen)]}.items():
        given = parser.parse_args([str(model), "--prompts", "none", "--cap", "11MiB", *more])
        job = disk._job(given, 11 << 20, [[1] * 9] * 4)
        found = ours.planned(job | contenders.ordered("on-demand", given, _over_a_disk(tmp_path)), 4)
        loaded[name] = found.price.step.busy["link down"]
    assert loaded["known"] < 0.7 * loaded["even"], "four equal rows choose the experts of one"


def _over_a_disk(folder: Path) -> Path:
    """A machine's file."""
    machine = next(iter(MACHINES.values()))
    file.save(replace(machine, slow=replace(machine.slow, processor=None)), folder / "machine.toml")
    return folder / "machine.toml"


def test_what_cannot_be_run_is_told_in_one_line(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"other": 1}\n')
    command = ["disk", "demo", "--prompts", str(questions), "--no-limit"]
    ended = _run("offload.py", *command)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [f"--prompts: {questions}: no line has turns, a prompt or a question"]


def _script(*command: str) -> str:
    ended = _run(*command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, str(FOLDER / command[0]), *command[1:]]
    return subprocess.run(whole, capture_output=True, text=True, timeout=200, check=False)
