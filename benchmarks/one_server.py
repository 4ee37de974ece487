"""A server of `moesaic serve` that a benchmark starts, and the throughput that it reaches."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MOESAIC = (sys.executable, "-m", "moesaic")
START_SECONDS = 180
PROMPT = 64
"""Number of tokens of a prompt."""


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    url: str
    pid: int


@contextmanager
def served(model: str, port: int, flags: Sequence[str], reuses_prefixes: bool = False) -> Iterator[Served]:
    """A server that runs until the context ends."""
    url = f"http://127.0.0.1:{port}"
    command = [*MOESAIC, "serve", model, "--port", str(port), *flags]
    command += [] if reuses_prefixes else ["--no-enable-prefix-caching"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _until_ready(url, process)
        yield Served(url, process.pid)
    finally:
        process.terminate()
        process.wait()


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < START_SECONDS and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{url}: the server did not start")


def rate(url: str, arguments: Namespace, seed: int) -> float:
    """Output tokens/s of one round. arguments: with requests, concurrency and new."""
    command = [*MOESAIC, "bench", "serve", "--base-url", url, "--json", "--seed", str(seed)]
    command += ["--num-prompts", str(arguments.requests), "--max-concurrency", str(arguments.concurrency)]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(arguments.new)]
    command += ["--temperature", "0", "--ignore-eos", "--num-warmups", "4"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(found["output_throughput"])
