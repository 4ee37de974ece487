"""A server under traffic while its processes are killed and intruders work on it.

    python -m scripts.soak.intruders --minutes 5      part of `make soak`

`moesaic serve` runs with two attention workers, two expert servers, two copies of each expert and a door for
servers of other hosts. Requests go on all the time, and each answer is compared with the one-process LLM: its
text, and its log-probabilities bit by bit. Every few seconds one of the processes is killed. Meanwhile:

    other weights       servers with zeroed down projections try to join
    flipped bits        servers with the right weights join through a relay that flips bits
    hanging template    conversations whose chat template never ends
    silent clients      connections that say nothing, half a head, or half a body

The exit code is 1 when an answer is different, a request got a status that it must not get, an intruder got
in, the server did not end at SIGTERM, or something stays behind in the temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tests.support.flipping_relay import Change, relay

from moesaic import LLM, SamplingParams
from moesaic.models import files
from moesaic.models.headers import Headers

KILL_SECONDS = 4.0
"""Seconds between two kills."""
JOIN_SECONDS = 12.0
"""Seconds after which a server that joins through the relay is ended."""
TEMPLATE = """{%- if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}
{%- endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"""
HANG = {"model": "demo", "messages": [{"role": "user", "content": "hang"}], "max_tokens": 1}
TOKENS = 48
"""Of one answer."""
BUSY = (429, 503)
"""Statuses that a request may get while the server is full; it is sent again."""


@dataclass
class Findings:
    """What the threads counted, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def complain(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


@dataclass
class Server:
    """`moesaic serve`, while it serves."""

    process: subprocess.Popen[str]
    url: str
    join_address: str
    secret_file: Path
    key: str

    def client(self, timeout: float = 120.0) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            found: dict[str, Any] = client.get("/v1/fault_tolerance/status").raise_for_status().json()
            return found


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """The server. folder: gets its temporary files and its secret."""
    template, secret, key = folder / "template.jinja", folder / "secret", secrets.token_hex(16)
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--json", "--threads", "1"]
    command += ["--attention-workers", "2", "--expert-servers", "2", "--min-replicas", "2"]
    command += ["--cluster-address", "tcp:127.0.0.1:0", "--cluster-secret-file", str(secret)]
    command += ["--chat-template", str(template), "--timeout-header", "3", "--timeout-body", "3"]
    (folder / "tmp").mkdir()
    environment = os.environ | {"MOESAIC_API_KEY": key, "TMPDIR": str(folder / "tmp")}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            address = ready["cluster"]["join_address"].removeprefix("tcp:")
            yield Server(process, ready["url"], address, secret, key)
        finally:
            process.kill()


# ---- traffic and kills


def expected(prompts: list[list[int]]) -> list[tuple[str, list[float]]]:
    """Text and log-probabilities of each prompt's answer, computed in this process."""
    model = LLM("demo", threads=1, kv_cache_memory="64MiB")
    params = [SamplingParams(**settings(number)) for number in range(len(prompts))]
    outputs = [one.outputs[0] for one in model.generate(prompts, params)]
    return [(one.text, [entry.logprob for entry in one.logprobs or [] if entry]) for one in outputs]


def settings(number: int) -> dict[str, Any]:
    """Of one request, for the API and for SamplingParams. The checkpoint's own settings are not used."""
    sampling = {"temperature": 0.9 * (number % 2), "top_p": 1.0, "top_k": 0, "seed": number}
    return {**sampling, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}


def ask(
    server: Server, prompts: list[list[int]], right: list[Any], findings: Findings, draw: random.Random
) -> None:
    number = draw.randrange(len(prompts))
    with server.client() as client:
        body = {"model": "demo", "prompt": prompts[number], **settings(number)}
        response = client.post("/v1/completions", json=body)
    if response.status_code in BUSY:
        findings.add(f"requests told to come again ({response.status_code})")
        time.sleep(0.2)
        return
    if response.status_code != 200:
        findings.complain(f"a request got status {response.status_code}: {response.text[:200]}")
        return
    choice = response.json()["choices"][0]
    if (choice["text"], choice["logprobs"]["token_logprobs"]) != right[number]:
        findings.complain(f"answer {number} is different: {choice['text'][:60]!r}")
    findings.add("answers compared")


def kill_one(server: Server, findings: Findings, draw: random.Random) -> None:
    time.sleep(KILL_SECONDS)
    serving = [one for one in server.status()["processes"] if one["pid"] and one["stage"] == "serving"]
    roles = Counter(one["role"] for one in serving)
    victims = [one for one in serving if roles[one["role"]] == 2]
    if victims:
        draw.shuffle(victims)  # the one that died least: a process that dies six times a minute is given up
        victim = min(victims, key=lambda one: findings.counts[f"kills of {one['name']}"])
        os.kill(victim["pid"], signal.SIGKILL)
        findings.add(f"kills of {victim['name']}")


# ---- intruders


def join_command(server: Server, address: str, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "moesaic", "join", address, "--secret-file", str(server.secret_file)]
    return [*command, "--role", "expert-server", "--threads", "1", *flags]


def join_with_other_weights(server: Server, model: Path, findings: Findings) -> None:
    command = join_command(server, server.join_address, "--model", str(model))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 2 or "other bytes of tensors" not in done.stderr:
        findings.complain(f"a server with other weights: code {done.returncode}, {done.stderr[-200:]!r}")
    findings.add("servers with other weights refused")
    time.sleep(1.0)


def join_through_a_relay(server: Server, findings: Findings, draw: random.Random) -> None:
    """The first connections meet a change each. Later ones are carried, and the server may serve."""
    changes = [Change(draw.choice(("up", "down")), draw.randrange(4000), draw.randrange(8)) for _ in range(4)]
    with relay(f"tcp:{server.join_address}", *changes) as between:
        command = join_command(server, f"127.0.0.1:{between.port}")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                process.wait(JOIN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    for _ in between.flipped:
        findings.add("bits flipped in what a server that joins sends or gets")


def hang_in_the_template(server: Server, findings: Findings) -> None:
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=HANG)
    if response.status_code not in (400, *BUSY):
        findings.complain(f"a hanging template got status {response.status_code}: {response.text[:200]}")
    findings.add("hanging templates ended")


def say_nothing(server: Server, findings: Findings) -> None:
    url = httpx.URL(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    whole = head + f"Authorization: Bearer {server.key}\r\n".encode() + b"Content-Length: 99\r\n\r\n{"
    silent = []
    for number in range(60):
        sock = socket.create_connection((url.host, url.port or 80), 10.0)
        sock.sendall((b"", head, whole)[number % 3])
        silent.append(sock)
    with server.client(20.0) as client:
        if client.get("/health").status_code != 200:
            findings.complain("/health did not answer beside silent clients")
    for sock in silent:
        sock.settimeout(20.0)
        try:
            while sock.recv(4096):
                pass
        except TimeoutError:
            findings.complain("a silent connection stayed open for 20 s")
        except OSError:
            pass  # it was reset
        sock.close()
        findings.add("silent connections closed")


def without_down_projections(to: Path) -> Path:
    shutil.copytree(files.resolve("demo"), to)
    with (to / "model.safetensors").open("r+b") as file:
        for name, place in Headers(to).list_tensors().items():
            if "down_proj" in name:
                file.seek(place.offset)
                file.write(bytes(place.size))
    return to


# ---- a run


def run(seconds: float, seed: int, console: Console) -> Findings:
    findings, draw = Findings(), random.Random(seed)
    prompts = [[draw.randrange(3, 900) for _ in range(3 + 5 * number)] for number in range(8)]
    right = expected(prompts)
    with tempfile.TemporaryDirectory(prefix="intruders-") as name:
        folder = Path(name)
        other = without_down_projections(folder / "other")
        with served(folder) as server:
            draws = [random.Random(f"{seed} {number}") for number in range(5)]
            work: list[Callable[[], None]] = [
                *[partial(ask, server, prompts, right, findings, own) for own in draws[:4]],
                partial(kill_one, server, findings, draw),
                partial(join_with_other_weights, server, other, findings),
                partial(join_through_a_relay, server, findings, draws[4]),
                partial(hang_in_the_template, server, findings),
                partial(say_nothing, server, findings),
            ]
            _together(work, seconds, findings, console)
            _ends(server, folder, findings)
    return findings


def _together(work: list[Callable[[], None]], seconds: float, findings: Findings, console: Console) -> None:
    """Each piece of work again and again, in a thread of its own."""
    end = time.monotonic() + seconds

    def repeat(one: Callable[[], None]) -> None:
        while time.monotonic() < end:
            try:
                one()
            except Exception as error:  # a thread that ended would hide everything after it
                findings.complain(f"{type(error).__name__}: {error}")
                time.sleep(0.5)

    threads = [threading.Thread(target=repeat, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("intruders")
        while any(thread.is_alive() for thread in threads):
            left = max(0.0, end - time.monotonic())
            answers = findings.counts["answers compared"]
            what = f"{len(findings.wrong)} wrong; {answers} answers; {left:.0f} s left"
            progress.update(task, description=what)
            time.sleep(0.2)


def _ends(server: Server, folder: Path, findings: Findings) -> None:
    """At SIGTERM, with nothing left of it."""
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(60)
    except subprocess.TimeoutExpired:
        findings.complain("the server did not end within 60 s of SIGTERM")
        return
    if code:
        findings.complain(f"the server ended with code {code}")
    findings.wrong += [f"left in the temporary folder: {path.name}" for path in (folder / "tmp").iterdir()]
    log = (folder / "log").read_text()
    findings.wrong += ["the log has a traceback"] * ("Traceback" in log)


def show(findings: Findings, console: Console) -> None:
    table = Table(title="a server, kills and intruders", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in sorted(findings.counts.items()):
        table.add_row(name, f"{count:,}")
    table.add_row("wrong", f"{len(findings.wrong):,}")
    console.print(table)
    for line in findings.wrong:
        console.print(line, style="red", markup=False, highlight=False)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.soak.intruders",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="%(default)s by default")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--json", type=Path, help="write the counts and what was wrong here")
    arguments = parser.parse_args(words)
    findings = run(60 * arguments.minutes, arguments.seed, Console(stderr=True))
    show(findings, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps({"counts": findings.counts, "wrong": findings.wrong}, indent=2))
    return 1 if findings.wrong or not findings.counts["answers compared"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
