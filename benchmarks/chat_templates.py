"""What it costs to render chat templates in processes of their own.

    python benchmarks/chat_templates.py demo
    python benchmarks/chat_templates.py /tmp/qwen --rounds 5000 --load 4

Three ways to render one conversation take turns, in random order:

- here: Jinja in this process, as before there were renderers
- renderer: a renderer's process, called by the thread that waits for it
- server: the same from an event loop, through the threads of the server

The columns are milliseconds: the median, the 99th percentile, and by how much the median is above the one of
"here". Each conversation is measured on the machine as it is, and then beside --load processes that compute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moesaic.models import files
from moesaic.runtime.machine import cores
from moesaic.server.chat_threads import ChatThreads
from moesaic.server.service import CHATS_AT_ONCE
from moesaic.text.templates.jinja_template import compile_template, render_template
from moesaic.text.templates.pool import Renderers

Way = Callable[[], Awaitable[str]]
MOST = 1 << 26
"""Maximum length of a text in characters."""
WARM_UP = 50
"""Rounds of each way that are not counted."""
SPIN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a checkpoint with a chat template, a hub id, or demo")
    parser.add_argument("--rounds", type=int, default=2000, help="renderings of each way")
    parser.add_argument(
        "--load", type=int, default=2 * cores(), help="computing processes; default: two a core"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    arguments = parser.parse_args()
    source = template_of(files.resolve(arguments.model, None))
    found = asyncio.run(measure(source, arguments))
    show(found, Console(width=110))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


def template_of(path: Path) -> str:
    """The source of the checkpoint's chat template."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = json.loads((path / "tokenizer_config.json").read_text()).get("chat_template")
    if not isinstance(source, str):
        raise SystemExit(f"{path}: no chat template")
    return source


def conversations() -> dict[str, dict[str, Any]]:
    """Variables of the template, by name of the conversation."""

    def turns(number: int, characters: int) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        text = "word " * (characters // 5)
        return [{"role": roles[turn % 2], "content": text} for turn in range(number)]

    sizes = {"1 turn of 50 characters": (1, 50), "21 turns of 1000 characters": (21, 1000)}
    return {
        name: {"messages": turns(*size), "add_generation_prompt": True, "tools": None}
        for name, size in sizes.items()
    }


async def measure(source: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each conversation, load and way."""
    found = []
    with closing(Renderers(source)) as renderers:
        for name, variables in conversations().items():
            ways = ways_of(source, renderers, variables)
            texts = {await way() for way in ways.values()}
            assert len(texts) == 1, "all ways give the same text"
            for load in (0, arguments.load):
                with computing(load):
                    seconds = await timed(ways, arguments.rounds, random.Random(arguments.seed))
                for way, times in seconds.items():
                    record = {"conversation": name, "load": load, "way": way, "median": median(times)}
                    found.append(record | {"p99": times[int(0.99 * len(times))] * 1e3})
    return found


def ways_of(source: str, renderers: Renderers, variables: dict[str, Any]) -> dict[str, Way]:
    template, threads = compile_template(source), ChatThreads(CHATS_AT_ONCE)

    async def here() -> str:
        return render_template(template, variables, MOST)

    async def renderer() -> str:
        return renderers.render(variables)

    async def server() -> str:
        return await threads.run(lambda: renderers.render(variables))

    return {"here": here, "renderer": renderer, "server": server}


async def timed(ways: dict[str, Way], rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Sorted seconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + rounds):
        for name in rng.sample(sorted(ways), len(ways)):
            begun = time.perf_counter()
            await ways[name]()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - begun)
    return {name: sorted(times) for name, times in seconds.items()}


@contextmanager
def computing(processes: int) -> Iterator[None]:
    """`processes` processes compute until the end of the block."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def median(times: list[float]) -> float:
    return statistics.median(times) * 1e3


def show(found: list[dict[str, Any]], console: Console) -> None:
    table = Table("conversation", "beside", "way", "median ms", "p99 ms", "median above here")
    here = {
        (record["conversation"], record["load"]): record["median"]
        for record in found
        if record["way"] == "here"
    }
    for record in found:
        above = record["median"] - here[record["conversation"], record["load"]]
        beside = f"{record['load']} processes" if record["load"] else "nothing of ours"
        numbers = (f"{record['median']:.3f}", f"{record['p99']:.3f}", f"{above:+.3f}")
        table.add_row(record["conversation"], beside, record["way"], *numbers)
    console.print(table)


if __name__ == "__main__":
    main()
