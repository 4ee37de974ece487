"""`make gpu` on the stand-in for a GPU, and on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import gpu
from scripts.gpu import Work

from moesaic import LLM
from tests.support import processes
from tests.support.gpu_sanitizer import NAME, sanitized

SMALL = ["--checkpoint", "qwen3-moe-0.01b", "--new-tokens", "6", "--requests", "1", "3", "--rounds", "1"]
PASSES = "def test_it() -> None:\n    assert True\n"
FAILS = "def test_that() -> None:\n    assert 1 == 2\n"
HANGS = """
import os, pathlib, time

def test_it() -> None:
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(1000)
"""


def written(path: Path, *tests: str) -> str:
    file = path / "test_written.py"
    file.write_text("\n".join(tests))
    return str(file)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--output-file", str(tmp_path / "gpu.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpu: --device: got 'cuda'; allowed: cpu (") and said.count("\n") == 1
    assert not (tmp_path / "gpu.json").exists()


def test_its_parts_take_less_than_ten_minutes_together() -> None:
    assert set(gpu.LIMITS) == set(gpu.PARTS) and sum(gpu.LIMITS.values()) < 600


@pytest.mark.slow
def test_on_the_stand_in_the_tokens_are_those_of_the_cpu() -> None:
    with sanitized():
        found = gpu.identity(Work("cuda", new_tokens=6))
    assert found["ok"] and found["device"] == NAME
    assert found["equal_tokens"] == found["tokens"] == 6 * len(gpu.PROMPTS)
    assert found["largest_logprob_difference"] < 1e-3


@pytest.mark.slow
def test_tokens_that_differ_are_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the device is asked other prompts, all but the first."""

    class Deaf(LLM):
        def generate(self, prompts: Any, params: Any) -> Any:
            return super().generate([prompts[0], *("Once upon a time" for _ in prompts[1:])], params)

    kinds = iter([LLM, Deaf])
    monkeypatch.setattr(gpu, "LLM", lambda *words, **settings: next(kinds)(*words, **settings))
    found = gpu.identity(Work("cpu", new_tokens=6))
    assert not found["ok"] and 6 <= found["equal_tokens"] < found["tokens"]


@pytest.mark.slow
def test_on_the_stand_in_each_number_of_requests_has_its_speeds() -> None:
    work = Work("cuda", checkpoint="qwen3-moe-0.01b", new_tokens=6, requests=(1, 3), rounds=1)
    with sanitized():
        found = gpu.speed(work)
    assert (found["ok"], found["device"], found["dtype"]) == (True, NAME, "bfloat16")
    assert [row["requests"] for row in found["rows"]] == [1, 3]
    assert all(row["prefill_tokens_per_s"] > 0 for row in found["rows"])
    assert {(row["prompt_tokens"], row["new_tokens"], row["rounds"]) for row in found["rows"]} == {(64, 6, 1)}


@pytest.mark.slow
def test_rows_for_which_there_is_no_time_are_told() -> None:
    work = Work("cpu", new_tokens=2, requests=(1, 2), limits={"speed": 0})
    found = gpu.speed(work)
    assert not found["ok"] and found["rows"] == [] and found["error"] == "only 0 of 2 rows in time"


APART = ("tests", "identity")
"""Parts of the next test that have a process of their own."""


@pytest.mark.slow
def test_one_command_writes_one_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts after the first two run in this process, which is quicker."""
    in_process = gpu.in_process

    def part_of(part: str, work: Work) -> gpu.Found:
        return in_process(part, work) if part in APART else gpu.attempt(part, work) | {"seconds": 0.0}

    monkeypatch.setattr(gpu, "in_process", part_of)
    output = tmp_path / "folder" / "gpu.json"
    tests = ["--tests", written(tmp_path, PASSES)]
    assert gpu.main(["--device", "cpu", "--output-file", str(output), *SMALL, *tests]) == 0
    found = json.loads(output.read_text())
    assert found["ok"] and found["machine"]["torch"] == torch.__version__
    assert found["device"] == found["machine"]["cpu"]
    assert found["tests"]["tests"] == 1 and found["tests"]["failed"] == []
    assert found["identity"]["equal_tokens"] == found["identity"]["tokens"] > 0
    assert [row["requests"] for row in found["speed"]["rows"]] == [1, 3]
    assert all(found[part]["seconds"] > 0 for part in APART)
    assert gpu.parts_of("cuda") == list(gpu.PARTS) and "triton_speed" not in found


@pytest.mark.full
def test_what_fails_is_told_and_the_rest_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.LIMITS, "identity", 0)
    output = tmp_path / "gpu.json"
    tests = ["--tests", written(tmp_path, PASSES, FAILS)]
    arguments = ["--device", "cpu", "--output-file", str(output), *SMALL, *tests, "--checkpoint", "none"]
    assert gpu.main(arguments) == 1
    found = json.loads(output.read_text())
    assert not found["ok"]
    assert (found["tests"]["tests"], found["tests"]["failures"]) == (2, 1)
    assert found["tests"]["failed"][0].endswith("test_that")
    assert found["identity"]["error"] == "did not end within 0 s"
    assert found["speed"]["error"].startswith("CalledProcessError")


@pytest.mark.full
def test_a_part_that_hangs_ends_with_all_its_processes(tmp_path: Path) -> None:
    work = Work("cpu", tests=(written(tmp_path, HANGS),), limits={"tests": 15})
    assert gpu.in_process("tests", work)["error"] == "did not end within 15 s"
    pid = int((tmp_path / "pid").read_text())
    while not processes.gone(pid):
        time.sleep(0.01)
