"""How long agents wait for the first token of a turn: cold, in later turns, and after the server restarted.

    python benchmarks/agents.py demo --prefixes 600 --agents 2 --turns 3 --input-len 30 --output-len 16
    python benchmarks/agents.py /tmp/qwen --prefixes 8000 27000 --agents 1 8 --serve "--fast-memory 6GiB"

All agents share a system prompt and tool schemas of --prefixes tokens. Each of their turns adds an answer
and a tool result. `moesaic bench serve --num-clients` sends the turns. A server with an empty
--prefix-cache-dir answers all turns: `cold` is the first turn of the first agent, `shared` are the first
turns of others, `warm` the later turns. Then the server ends by SIGTERM, and its files leave the page cache.
Another one answers the first turns again: `after SIGTERM` is the first of them. It ends by SIGKILL, and a
third server answers them once more. Times are milliseconds to the first token. The script fails if a request
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from one_server import MOESAIC, served
from prefix_cache import drop_pages, wait_until_written
from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]


def converse(url: str, arguments: argparse.Namespace, prefix: int, agents: int, turns: int) -> Figures:
    """The figures of each kind of turns of one run of the agents."""
    command = [*MOESAIC, "bench", "serve", "--base-url", url, "--json", "--temperature", "0", "--ignore-eos"]
    command += ["--num-clients", str(agents), "--max-turns", str(turns), "--random-prefix-len", str(prefix)]
    command += ["--random-input-len", str(arguments.input_len)]
    command += ["--random-output-len", str(arguments.output_len), *shlex.split(arguments.bench)]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if report["failed"]:
        raise SystemExit(f"{report['failed']} requests failed: {report['errors']}")
    figures: Figures = report["turns"]
    return figures


def run_case(arguments: argparse.Namespace, prefix: int, agents: int) -> Figures:
    """The figures of turns before and after two restarts."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        flags = [*shlex.split(arguments.serve), "--prefix-cache-dir", directory]
        with served(arguments.model, arguments.port, flags, reuses_prefixes=True) as server:
            figures = converse(server.url, arguments, prefix, agents, arguments.turns)
            wait_until_written(server.url)
        for ending in (signal.SIGTERM, signal.SIGKILL):
            drop_pages(Path(directory))
            with served(arguments.model, arguments.port, flags, reuses_prefixes=True) as server:
                first_turns = converse(server.url, arguments, prefix, agents, 1)
                figures[f"after {ending.name}"] = first_turns["cold"]
                if ending is signal.SIGTERM:  # the server that follows is the one after a SIGKILL
                    os.kill(server.pid, signal.SIGKILL)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[8000, 27000], help="tokens of prefixes")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a tool result")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--serve", default="", help="further flags of moesaic serve")
    parser.add_argument("--bench", default="", help="further flags of moesaic bench serve, as --request-rate")
    parser.add_argument("--directory", help="where the files of prefixes are; they need a disk")
    parser.add_argument("--port", type=int, default=8932)
    arguments = parser.parse_args()
    percentiles = ("p50", "p90", "p99")
    table = Table("prefix", "agents", "turns", "count", *percentiles, "tok/s of a turn", "computed", "cached")
    for prefix in arguments.prefixes:
        for agents in arguments.agents:
            for name, kind in run_case(arguments, prefix, agents).items():
                times = [f"{kind[f'{point}_ttft_ms']:.0f}" for point in percentiles]
                rate = f"{kind['output_tokens_per_second_of_a_turn']:.1f}"
                counts = [str(kind[key]) for key in ("computed_tokens", "cached_tokens")]
                table.add_row(str(prefix), str(agents), name, str(kind["completed"]), *times, rate, *counts)
    Console().print(table)


if __name__ == "__main__":
    main()
