"""How long one prompt takes to its first token: cold, from memory, and from the disk after a restart.

    python benchmarks/prefix_cache.py demo --tokens 1000 --rounds 2
    python benchmarks/prefix_cache.py /tmp/qwen --tokens 8000 27000 --rounds 3

Each round has a prompt of its own and an empty --prefix-cache-dir. The server answers it twice, then it ends.
The files leave the page cache, as far as the system does what it is asked. Another server answers the prompt
a third time. Shown are medians of the seconds to the first token, the third over the first, and the bytes
that were read. The script ends with an error if the three answers differ, or if nothing was read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import statistics
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from one_server import served
from rich.console import Console
from rich.table import Table

VOCABULARY = 300
"""Prompts have token ids below this, which every model has."""


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    first_seconds: float
    text: str


@dataclass(frozen=True)
class Round:
    """The answers to one prompt."""

    cold: Answer
    warm: Answer
    restarted: Answer
    read_bytes: int


def ask(url: str, model: str, prompt: list[int]) -> Answer:
    """Stream one answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin, first_seconds, texts = time.perf_counter(), 0.0, []
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first_seconds = first_seconds or time.perf_counter() - begin
                texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return Answer(first_seconds, "".join(texts))


def read_counter(url: str, name: str) -> int:
    """The value of a counter of prefixes on the disk."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    match = re.search(rf"^moesaic:prefix_disk_{name}_total\S* (\S+)$", text, re.MULTILINE)
    return 0 if match is None else int(float(match.group(1)))


def wait_until_written(url: str) -> None:
    """Wait until two looks find the same number of written bytes, which is not 0."""
    last_count = -1
    while (count := read_counter(url, "written_bytes")) != last_count or not count:
        last_count = count
        time.sleep(2.0)


def drop_pages(directory: Path) -> None:
    """Ask the system to forget the contents of all files."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run_round(arguments: argparse.Namespace, tokens: int, seed: int) -> Round:
    """Answer one prompt three times."""
    prompt = random.Random(seed).choices(range(3, VOCABULARY), k=tokens)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        flags = [*shlex.split(arguments.serve), "--prefix-cache-dir", directory]
        flags += ["--served-model-name", "model", "--max-model-len", str(tokens + 16)]
        with served(arguments.model, arguments.port, flags, reuses_prefixes=True) as server:
            cold, warm = (ask(server.url, "model", prompt) for _ in range(2))
            wait_until_written(server.url)
        drop_pages(Path(directory))
        with served(arguments.model, arguments.port, flags, reuses_prefixes=True) as server:
            restarted = ask(server.url, "model", prompt)
            time.sleep(1.0)  # the worker reports its counters now and then
            read_bytes = read_counter(server.url, "read_bytes")
    if not cold.text == warm.text == restarted.text or not read_bytes:
        raise SystemExit(f"{cold.text!r}, {warm.text!r}, {restarted.text!r}; {read_bytes} bytes were read")
    return Round(cold, warm, restarted, read_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000], help="lengths of the prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="further flags of moesaic serve")
    parser.add_argument("--directory", help="where the files of the rounds are; they need a disk")
    parser.add_argument("--port", type=int, default=8931)
    arguments = parser.parse_args()
    table = Table("tokens", "cold s", "from memory s", "restarted s", "restarted/cold", "MiB read")
    for tokens in arguments.tokens:
        rounds = [run_round(arguments, tokens, seed) for seed in range(arguments.rounds)]
        cold, warm, restarted = (
            statistics.median(getattr(found, name).first_seconds for found in rounds)
            for name in ("cold", "warm", "restarted")
        )
        ratio = statistics.median(
            found.restarted.first_seconds / found.cold.first_seconds for found in rounds
        )
        times = (f"{cold:.2f}", f"{warm:.2f}", f"{restarted:.2f}")
        table.add_row(str(tokens), *times, f"{ratio:.3f}", f"{rounds[0].read_bytes / 2**20:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
