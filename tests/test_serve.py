"""`moesaic serve demo` as a person runs it: a real process, real sockets, the real openai client."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic import LLM, SamplingParams
from tests.support import pairs

STREAMS = 64
COMMAND = (sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--threads", "1")


@dataclass
class Server:
    """A running `moesaic serve`, and where it answers."""

    process: subprocess.Popen[str]
    info: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.info["url"])

    def metrics(self, until: Callable[[dict[str, float]], bool] | None = None) -> dict[str, float]:
        """What /metrics says once it fulfils `until`, or after a minute.

        A worker sends its counts after its tokens, so that a client can be ahead of them.
        """
        deadline = time.monotonic() + 60
        found = self._metrics()
        while until is not None and not until(found) and time.monotonic() < deadline:
            time.sleep(0.05)
            found = self._metrics()
        return found

    def _metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.replace('model_name="demo"', ""): float(value) for name, value in pairs}


def idle(found: dict[str, float]) -> bool:
    """Whether no request runs or waits."""
    return not found["moesaic:num_requests_running{}"] and not found["moesaic:num_requests_waiting{}"]


def start(*flags: str, model: str = "demo") -> Server:
    command = [model if part == "demo" else part for part in COMMAND]
    process = subprocess.Popen([*command, *flags, "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        return Server(process, json.loads(line))
    raise AssertionError(f"the server ended with code {process.wait()} before it served")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start()
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0
    assert running.process.stdout is not None
    running.process.stdout.close()


async def one_stream(client: openai.AsyncOpenAI, prompt: str, leave_after: int | None) -> str | None:
    """The whole text, or None when it walked away after some chunks."""
    stream = await client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = ""
    chunks = 0
    async for chunk in stream:
        text += chunk.choices[0].text
        chunks += 1
        if chunks == leave_after:
            await stream.close()
            return None
    return text


async def all_streams(url: str, prompts: list[str], leaving: list[int | None]) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        jobs = [one_stream(client, p, leave) for p, leave in zip(prompts, leaving, strict=True)]
        return await asyncio.gather(*jobs)


@pytest.mark.slow
def test_64_streams_with_random_cancellations_leave_no_block_behind(server: Server) -> None:
    rng = random.Random(0)
    words = ["def", "class", "return", "the", "number", "of", "apples", "import", "value", "packages", "file"]
    prompts = [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(STREAMS)]
    leaving = [rng.choice([None, None, 1, 5, 20]) for _ in range(STREAMS)]
    texts = asyncio.run(all_streams(server.url, prompts, leaving))

    llm = LLM("demo", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    stayed = [index for index, leave in enumerate(leaving) if leave is None]
    alone = [result.text for result in llm.generate([prompts[index] for index in stayed], params)]
    assert [texts[index] for index in stayed] == alone
    assert all(texts[index] is None for index in set(range(STREAMS)) - set(stayed))

    before = server.metrics(until=idle)  # the last cancellations may still be on their way
    states = {state: before[f'moesaic:kv_blocks{{,state="{state}"}}'] for state in ("free", "cached", "used")}
    assert states["used"] == 0
    assert states["free"] + states["cached"] == server.info["num_blocks"]
    assert states["cached"] > 0


@pytest.mark.slow
def test_chat_gives_the_tokens_of_the_library(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Natalia has 3 apples and buys 4. How many now?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=30)
    llm = LLM("demo", threads=1)
    expected = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=30))[0]
    assert answer.choices[0].message.content == expected.text


@pytest.mark.slow
def test_sigkill_of_the_worker_ends_the_server_with_a_clear_answer() -> None:
    running = start()
    children = subprocess.run(
        ["pgrep", "-P", str(running.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="demo", prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    for child in children:
        subprocess.run(["kill", "-9", child], check=True)
    with pytest.raises(openai.APIError, match="worker"):
        list(stream)
    assert running.process.wait(60) == 1
    assert running.process.stdout is not None
    running.process.stdout.close()


def children(pid: int) -> list[int]:
    task = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in task.read_text().split()] if task.exists() else []


STARTING = list(itertools.product((signal.SIGTERM, signal.SIGINT), ((), ("--expert-servers", "1"))))


@pytest.mark.parametrize(("signum", "more"), pairs.some(STARTING, STARTING[1:3]))
def test_a_signal_while_it_starts_ends_what_it_started(signum: signal.Signals, more: tuple[str, ...]) -> None:
    """As soon as there is a worker, which is long before it has loaded anything."""
    process = subprocess.Popen([*COMMAND, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (workers := children(process.pid)):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signum)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "Traceback" not in said, said
    deadline = time.monotonic() + 60  # one that was just being started sees the end of its connection
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
