"""A wheel runs on a machine without a compiler, as the source tree does on one with it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from moesaic import LLM, SamplingParams
from moesaic.server import web_page

pytest.importorskip("elftools", reason="wheels are built on Linux")
from scripts import check_wheel, source_archive
from scripts.clean_root import missing_tools
from scripts.wheels import WheelError, check_objects, cross_settings

ROOT = Path(__file__).parent.parent
ARM_TORCH = "torch==2.10.0"
"""The last build for Arm on PyPI without CUDA. The emulated system gets it in place of the pinned version."""
MACHINE = platform.machine()
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "cmake", "ninja", "make")
PROMPTS = ["def add(a, b):", "Tom has 3 apples"]
PROGRAM = """
import json, sys, moesaic
from moesaic import LLM, SamplingParams
params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
answers = LLM("demo").generate(json.loads(sys.argv[1]), params)
tokens = [list(answer.outputs[0].token_ids) for answer in answers]
print(json.dumps({"file": moesaic.__file__, "tokens": tokens}))
"""
SETS = """
import json
from moesaic.kernels.table import instruction_sets
print(json.dumps(instruction_sets()))
"""
SHARED = "inline int twice(int x) { return 2 * x; }\nint (*escapes)(int) = twice;\n"
APART = f"namespace avx2 {{\n{SHARED}}}\n"
AT_LOAD = "namespace avx2 { int now(); int then = now(); }\n"


def build(folder: Path, *flags: str) -> Path:
    """The wheel that scripts/wheels.py puts into `folder`."""
    command = [sys.executable, ROOT / "scripts" / "wheels.py", "--output-dir", folder, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a virtual environment with the wheel, and with this one's packages but for moesaic's source tree."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    program = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in sys.path if "site-packages" in path))
    install = [sys.executable, "-m", "pip", "--python", program, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    yield program
    shutil.rmtree(folder)


def run(python: Path, *words: str) -> dict[str, object]:
    """The JSON that it prints, where PATH has no compiler and nothing leads to the source tree."""
    path = str(python.parent)
    assert not any(shutil.which(name, path=path) for name in COMPILERS)
    command = [str(python), *words]
    done = subprocess.run(command, cwd=python.parent, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_its_tag_is_manylinux_and_its_files_are_there(wheel: Path) -> None:
    tags = {tag.platform for tag in parse_wheel_filename(wheel.name)[3]}
    assert tags and all(tag.startswith("manylinux") for tag in tags)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"moesaic/py.typed", "moesaic/demo/model.safetensors"} <= names
    assert {f"moesaic/server{path}" for path in web_page.PATHS - {"/"}} <= names
    assert "moesaic/server/page/index.html" in names
    assert not any("csrc" in name or name.endswith((".cpp", ".h")) for name in names)
    assert {name.partition("/licenses/")[2] for name in names} >= {"LICENSE", "NOTICE"}


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_it_has_the_native_kernels(python: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "_MOESAIC_EMULATE_AMX"}
    here = subprocess.run([sys.executable, "-c", SETS], env=kept, check=True, capture_output=True)
    assert run(python, "-c", SETS) == json.loads(here.stdout)
    found = run(python, "-m", "moesaic", "doctor", "--json")
    assert str(found["choice"]).count("native") == 1 and found["warnings"] == []


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_it_answers_as_the_source_tree_does(python: Path) -> None:
    found = run(python, "-c", PROGRAM, json.dumps(PROMPTS))
    assert Path(str(found["file"])).is_relative_to(python.parent.parent)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    wanted = [list(answer.outputs[0].token_ids) for answer in LLM("demo").generate(PROMPTS, params)]
    assert found["tokens"] == wanted


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(missing_tools(MACHINE)), reason=f"needs {', '.join(missing_tools(MACHINE))}")
def test_it_serves_in_a_system_without_a_compiler(wheel: Path) -> None:
    assert check_wheel.main([str(wheel)]) == 0


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    MACHINE != "x86_64" or not shutil.which("aarch64-linux-gnu-g++"), reason="needs g++-aarch64-linux-gnu"
)
@pytest.mark.skipif(bool(missing_tools("aarch64")), reason=f"needs {', '.join(missing_tools('aarch64'))}")
def test_a_wheel_for_arm_serves_under_emulation(tmp_path: Path) -> None:
    assert check_wheel.main([str(build(tmp_path, "--arch", "aarch64")), "--torch", ARM_TORCH]) == 0


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_source_archive_builds(tmp_path: Path) -> None:
    assert source_archive.main(["--output-dir", str(tmp_path), "--build"]) == 0


def test_a_missing_cross_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    says = (
        r"--arch aarch64: aarch64-linux-gnu-g\+\+ is missing \(Debian: apt install g\+\+-aarch64-linux-gnu\)"
    )
    with pytest.raises(WheelError, match=says):
        cross_settings("aarch64")


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("source", "says"),
    [(SHARED, "twice"), (AT_LOAD, "init_array"), (APART, None)],
    ids=["shared", "at load", "apart"],
)
def test_code_that_runs_unpicked_is_refused(source: str, says: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "kernels_avx2.dir"
    folder.mkdir()
    (tmp_path / "kernels.cpp").write_text(source)
    compile_it = ["c++", "-std=c++17", "-mavx2", "-c", tmp_path / "kernels.cpp", "-o", folder / "kernels.o"]
    subprocess.run(compile_it, check=True)
    if says is None:
        check_objects(tmp_path)
    else:
        with pytest.raises(
            WheelError, match=f"kernels_avx2: .*{says}.* is not of that instruction set alone"
        ):
            check_objects(tmp_path)


def test_a_build_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="no objects of kernels"):
        check_objects(tmp_path)
