"""What `make setup` says without a compiler, what it compiles, and which torch `make gpu` computes with."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moesaic.kernels import table

SCRIPTS = Path(__file__).parent.parent / "scripts"
SETUP, CUDA = (SCRIPTS / "setup").read_text(), (SCRIPTS / "cuda_torch").read_text()
CMAKE = (SCRIPTS.parent / "CMakeLists.txt").read_text()
CHECK = SETUP.split("<<'END'\n")[1].split("\nEND\n")[0]
"""The Python in the script."""


@pytest.mark.parametrize("built", [True, False])
def test_it_says_in_one_line_that_a_compiler_is_missing(
    built: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "instruction_sets", lambda: ("portable",) if built else ())
    exec(CHECK, {})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (0 if built else 1)
    assert all("a C++17 compiler is missing" in line and "torch reference" in line for line in said)


PROBE = re.compile(r'check_cxx_source_compiles\("(.*?)" (\w+)\)', re.S)
FLAGS = {
    "COMPILES_AVX512_INT8": "-mavx512f -mavx512bw -mavx512vnni",
    "COMPILES_AVX_VNNI": "-mavxvnni",
    "COMPILES_AVX512_BF16": "-mavx512f -mavx512bw -mavx512bf16",
    "COMPILES_AMX": "-mamx-tile -mamx-bf16 -mamx-int8",
}


@pytest.mark.parametrize("name", FLAGS)
def test_no_instructions_are_left_out_that_the_compiler_knows(name: str, tmp_path: Path) -> None:
    """A program that tries instructions fails for no other reason than that the compiler lacks them."""
    programs = {name: text for text, name in PROBE.findall(CMAKE)}
    assert {name for name in programs if name.startswith("COMPILES_")} == set(FLAGS)
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler for x86-64")

    def compiles(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "probe.cpp").write_text(text)
        command = [compiler, "-std=c++17", *FLAGS[name].split(), "-c", "probe.cpp"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    if compiles("int main() {}").returncode:
        pytest.skip(f"{compiler} does not take {FLAGS[name]}")
    assert not compiles(programs[name]).stderr


@pytest.mark.parametrize(("gpu", "cuda"), [(False, False), (True, False), (True, True)])
def test_torch_gets_cuda_where_there_is_a_gpu(tmp_path: Path, gpu: bool, cuda: bool) -> None:
    """Programs that say how they are called take the places of pip, Python and nvidia-smi. cuda: a torch with
    CUDA is there already."""

    def program(path: str, does: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)

    program("bin/nvidia-smi", f"exit {0 if gpu else 9}")
    program(".venv/bin/python", f"exit {0 if cuda else 1}")
    program(".venv/bin/pip", 'echo "pip $*"')
    program("scripts/cuda_torch", CUDA)
    (tmp_path / "constraints.txt").write_text("torch==9.9\n")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "scripts/cuda_torch"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = [line for line in done.stdout.splitlines() if line.startswith("pip")]
    assert [line.split()[1] for line in calls] == (["uninstall", "install"] if gpu and not cuda else [])
    assert not calls or calls[-1].endswith(" torch==9.9")
