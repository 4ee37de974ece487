"""Installs a wheel as a user does, where no compiler is, and compares its answer with this checkout's.

    python -m scripts.check_wheel dist/moesaic-*-manylinux_*_x86_64.whl
    python -m scripts.check_wheel dist/moesaic-*-manylinux_*_aarch64.whl --torch torch==2.10.0

It makes a clean Debian system with Python (scripts/clean_root.py), and then does what the quickstart says:
`pip install` and `moesaic serve demo`. It asks for one chat completion, compares the tokens with those of
the checkout, and stops the server with SIGTERM. The exit code of the server must be 0. A wheel of another
architecture runs under QEMU's user-mode emulation.

With --torch, pip installs that build beside the wheel, whatever the wheel asks for. torch 2.10.0 is the last
one whose build for Arm on PyPI needs no CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from scripts.clean_root import CleanRoot, RootError, make_root, pip_variables

from moesaic import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
VENV = "/opt/moesaic"
"""Where the wheel is installed in the clean root."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
MESSAGES = [
    {"role": "user", "content": "Extract name and age as JSON: Ida is 30 years old and lives in Rome."}
]
MAX_TOKENS = 32
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make")


class CheckError(Exception):
    """What is wrong with the installed wheel."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", help="what to install as torch; default: the CPU build of constraints.txt")
    parser.add_argument("--tests", nargs="*", default=[], help="test files that run against the wheel too")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="moesaic-root-") as folder:
            check(options.wheel.resolve(), Path(folder), options.torch, options.tests)
    except (CheckError, RootError) as error:
        print(f"check_wheel: {error}", file=sys.stderr)
        return 1
    return 0


def check(wheel: Path, folder: Path, torch: str | None, tests: Sequence[str]) -> None:
    """Install `wheel` in a clean root in `folder` and try it. Raises CheckError or RootError."""
    arch = arch_of(wheel)
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    folders = [link for link in links if Path(link).is_dir()] + ([str(ROOT)] if tests else [])
    root = make_root(folder, arch, folders=tuple(folders))
    install(root, wheel, torch)
    answer, code = ask(root)
    expected = checkout_tokens()
    print(f"check_wheel: {answer['kernels']}, tokens {answer['tokens']}, exit code {code}")
    if answer["tokens"] != expected:
        raise CheckError(f"the wheel's tokens are {answer['tokens']}; the checkout's are {expected}")
    if code != 0:
        raise CheckError(f"the server ended with exit code {code} after SIGTERM; expected 0")
    if tests:
        run_tests(root, tests)


def arch_of(wheel: Path) -> str:
    """The architecture in the tag of a wheel."""
    if not wheel.is_file():
        raise CheckError(f"{wheel}: no such file")
    tags = {tag.platform for tag in parse_wheel_filename(wheel.name)[3]}
    arches = {match[1] for tag in tags if (match := re.search(r"_(x86_64|aarch64)$", tag))}
    if len(arches) != 1:
        raise CheckError(f"{wheel.name} is tagged {', '.join(sorted(tags))}; allowed: x86_64 or aarch64")
    return arches.pop()


def install(root: CleanRoot, wheel: Path, torch: str | None) -> None:
    """Install the wheel with pip, and torch before it. Another torch than the pinned one stays as it is."""
    if compilers := [name for name in COMPILERS if root.has_program(name)]:
        raise CheckError(f"the clean root has a compiler: {', '.join(compilers)}")
    shutil.copy(wheel, root.folder / "tmp")
    pinned = CONSTRAINTS.read_text()
    [pinned_torch] = re.findall(r"(?m)^torch==.*$", pinned)
    (root.folder / "tmp" / CONSTRAINTS.name).write_text(pinned.replace(pinned_torch, torch or pinned_torch))
    root.run("/usr/bin/python3", "-m", "venv", VENV)
    if torch is None:
        pip(root, f"{pinned_torch}+cpu", "--no-deps", "--retries", "2", "--extra-index-url", TORCH_INDEX)
        pip(root, f"/tmp/{wheel.name}")
    else:
        pip(root, torch)
        pip(root, "--no-deps", f"/tmp/{wheel.name}")
        pip(root, *requirements(wheel))


def pip(root: CleanRoot, *words: str) -> None:
    """Run `pip install` in the clean root, with the versions of constraints.txt."""
    command = (f"{VENV}/bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    root.run(*command, "--constraint", f"/tmp/{CONSTRAINTS.name}", *words, **pip_variables())


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs on Linux, but for torch and extras."""
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = BytesParser().parsebytes(archive.read(name))
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    kept = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [f"{one.name}{one.specifier}" for one in kept if one.name != "torch"]


def ask(root: CleanRoot) -> tuple[dict[str, Any], int]:
    """The kernels and the tokens of a server in the clean root, and its exit code after SIGTERM."""
    command = root.command(f"{VENV}/bin/moesaic", "serve", "demo", "--port", "0", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                raise CheckError("the server ended before it served")
            started = json.loads(line)
            request = urllib.request.Request(
                f"{started['url']}/v1/chat/completions",
                json.dumps(
                    {
                        "model": "demo",
                        "messages": MESSAGES,
                        "temperature": 0,
                        "max_tokens": MAX_TOKENS,
                        "return_token_ids": True,
                    }
                ).encode(),
                {"Content-Type": "application/json"},
            )
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=300) as response:
                [choice] = json.load(response)["choices"]
        finally:
            server.send_signal(signal.SIGTERM)
    return {"kernels": started["kernels"], "tokens": choice["token_ids"]}, server.returncode


def checkout_tokens() -> list[int]:
    """The tokens that this checkout answers with."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    return list(LLM("demo").chat([MESSAGES], params)[0].outputs[0].token_ids)


def run_tests(root: CleanRoot, tests: Sequence[str]) -> None:
    """Run tests of this checkout against the installed wheel."""
    pip(root, "pytest", "pytest-timeout", "hypothesis")
    words = (f"{VENV}/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full")
    root.run(
        *words,
        "--rootdir",
        str(ROOT),
        "--timeout",
        "0",
        *(str(ROOT / test) for test in tests),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONPATH=str(ROOT),
    )


if __name__ == "__main__":
    raise SystemExit(main())
