"""`make gpu` on the stand-in for a GPU, and on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.gpu import __main__ as gpu
from scripts.gpu import children, identity, kernels, served, speed, suite
from scripts.gpu.parts import PARTS
from scripts.gpu.plan import ROOT, TOTAL, Found, Part, Work
from scripts.gpu.table import as_markdown
from tests.support import gpu_child, gpu_troubles, processes
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import NAME, sanitized

SMALL = ["--checkpoint", "qwen3-moe-0.01b", "--new-tokens", "3", "--requests", "1", "2", "--rounds", "1"]
PASSES = "def test_it() -> None:\n    assert True\n"
FAILS = "def test_that() -> None:\n    assert 1 == 2\n"


def written(path: Path, *tests: str) -> str:
    file = path / "test_written.py"
    file.write_text("\n".join(tests))
    return str(file)


@pytest.fixture
def stand_in() -> Iterator[None]:
    """The device of the tests, and small parts."""
    with sanitized(), graphs(), pytest.MonkeyPatch.context() as patch:
        for module, names in gpu_child.SMALL:
            for name, value in names.items():
                patch.setattr(module, name, value)
        yield


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--output-file", str(tmp_path / "gpu.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpu: --device: got 'cuda'; allowed: cpu (") and said.count("\n") == 1
    assert not (tmp_path / "gpu.json").exists()


def test_its_parts_take_less_than_ten_minutes_together() -> None:
    assert sum(part.seconds for part in PARTS.values()) <= TOTAL < 600
    assert all(part.each <= part.seconds for part in PARTS.values())
    assert list(PARTS)[:4] == ["identity", "kernels", "speed", "tests"]


def test_no_test_runs_twice() -> None:
    [case] = [case for case in suite.cases(Work("cuda")) if case == "tests/gpu"]
    options = suite.left_out(Work("cuda"), case)
    assert {"--ignore=tests/gpu/triton", "--ignore=tests/gpu/test_llm_triton.py"} <= set(options)
    assert all((ROOT / option.removeprefix("--ignore=")).exists() for option in options)
    assert not suite.left_out(Work("cuda"), "tests/gpu/triton")


def test_identity_is_asked_of_every_family_and_every_format() -> None:
    cases = identity.cases(Work("cuda"))
    assert set(identity.tiny_models.KINDS) == set(identity.families())
    for name in (*identity.families(), *identity.formats()):
        assert f"triton | {name} | float32" in cases and f"reference | {name} | float32" in cases
    assert len(set(cases)) == len(cases) and cases[0].startswith("triton") and "float16" in " ".join(cases)


def test_several_gpus_are_used_where_there_are_some() -> None:
    assert served.several_gpus(Work("cuda", gpus=1)) == []
    flags = served.gpu_forms(Work("cuda", gpus=4))["2 ranks, NCCL"]
    assert (flags["--collectives-backend"], flags["--tensor-parallel-size"]) == ("nccl", "2")


# ---- each part


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("deepseek_v2", "float32"),
        pytest.param("packed int4", "float32", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_on_the_stand_in_the_tokens_are_those_of_transformers(name: str, dtype: str) -> None:
    found = identity.run(Work("cuda"), f"triton | {name} | {dtype}")
    assert found["ok"] and found["device"] == NAME
    assert found["tokens"] == 4 and {"recorded", "eager"} <= set(found)
    if dtype == "float32":
        assert found["recorded"] == found["eager"] == {"ok": True, "equal_tokens": 4, "largest_gap": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_tokens_are_no_identity(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Here the model answers one token more than it should, in its second prompt."""
    case, work, asked = f"auto | mixtral | {dtype}", Work("cpu"), identity.answers
    assert identity.run(work, case)["ok"]

    def wrong(*given: Any) -> Any:
        tokens, info = asked(*given)
        tokens[1][2] = (tokens[1][2] + 1) % identity.VOCAB
        return tokens, info

    monkeypatch.setattr(identity, "answers", wrong)
    found = identity.run(work, case)
    assert not found["ok"] and found["eager"]["equal_tokens"] == found["tokens"] - identity.NEW + 2
    assert found["eager"]["largest_gap"] > identity.LARGEST_GAP


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_on_the_stand_in_each_kernel_has_its_share_of_a_roof() -> None:
    found = kernels.run(Work("cuda"), "demo")
    assert (found["ok"], found["gpu"], found["kernels"]) == (True, NAME, "triton")
    names = {(one["operation"], one["type"], one["rows"]) for one in found["operations"]}
    assert {("experts", "int8", 1), ("attention", "int8", 1), ("gate", "float32", 1)} <= names
    assert all(one["share_of_roof"] > 0 for one in found["operations"])


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_on_the_stand_in_each_number_of_requests_has_its_speeds(tmp_path: Path) -> None:
    work = Work("cuda", folder=str(tmp_path), new_tokens=6, requests=(1, 3), rounds=1)
    found = speed.run(work, "reference, eager")
    assert (found["ok"], found["device"], found["dtype"]) == (True, NAME, "bfloat16")
    assert [row["requests"] for row in found["rows"]] == [1, 3]
    assert all(row["prefill_tokens_per_s"] > 0 for row in found["rows"])
    assert {(row["prompt_tokens"], row["new_tokens"], row["rounds"]) for row in found["rows"]} == {(64, 6, 1)}


@pytest.mark.slow
def test_rows_for_which_there_is_no_time_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MEASURING", 0)
    found = speed.rows(Work("cpu", requests=(1, 2)), lambda prompts, tokens: 0.1)
    assert not found["ok"] and found["rows"] == [] and found["error"] == "only 0 of 2 rows in time"


VLLM = """
import time

__version__ = "1.2.3"

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.tokens = max_tokens

class LLM:
    def __init__(self, model, dtype, max_model_len, **settings):
        print("vLLM says much")

    def generate(self, prompts, params, use_tqdm):
        assert all(len(one["prompt_token_ids"]) for one in prompts)
        time.sleep(0.001 * params.tokens)
"""
SGLANG = """
import time

__version__ = "4.5"

class Engine:
    def __init__(self, model_path, dtype, **settings):
        pass

    def generate(self, input_ids, sampling_params):
        time.sleep(0.001 * sampling_params["max_new_tokens"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_other_engines_are_measured_where_they_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    """Their calls are those of modules with the same names."""
    work = Work("cpu", folder=str(tmp_path), requests=(2,), rounds=1)
    (tmp_path / work.checkpoint).mkdir()
    assert name not in speed.cases(work)
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert name in speed.cases(work)
    found = speed.run(work, name)
    assert found["ok"] and found["version"] in ("1.2.3", "4.5")
    assert found["rows"][0]["decode_tokens_per_s"] > 0


@pytest.mark.slow
def test_what_pytest_found_is_told(tmp_path: Path) -> None:
    found = suite.run(Work("cpu"), written(tmp_path, PASSES, FAILS))
    assert (found["ok"], found["tests"], found["failures"]) == (False, 2, 1)
    [(name, why)] = found["failed"].items()
    assert name.endswith("test_that") and "1 == 2" in why


# ---- the command


@pytest.mark.slow
def test_a_case_that_fails_costs_no_other_one(tmp_path: Path) -> None:
    """And what a case that hangs had started has ended."""
    work = Work("cpu", folder=str(tmp_path), child="tests.support.gpu_troubles")
    found: dict[str, Found] = {}
    part = replace(gpu_troubles.PART, each=8)
    children.run_part("troubles", part, gpu_troubles.CASES, work, 60, found.__setitem__)
    assert {case: one["ok"] for case, one in found.items()} == {
        case: case.startswith("good") for case in gpu_troubles.CASES
    }
    assert found["raises"]["error"] == "ValueError: no such thing"
    assert found["hangs"]["error"] == "did not end within 8 s"
    assert found["crashes"]["error"] == "the process ended with signal 11"
    for case in ("raises", "hangs", "crashes"):
        assert f"this is {case}" in found[case]["last lines"]
    assert found["good"]["process"] != found["good again"]["process"]
    pid = int((tmp_path / "pid").read_text())
    while not processes.gone(pid):
        time.sleep(0.01)


def test_cases_that_no_time_is_left_for_are_told(tmp_path: Path) -> None:
    found: dict[str, Found] = {}
    children.run_part("identity", PARTS["identity"], ["a", "b"], Work("cpu"), 0.5, found.__setitem__)
    assert {one["error"] for one in found.values()} == {"no time was left"} and len(found) == 2


def parts_of(*names: str) -> dict[str, Part]:
    return {name: PARTS[name] for name in names}


@pytest.mark.full
def test_one_command_writes_one_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "folder" / "gpu.json"
    options = ["--device", "cpu", "--output-file", str(output), *SMALL, "--tests", written(tmp_path, PASSES)]
    first = "auto | lfm2_moe | float32"
    parts = {
        "identity": replace(PARTS["identity"], cases=lambda work: [first, "auto | awq | float32"]),
        "speed": replace(PARTS["speed"], cases=lambda work: ["auto"]),
    }
    assert gpu.main(options, parts) == 0
    said = capsys.readouterr().err
    assert "gpu: speed 1/1: auto: ok" in said and "s that are left" in said
    found = json.loads(output.read_text())
    assert found["ok"] and found["machine"]["torch"] == torch.__version__
    assert found["parts"]["identity"]["cases"][first]["ok"]
    assert [row["requests"] for row in found["parts"]["speed"]["cases"]["auto"]["rows"]] == [1, 2]
    assert gpu.main(["--table", str(output)]) == 0
    assert "| auto | 2 |" in capsys.readouterr().out


@pytest.mark.full
def test_the_other_parts_of_the_command_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--output-file", str(output), *SMALL, "--tests", written(tmp_path, FAILS)]
    names = ("speed", "tests", "larger than GPU memory", "processes")
    assert gpu.main([*options], parts_of(*names)) == 1
    parts = json.loads(output.read_text())["parts"]
    assert [parts[name]["ok"] for name in names] == [True, False, True, True]
    assert set(parts["speed"]["cases"]) >= {"transformers, grouped_mm", "transformers, eager"}
    servers = [one for name in names[2:] for one in parts[name]["cases"].values()]
    assert len(servers) == 5 and all(one.get("equal_answers") == one.get("requests") for one in servers)


@pytest.mark.full
@pytest.mark.usefixtures("stand_in")
def test_the_command_on_the_stand_in(tmp_path: Path) -> None:
    """Each part with processes of its own, of which each has the device."""
    output = tmp_path / "gpu.json"
    options = ["--output-file", str(output), *SMALL, "--tests", written(tmp_path, PASSES)]
    options += ["--child", "tests.support.gpu_child", "--command", "tests.support.gpu_process"]
    found: dict[str, Any] = {}
    some = (
        "triton | qwen3_moe | float32",
        "kernels: ",
        "speed: reference",
        "tests: ",
        ", split",
    )
    for only in some:
        assert gpu.main([*options, "--prompt-tokens", "5", "--only", only]) == 0
        for name, part in json.loads(output.read_text())["parts"].items():
            found.setdefault(name, {}).update(part["cases"])
    assert set(found) == set(PARTS) - {"processes", "several GPUs"}
    assert found["identity"]["triton | qwen3_moe | float32"]["device"] == NAME


@pytest.mark.slow
def test_what_is_there_stays_after_an_interrupt(tmp_path: Path) -> None:
    def run_part(name: str, part: Part, cases: Any, work: Work, seconds: float, tell: Any) -> None:
        tell(cases[0], {"ok": True, "seconds": 1.0})
        raise KeyboardInterrupt

    output = tmp_path / "gpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "run_part", run_part)
        assert gpu.main(["--device", "cpu", "--output-file", str(output)]) == 1
    found = json.loads(output.read_text())
    assert found["ok"] is None and len(found["parts"]["identity"]["cases"]) == 1


OPERATION = {"operation": "experts", "type": "int4", "context": None, "share_of_roof": 0.456}
REPORT: Found = {
    "gpu": {"name": "H100", "count": 2, "bytes": 80 << 30, "cuda": "13.0"},
    "machine": {"cpu": "a CPU", "torch": "2.13"},
    "seconds": 321.0,
    "parts": {
        "identity": {
            "cases": {
                "triton | mixtral | float32": {
                    "ok": True, "tokens": 24,
                    "recorded": {"equal_tokens": 24, "largest_gap": 0.0},
                    "eager": {"equal_tokens": 23, "largest_gap": 0.5},
                },
                "triton | dbrx | float32": {"ok": False, "error": "ValueError: no"},
            }
        },
        "kernels": {
            "cases": {
                "a": {
                    "ok": True, "model": "m", "roofs": {"gb_per_s": 3000.0, "gflop_per_s": 900e3},
                    "operations": [
                        OPERATION | {"rows": 1, "bound": "memory"},
                        OPERATION | {"rows": 512, "bound": "compute"},
                    ],
                }
            }
        },
        "speed": {
            "cases": {
                "triton": {
                    "ok": True,
                    "rows": [{"requests": 8, "prefill_tokens_per_s": 1e4, "decode_tokens_per_s": 999.6}],
                }
            }
        },
        "processes": {
            "cases": {"form": {"ok": True, "requests": 8, "output_tokens_per_s": 5.0, "equal_answers": 7}}
        },
    },
}  # fmt: skip


def test_the_results_become_tables() -> None:
    lines = as_markdown(REPORT).splitlines()
    assert lines[0] == "2 x H100 (80 GiB), CUDA 13.0, a CPU, torch 2.13, in 321 s."
    for line in (
        "| triton, float32 | 2 | 1 | 47 of 48 | 0.500 |",
        "- **triton | dbrx | float32**: ValueError: no",
        "a, m: 3000 GB/s, 900.0 TFLOP/s",
        "| experts, int4 | 46% | 46% c |",
        "| triton | 8 | 10,000 | 1,000 |",
        "| form | 8 | 5 | 7 |",
    ):
        assert line in lines
