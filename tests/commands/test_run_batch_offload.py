"""`moesaic run-batch --fast-memory`, from the file to the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, quantizers, tiny_models
from tests.support.fake_batch_server import line, results
from tests.support.processes import children

from moesaic.commands import cli
from moesaic.cost.hardware import GIB
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16, "num_hidden_layers": 4}
MACHINE = f"""
[machine]
name = "two cores"
[fast]
name = "RAM"
memory_gib = 8
bandwidth_gib = 10
tflops = 0.05
[slow]
name = "disk"
memory_gib = 100
bandwidth_gib = 1
[link]
down_gib = {2e7 / GIB}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with 6 MiB of experts in bf16, 1.5 MiB a layer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(tiny_models.build("qwen3_moe", model_configs.qwen3(**SIZES)), folder, torch.bfloat16)
    byte_tokenizer(folder)
    (folder.parent / "this.toml").write_text(MACHINE)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def ask(custom_id: str, length: int, **body: Any) -> str:
    prompt = tiny_models.prompt(length, model_configs.VOCAB, seed=length)
    fixed = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    return line(custom_id, **{**fixed, "prompt": prompt, **body})


def command(path: Path, files: tuple[Path, Path], *options: str, cap: str | None = "6MiB") -> list[str]:
    given = ["run-batch", "-i", str(files[0]), "-o", str(files[1]), "--model", str(path), "--threads", "1"]
    if cap is not None:
        options = ("--fast-memory", cap, "--hardware", str(path.parent / "this.toml"), *options)
    return [*given, "--served-model-name", "tiny", *options]


def answers(file: Path) -> dict[str, Any]:
    """The texts and log-probabilities of the answers, and the codes of errors."""
    found = {}
    for result in results(file):
        body = (result["response"] or {}).get("body", {})
        choices = [{**one, "index": 0} for one in body.get("choices", [])]
        found[str(result["custom_id"])] = choices or result["error"]["code"]
    return found


@pytest.mark.parametrize("options", [[], ["--pad"]], ids=["", "padded"])
def test_a_file_with_lines_of_all_kinds_is_answered_as_from_memory(
    path: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    lines = [
        *(ask(f"r{length}", length) for length in (1, 3, 16, 30, 45, 70)),
        ask("twice", 9, n=2, temperature=1.0, seed=4),
        ask("short", 5, max_tokens=None),
        ask("both", 4, prompt=[[5, 6], [7]]),
        ask("far", 4, max_tokens=10**9),
        line("chat", "/v1/chat/completions", model="tiny", messages=[{"role": "user", "content": "hi"}]),
        "no JSON",
    ]
    files[0].write_text("".join(one + "\n" for one in lines))
    assert cli.main([*command(path, files, *options), "--json"]) == 1, "lines failed"
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["completed"], told["failed"]) == (9, 3)
    assert told["policy"]["schedule"] in ("cgopipe", "on-demand")
    assert told["phases"]["decode"]["predicted_at_link_seconds"] > 0
    assert told["phases"]["decode"]["loaded_bytes"] > 0 and told["phases"]["prefill"]["tokens"] > 165
    assert "experts come from the disk" in printed.err and "two layers of streamed experts" in printed.err
    prompts = 11 if options else 0
    padding = told["phases"]["prefill"]["padding_rows"]
    assert told["phases"]["prefill"]["tokens"] + padding >= prompts * 70 and bool(padding) is bool(options)
    assert ("prompts padded to 70" in printed.err) is bool(options)
    whole = files[0], tmp_path / "whole.jsonl"
    assert cli.main(command(path, whole, cap=None)) == 1
    assert answers(files[1]) == answers(whole[1])


def test_quantised_experts_are_converted_and_what_is_assumed_is_said(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3(**SIZES)), tmp_path / "source", torch.bfloat16
    )
    byte_tokenizer(source)
    path, _ = quantizers.quantize(source, tmp_path / "both", quantizers.FORMATS["awq"])
    (path.parent / "this.toml").write_text(MACHINE)
    files[0].write_text("".join(ask(f"r{length}", length) + "\n" for length in (3, 16, 30, 45)))
    assert cli.main([*command(path, files, cap="2500KiB"), "--json"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert told["completed"] == 4 and told["phases"]["decode"]["loaded_bytes"] > 0
    assert "converting quantised experts to int4_g32 takes no time" in printed.err
    whole = files[0], tmp_path / "whole.jsonl"
    assert cli.main(command(path, whole, cap=None)) == 0
    assert answers(files[1]) == answers(whole[1])


def test_a_damaged_quantised_expert_ends_the_run_in_one_line(
    files: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is found when the expert is first read, after the worker has started."""
    source = tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3(**SIZES)), tmp_path / "source", torch.bfloat16
    )
    byte_tokenizer(source)
    path, _ = quantizers.quantize(source, tmp_path / "both", quantizers.FORMATS["packed int4"])
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers.2.mlp.experts." in name and name.endswith("weight_scale"):
            tensor.fill_(torch.nan)
    save_file(tensors, path / "model.safetensors")
    (path.parent / "this.toml").write_text(MACHINE)
    files[0].write_text(ask("r", 30) + "\n")
    assert cli.main(command(path, files, cap="3MiB")) != 0
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert re.search(r"experts\.\d+\.gate_proj: got nan in a scale; allowed: finite numbers", err)


def test_rows_of_padding_are_told_apart(
    path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text("".join(ask(f"r{length}", length) + "\n" for length in (1, 3, 30)))
    assert cli.main(command(path, files, "--pad")) == 0
    printed = capsys.readouterr()
    assert "predicted for 12 + 6 tokens, prompts padded to 30" in printed.err
    assert "padding: 56 rows in addition to the tokens" in printed.out


def test_what_is_done_is_not_planned_for(
    path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The long requests were answered before. When all are answered, nothing is planned or started."""
    files[0].write_text("".join(ask(f"r{length}", length) + "\n" for length in (150, 160, 7)))
    done: list[dict[str, Any]] = [
        {"id": "batch_req_1", "custom_id": f"r{length}", "error": None, "response": {"body": {}}}
        for length in (150, 160)
    ]
    files[1].write_text("".join(json.dumps(one) + "\n" for one in done))
    assert cli.main(command(path, files, "--micro-batch-size", "8")) == 0
    printed = capsys.readouterr()
    assert "1 requests at a time in 1 micro-batches of 1" in printed.err
    assert "predicted for 7 + 6 tokens" in printed.err
    assert "link busy" in printed.out.replace("\n", " ") or "link" in printed.out
    assert cli.main(command(path, files)) == 0
    assert "predicted" not in capsys.readouterr().err


@pytest.mark.parametrize("lines", [["no JSON"], [line("a", "/v1/chat/completions", messages=[])]])
def test_lines_that_are_all_refused_load_no_more_than_the_cap(
    path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    files[0].write_text("".join(one + "\n" for one in lines))
    assert cli.main(command(path, files)) == 1
    printed = capsys.readouterr()
    assert "experts come from the disk" in printed.err and "predicted" not in printed.out


def test_an_empty_file_starts_nothing(
    path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text("\n")
    assert cli.main(command(path, files)) == 0
    assert "predicted" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "cap", "told"),
    [
        ([], "1MiB", r"--fast-memory: got '1MiB'; allowed: at least \d+MiB"),
        (["--pad"], None, "--pad: needs --fast-memory"),
        (
            ["--fast-memory", "6MiB", "--hardware", "l4"],
            None,
            "--hardware: got 'l4'; allowed: a file of `moesaic hardware measure --device cpu`",
        ),
        (["--max-num-seqs", "4"], "6MiB", "--max-num-seqs: got 4; allowed: nothing with --fast-memory"),
        (["--kernels", "reference"], "6MiB", "--fast-memory: .* as BF16.*reference"),
        (
            ["--schedule", "barrier"],
            "6MiB",
            "--schedule: got 'barrier'; allowed: lockstep with --fast-memory",
        ),
        (
            ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'],
            "6MiB",
            "--speculative-config: method: got 'mtp'; allowed: ngram with --fast-memory",
        ),
        (
            ["--pad", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
            "6MiB",
            "--pad: got 'true'; allowed: false with --speculative-config",
        ),
        (
            ["--autoscale", "attention-workers=1:2"],
            "6MiB",
            "--autoscale: got 'attention-workers=1:2'; allowed: nothing with --fast-memory",
        ),
        (["--combine", "partial"], "6MiB", "--combine: got 'partial'; allowed: exact with --fast-memory"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    path: Path,
    files: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    cap: str | None,
    told: str,
) -> None:
    files[0].write_text(ask("a", 20) + "\n")
    assert cli.main(command(path, files, *options, cap=cap)) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.match(f"moesaic: {told}", last), last


def test_float16_is_refused_by_name(
    files: tuple[Path, Path], tmp_path: Path, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "half"
    tiny_models.save(tiny_models.build("qwen3_moe", model_configs.qwen3()), folder, torch.float16)
    byte_tokenizer(folder)
    (tmp_path / "this.toml").write_text(MACHINE)
    files[0].write_text(ask("a", 20) + "\n")
    for cap in ("1KiB", "6MiB"):  # also where the cap is too small
        assert cli.main(command(folder, files, cap=cap)) == 2
        said = capfd.readouterr().err
        assert "F16" in said.strip().splitlines()[-1] and "predicted" not in said


LINES = 40
"""Number of lines of the file. At most twelve are in flight at once, so the file is not done when its first
line is.
"""


def start(path: Path, files: tuple[Path, Path], *options: str) -> subprocess.Popen[str]:
    files[0].write_text("".join(ask(f"r{index}", 40, max_tokens=50) + "\n" for index in range(LINES)))
    paths = os.pathsep.join(dict.fromkeys(one for one in sys.path if one))
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic", *command(path, files, *options)],
        env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(6000):
        if files[1].exists() and files[1].read_bytes().count(b"\n") >= 1:
            return process
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)
    raise AssertionError("no progress")


def worker_of(process: subprocess.Popen[str]) -> int:
    return children(process.pid, "moesaic.runtime")[0]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        pytest.param("worker", 1, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        ("shard", 1),
    ],  # see batch/test_kill
)
def test_a_run_that_is_cut_short_says_so_and_goes_on(
    path: Path, files: tuple[Path, Path], tmp_path: Path, what: Any, code: int
) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    (tmp_path / "this.toml").write_text(MACHINE)
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    process = start(copy, files)
    shard = copy / "model.safetensors"
    whole = shard.read_bytes()
    if what == "worker":
        os.kill(worker_of(process), signal.SIGKILL)
    elif what == "shard":
        os.truncate(shard, len(whole) // 2)
    else:
        process.send_signal(what)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    if what == "shard":
        assert f"it has {len(whole) // 2} bytes instead of {len(whole)}" in err.strip().splitlines()[-1]
    kept = len(results(files[1]))
    assert 1 <= kept < LINES
    shard.write_bytes(whole)
    assert cli.main(command(copy, files)) == 0
    assert len({str(found) for found in answers(files[1]).values()}) == 1  # the same prompt, the same answer


# ---- groups of processes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as `path`, with heads for two or four ranks."""
    folder = tmp_path_factory.mktemp("shared")
    options = model_configs.qwen3(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    tiny_models.save(tiny_models.build("qwen3_moe", options), folder, torch.bfloat16)
    byte_tokenizer(folder)
    (folder.parent / "this.toml").write_text(MACHINE)
    return folder


@pytest.mark.parametrize("form", ["all-reduce", "reduce-scatter"])
def test_a_group_answers_as_the_group_in_memory_does(
    shared: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    files[0].write_text("".join(ask(f"r{length}", length) + "\n" for length in (1, 3, 16, 30, 45, 70)))
    group = ("--tensor-parallel-size", "2", "--moe-collectives", form)
    assert cli.main(command(shared, files, *group, cap="3MiB")) == 0
    printed = capsys.readouterr()
    assert "of each layer's 8 experts come from the disk on each of 2 ranks" in printed.err
    assert "memory on each of 2 ranks" in printed.err
    assert "decode" in printed.out and "the first of 2 ranks; each reads its own experts" in printed.out
    whole, alone = (files[0], tmp_path / "whole.jsonl"), (files[0], tmp_path / "alone.jsonl")
    assert cli.main(command(shared, whole, *group, "--kv-cache-dtype", "float32", cap=None)) == 0
    printed = capsys.readouterr()
    assert f"1 thread on each of 2 ranks, {form}, KV cache of" in printed.err
    assert "tokens in float32" in printed.err
    assert answers(files[1]) == answers(whole[1])
    assert cli.main(command(shared, alone, cap=None)) == 0
    texts = [
        {name: [choice["text"] for choice in choices] for name, choices in answers(file).items()}
        for file in (files[1], alone[1])
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--offload-schedule", "on-demand"],
            "--offload-schedule: got 'on-demand'; allowed: auto, cgopipe, s4",
        ),
        (["--trace", "t.json"], "--trace: got .*; allowed: nothing with --tensor-parallel-size 2"),
        (["--tensor-parallel-size", "3"], "--tensor-parallel-size: got 3; allowed: 1, 2, 4 for 4 query"),
        (["--moe-collectives", "shuffled"], "--placement: got None; allowed: a file with tables"),
    ],
)
def test_what_a_group_cannot_do_is_told_in_one_line(
    shared: Path, files: tuple[Path, Path], capfd: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    files[0].write_text(ask("a", 20) + "\n")
    given = options if "--tensor-parallel-size" in options else [*options, "--tensor-parallel-size", "2"]
    assert cli.main(command(shared, files, *given, cap="3MiB")) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.match(f"moesaic: {told}", last), last


def test_a_rank_that_dies_ends_the_run_by_name(shared: Path, files: tuple[Path, Path]) -> None:
    process = start(shared, files, "--tensor-parallel-size", "2")
    first = worker_of(process)
    [rank] = children(first)
    os.kill(rank, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    last = err.strip().splitlines()[-1]
    assert "rank 1 of the group is gone" in last and "run the same command again to continue" in last, err
