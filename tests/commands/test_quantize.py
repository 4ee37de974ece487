"""`moesaic quantize` as a user types it."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from moesaic.commands import cli
from moesaic.models import files

COMMAND = [sys.executable, "-m", "moesaic", "quantize", "demo"]
INT4 = ("--format", "int4", "--group-size", "64")


def refused(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    assert cli.main(["quantize", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


@pytest.mark.slow
def test_a_table_says_what_it_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["quantize", "demo", str(out), *INT4]) == 0
    said, err = capsys.readouterr()
    assert err == ""
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    assert lines[0] == "original int4"
    assert lines[2] == "size 12.8 MiB 5.4 MiB (42.0%)"
    name, before, after = lines[3].split()
    assert name == "perplexity" and float(before) != float(after)
    assert float(after) == pytest.approx(float(before), rel=0.05)
    assert lines[4].startswith("same most likely token") and 80 < float(lines[4].split()[-1][:-1]) < 100
    assert (
        "out: 432 matrices with a scale for 64 numbers, rounded to nearest, measured with 1802 other"
        in lines[5]
    )
    assert {file.name for file in files.resolve("demo").iterdir()} - {
        file.name for file in out.iterdir()
    } == {"model.safetensors"}


@pytest.mark.slow
def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["quantize", "demo", str(out), "--format", "int8", "--json", "--evaluation-tokens", "64"]
    assert cli.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.pop("seconds") > 0
    before, after = said.pop("perplexity_before"), said.pop("perplexity_after")
    assert after == pytest.approx(before, rel=0.02)
    assert said.pop("agreement") >= 0.9
    sizes = said["bytes_before"], said["bytes_after"]
    assert said == {
        "model": "demo", "directory": str(out), "format": "int8", "group_size": None, "calibration_tokens": 0,
        "bytes_before": sizes[0], "bytes_after": sizes[1], "share": sizes[1] / sizes[0], "matrices": 432,
        "few_tokens": [], "evaluation_tokens": 64,
    }  # fmt: skip


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, empty, text = tmp_path / "out", tmp_path / "empty.jsonl", tmp_path / "text.txt"
    empty.touch()
    text.write_text("one prompt\n")
    given: list[tuple[str, tuple[Any, ...]]] = [
        ("--format: got nothing", ("demo", out)),
        ("--format: got 'int3'; allowed:", ("demo", out, "--format", "int3")),
        ("--directory: got nothing", ("demo", "--format", "int8")),
        ("model: got './nowhere'", ("./nowhere", out, "--format", "int8")),
        ("--group-size: got 128; allowed: 32, 64, which", ("demo", out, *INT4[:3], 128)),
        ("--group-size: got 48; allowed: 32, 64", ("demo", out, "--format", "int4", "--group-size", 48)),
        ("--group-size: got 0; allowed: an integer of at least 1", ("demo", out, *INT4[:3], 0)),
        ("--modules: got 'gate'; allowed:", ("demo", out, *INT4, "--modules", "gate")),
        (
            "--calibrate: got '/no/file'; allowed: an existing regular",
            ("demo", out, *INT4, "--calibrate", "/no/file"),
        ),
        (
            f"--calibrate: got '{empty}'; allowed: a file with at least one",
            ("demo", out, *INT4, "--calibrate", empty),
        ),
        ("--calibrate: got 1 prompt; allowed: at least 2", ("demo", out, *INT4, "--calibrate", text)),
        ("--least-tokens: allowed only with --calibrate", ("demo", out, *INT4, "--least-tokens", 5)),
        (
            "--calibrate: only experts are calibrated",
            ("demo", out, *INT4, "--calibrate", text, "--modules", "mlp"),
        ),
        (
            "--evaluate: allowed only with --evaluation",
            ("demo", out, *INT4, "--evaluate", text, "--evaluation-tokens", 0),
        ),
        (f"DIRECTORY: got '{tmp_path}'; allowed: a directory that does not", ("demo", tmp_path, *INT4)),
        (f"DIRECTORY: got '{text}'; allowed: a directory that does not", ("demo", text, *INT4)),
        ("allowed: a directory in an existing one", ("demo", tmp_path / "no" / "where", *INT4)),
    ]
    for says, words in given:
        assert says in refused(capsys, *words)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.jsonl", "text.txt"]


@pytest.fixture
def code(tmp_path: Path) -> list[Path]:
    """Python modules as prompts: to calibrate with, and to measure with."""
    found = []
    modules = (
        ("argparse", "ast", "calendar", "configparser", "copy", "csv", "difflib", "gettext"),
        ("textwrap", "shlex"),
    )
    for part, names in enumerate(modules):
        texts = [(Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text() for name in names]
        rows = [
            {"text": text[at : at + 1500]} for text in texts for at in range(0, min(len(text), 12000), 1500)
        ]
        found.append(tmp_path / f"code{part}.jsonl")
        found[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.mark.full
def test_calibration_loses_less_than_rounding_to_nearest(
    tmp_path: Path, code: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    costs = []
    for name, more in (("nearest", ()), ("calibrated", ("--calibrate", str(code[0])))):
        words = ["demo", str(tmp_path / name), *INT4, "--evaluate", str(code[1]), *more, "--json"]
        assert cli.main(["quantize", *words]) == 0
        costs.append(json.loads(capsys.readouterr().out))
    nearest, calibrated = costs
    assert nearest["perplexity_before"] == calibrated["perplexity_before"]
    assert calibrated["bytes_after"] == nearest["bytes_after"]
    assert calibrated["calibration_tokens"] > 15_000
    lost = [one["perplexity_after"] - one["perplexity_before"] for one in costs]
    assert lost[1] < 0.7 * lost[0]
    assert calibrated["agreement"] > nearest["agreement"]


@pytest.mark.slow
def test_a_killed_run_is_continued_to_the_same_bytes(
    tmp_path: Path, code: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = [*INT4, "--calibrate", str(code[1]), "--evaluation-tokens", "0"]
    with subprocess.Popen([*COMMAND, str(out), *words], stderr=subprocess.DEVNULL) as started:
        deadline = time.monotonic() + 120
        while len(list(out.glob("*.safetensors"))) < 3:
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        started.kill()
    assert started.returncode == -signal.SIGKILL
    assert not (out / "config.json").exists()
    assert cli.main(["doctor", str(out), "--hardware", "none"]) == 2
    assert "no config.json in this directory" in capsys.readouterr().err
    for folder in (out, whole):
        assert cli.main(["quantize", "demo", str(folder), *words]) == 0
    first, second = ({file.name: file.read_bytes() for file in one.iterdir()} for one in (out, whole))
    assert first == second


@pytest.mark.slow
def test_ctrl_c_and_a_full_disk_say_how_to_go_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "out", *INT4],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)),
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.endswith(": File too large; the same command goes on where it stopped\n")
    with subprocess.Popen(
        [*COMMAND, "out", *INT4], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out").glob("*.safetensors")):
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=60)
    assert (started.returncode, out) == (130, "")
    assert err == "moesaic: interrupted; the same command goes on where it stopped\n"
