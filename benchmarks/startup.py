"""How long a user waits before anything happens: importing, installing, and serving until the first answer.

    python benchmarks/startup.py demo --vllm /tmp/vllm

`import` is a new interpreter that imports the package less one that imports nothing. `serve` begins with the
command: until /health says 200, and until one token was generated. `install` compiles the kernels of this
checkout into an empty folder, the build's own requirements being there (torch and other libraries are not
counted: their time is the network's). With --vllm, from `setup_peer.sh vllm`, that package is imported too.
Medians and all rounds; files that are read may lie in the page cache, as they do for whoever starts twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
POLL = 0.01
"""Seconds between two looks at /health."""


def timed(command: list[str], **settings: Any) -> float:
    """Seconds that a command takes. Raises CalledProcessError with what it printed where it fails."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True, **settings)
    return time.perf_counter() - started


def importing(python: str, package: str) -> float:
    """Seconds of `import package` in a new interpreter, without those of the interpreter."""
    return timed([python, "-c", f"import {package}"]) - timed([python, "-c", "pass"])


def serving(model: str) -> tuple[float, float]:
    """Seconds from the command to /health, and to the end of a completion of one token."""
    command = [str(Path(sys.executable).parent / "moesaic"), "serve", model, "--port", "0", "--json"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            while not healthy(url):
                time.sleep(POLL)
            ready = time.perf_counter() - started
            body = json.dumps({"model": model, "prompt": "Once", "max_tokens": 1}).encode()
            asked = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 1
            return ready, time.perf_counter() - started
        finally:
            server.send_signal(signal.SIGTERM)


def healthy(url: str) -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def installing() -> float:
    """Seconds of `pip install .` without what it depends on, compiled from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        build = f"--config-settings=build-dir={folder}/build"
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", build]
        return timed([*pip, "--target", f"{folder}/site", str(ROOT)], env=os.environ | {"PIP_NO_INPUT": "1"})


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every round, by what was timed."""
    found: dict[str, list[float]] = {}
    for turn in range(arguments.rounds + 1):
        ready, answered = serving(arguments.model)
        row = {
            "import moesaic": importing(sys.executable, "moesaic"),
            f"serve {arguments.model}: ready": ready,
            f"serve {arguments.model}: first token answered": answered,
        }
        if arguments.vllm:
            row["import vllm"] = importing(str(arguments.vllm / "bin" / "python"), "vllm")
        for name, seconds in row.items() if turn else ():  # the first round fills the page cache
            found.setdefault(name, []).append(seconds)
    if arguments.install:
        found["pip install ."] = [installing() for _ in range(arguments.install)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="a Hugging Face directory, or demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--install", type=int, default=1, metavar="N", help="this many installs; 0: none")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="from setup_peer.sh vllm")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    arguments = parser.parse_args()
    found = measure(arguments)
    table = Table("what", "median s", "all rounds", title=f"{os.cpu_count()} cores")
    for name, seconds in found.items():
        shown = " ".join(f"{one:.2f}" for one in seconds)
        table.add_row(name, f"{statistics.median(seconds):.2f}", shown)
    Console(width=110).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
