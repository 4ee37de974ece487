"""Servers of a model larger than their memory: moesaic beside llama.cpp, whose file is mapped.

Each server runs in a memory control group whose limit is --cap plus --libraries, with its page cache. The
checkpoint's pages are dropped from the page cache before it starts. moesaic gets --cap as --fast-memory.
Then each number of --clients asks it at once, outside of the group. Shown are medians of interleaved rounds:
`tok/s` is generated tokens over the duration of the load, `TTFT` and `answer` are the medians of the requests
in ms until the first and the last token, `charged` is the most memory of the group in MiB, and `read` the
bytes that moesaic read of experts per generated token.

llama-cpp-python's server (--llama) computes one request at a time. By default it locks the whole file in
memory and keeps logits of all tokens; both are off here. A llama-server of llama.cpp (--llama-server)
computes as many as there are clients. Random weights hardly ever end an answer early.

--schedules and --kernels add servers of moesaic that have these flags. --bound records the routes of the load
with the model in memory, and shows `least`, the bytes per token that any server in moesaic's memory has to
read, and `of bound`, the tok/s over those that the disk would give. See `bound.py`. The disk is measured
before each server of a round.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

import engines
from countdown import Clock, Tell
from rich.console import Console
from rich.table import Table

from offloading.bound import Routes, measure_disk, record
from offloading.clients import load
from offloading.disk import _absolute, _measured, _try
from offloading.groups import Group, create
from offloading.watching import drop_cache

WORDS = ("def", "class", "return", "the", "number", "of", "apples", "import", "value", "river", "slowly")
MIB = 1 << 20
GIB = 1 << 30
NAME = "it"
"""The model's name in the API of every server."""
PATIENCE = 600.0
"""Seconds until a server has to answer."""


@dataclass(frozen=True)
class Contender:
    """A server that is started anew in each round."""

    name: str
    command: list[str]
    """{port} stands for its port."""
    reads: Path
    """Files that must not be in the page cache when it starts."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=_absolute, help="a Hugging Face directory, or a GGUF file")
    parser.add_argument("--cap", default="1200MiB", help="fast memory")
    parser.add_argument("--libraries", default="600MiB", help="what the processes may take besides")
    parser.add_argument("--no-limit", action="store_true", help="no control group")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--prompt-len", type=int, default=64, help="words of a prompt")
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens of a request at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--schedules", nargs="+", default=["auto"], help="--offload-schedule of moesaic")
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="--kernels of moesaic")
    parser.add_argument("--bound", action="store_true", help="what the disk allows; records routes first")
    hardware = "of `moesaic hardware measure`; measured if not given"
    parser.add_argument("--hardware", type=_absolute, help=hardware)
    parser.add_argument("--llama", type=Path, metavar="VENV", help="from setup_peer.sh llama")
    parser.add_argument("--llama-server", type=_absolute, metavar="FILE", help="llama.cpp's own program")
    parser.add_argument("--work", type=_absolute, help="where GGUF files go; beside MODEL if not given")


def quick(arguments: argparse.Namespace) -> None:
    arguments.clients, arguments.rounds, arguments.requests, arguments.gen_len = [1, 2], 1, 1, 4


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """A row for each contender and number of clients."""
    from moesaic.config import parse_bytes

    cap = parse_bytes("--cap", arguments.cap)
    limit = None if arguments.no_limit else cap + parse_bytes("--libraries", arguments.libraries)
    if limit is not None:
        _try(limit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hardware = arguments.hardware or _measured(arguments, folder / "this.toml")
        everyone = contenders(arguments, hardware)
        routes = _record_routes(arguments) if arguments.bound else {}
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        steps = [f"{one.name}, round {turn + 1}" for turn in range(arguments.rounds) for one in everyone]
        with Clock(steps) as clock:
            for turn in range(arguments.rounds):
                for one in everyone:

                    def run(tell: Tell, one: Contender = one, turn: int = turn) -> list[dict[str, Any]]:
                        speed = measure_disk(_weights(arguments.model)) if routes else None
                        return [row | {"disk": speed} for row in _round(one, arguments, limit, folder, turn)]

                    for row in clock.timed(f"{one.name}, round {turn + 1}", run):
                        found.setdefault((one.name, row["clients"]), []).append(row)
    settings = {key: str(value) for key, value in vars(arguments).items()}
    medians = [_median(rows) for rows in found.values()]
    return {"settings": settings, "rows": [row | _bound(row, routes.get(row["clients"])) for row in medians]}


def _record_routes(arguments: argparse.Namespace) -> dict[int, Routes]:
    """Number of clients -> the routes of their first round."""
    return {
        clients: record(
            arguments.model, _prompts(arguments, clients, 0), arguments.gen_len, arguments.max_model_len
        )
        for clients in arguments.clients
    }


def _bound(row: dict[str, Any], routes: Routes | None) -> dict[str, float]:
    """The bytes that are read at least per token, and the share of the tok/s that the disk allows then."""
    if routes is None or row.get("places") is None:
        return {}
    least = routes.least_bytes(row["clients"], int(row["places"])) / routes.num_tokens
    return {"least": least, "share": row["throughput"] * least / row["disk"]}


def _weights(model: Path) -> Path:
    """The largest file of a model."""
    files = [model] if model.is_file() else list(model.glob("*.safetensors"))
    return max(files, key=lambda file: file.stat().st_size)


def contenders(arguments: argparse.Namespace, hardware: Path) -> list[Contender]:
    """moesaic first. Writes the GGUF file that llama.cpp needs, unless the model is one."""
    most, threads, length = max(arguments.clients), str(arguments.threads), arguments.max_model_len
    ours = [
        *(sys.executable, "-m", "moesaic", "serve", str(arguments.model), "--port", "{port}"),
        *("--fast-memory", arguments.cap, "--hardware", str(hardware), "--threads", threads),
        *("--max-num-seqs", str(most), "--max-model-len", str(length), "--served-model-name", NAME),
    ]
    found = [
        Contender(
            " ".join(["moesaic", *(word for word in (schedule, kernels) if word != "auto")]),
            [*ours, "--offload-schedule", schedule, "--kernels", kernels],
            arguments.model,
        )
        for schedule in arguments.schedules
        for kernels in arguments.kernels
    ]
    if not (arguments.llama or arguments.llama_server):
        return found
    file = _gguf_file(arguments)
    if arguments.llama_server:
        command = [
            *(str(arguments.llama_server), "-m", str(file), "--port", "{port}", "--alias", NAME),
            *("-t", threads, "-np", str(most), "-c", str(most * length)),
        ]
        return [*found, Contender("llama-server mmap", command, file)]
    command = [
        *(engines._python(arguments.llama), "-m", "llama_cpp.server", "--model", str(file)),
        *("--port", "{port}", "--use_mmap", "true", "--n_threads", threads, "--n_ctx", str(length)),
        *("--model_alias", NAME, "--verbose", "false"),
        *("--interrupt_requests", "false", "--use_mlock", "false", "--logits_all", "false"),
    ]
    return [*found, Contender("llama-cpp-python mmap", command, file)]


def _gguf_file(arguments: argparse.Namespace) -> Path:
    if arguments.model.is_file():
        return Path(arguments.model)
    if not arguments.llama:
        raise SystemExit("--llama-server: give --llama too, which writes the GGUF file")
    python = engines._python(arguments.llama)
    return Path(engines._gguf(python, arguments.model, arguments.work, "bf16"))


def _round(
    one: Contender, arguments: argparse.Namespace, limit: int | None, folder: Path, turn: int
) -> list[dict[str, Any]]:
    """Starts a server and loads it with each number of clients. A server that dies ends its round."""
    rows: list[dict[str, Any]] = []
    drop_cache([one.reads])
    group = create(limit, f"moesaic-serve-{os.getpid()}") if limit is not None else None
    try:
        with _running(one, group, folder) as url:
            for clients in arguments.clients:
                before, places = _read(url), _metric(url, "moesaic:resident_experts")
                try:
                    row = load(url, NAME, _prompts(arguments, clients, turn), arguments.gen_len, clients)
                except (OSError, HTTPException) as error:
                    raise ServerFailed(str(error)) from error
                read = None if before is None else (_read(url) or 0.0) - before
                kept = max(
                    [count for count in (places, _metric(url, "moesaic:resident_experts")) if count],
                    default=None,
                )
                rows.append({"name": one.name, "clients": clients, "read": read, "places": kept, **row})
    except ServerFailed as error:
        why = "out of memory" if group is not None and group.killed() else str(error)
        left = arguments.clients[len(rows) :]
        rows += [{"name": one.name, "clients": clients, "failed": why} for clients in left]
    finally:
        charged = group.peak() if group is not None else None
        if group is not None:
            group.remove()
    return [row | {"charged": charged} for row in rows]


class ServerFailed(Exception):
    """Why a server does not answer, in one line."""


@contextmanager
def _running(one: Contender, group: Group | None, folder: Path) -> Iterator[str]:
    """The server's URL, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.replace("{port}", str(port)) for word in one.command]
    with (folder / "said").open("w+") as said:
        entered = group.entering(command) if group else command
        process = subprocess.Popen(entered, stdout=said, stderr=said, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, folder / "said")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[Any], url: str, said: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(f"{url}/health"):
            return
        time.sleep(0.2)
    lines = said.read_text().strip().splitlines() or ["it said nothing"]
    raise ServerFailed(lines[-1])


def _answers(url: str) -> bool:
    """Whether a server is ready. llama-cpp-python's does not know the address, and says so once it is."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == HTTPStatus.NOT_FOUND
    except OSError:
        return False


def _prompts(arguments: argparse.Namespace, clients: int, turn: int) -> list[str]:
    """Prompts of which no two of a round begin alike, so no server reuses a prefix."""
    rng = random.Random(f"{clients} {turn}")
    texts = (
        " ".join(rng.choices(WORDS, k=arguments.prompt_len)) for _ in range(clients * arguments.requests)
    )
    return [f"{number} {text}" for number, text in enumerate(texts)]


def _read(url: str) -> float | None:
    """Bytes of experts that moesaic has read so far. None for other servers."""
    return _metric(url, "moesaic:expert_bytes_total", '"slow"')


def _metric(url: str, name: str, label: str = "") -> float | None:
    """A value of moesaic's metrics. None for other servers."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    values = [line for line in lines if line.startswith(name) and label in line]
    return float(values[0].rpartition(" ")[2]) if values else None


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a contender's rounds, or why the first of them failed."""
    failed = [row for row in rows if "failed" in row]
    if failed:
        return failed[0]
    names = ("throughput", "ttft", "answer", "charged", "read", "tokens", "places", "disk")
    known = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    medians = {name: statistics.median(values) if values else None for name, values in known.items()}
    return {"name": rows[0]["name"], "clients": rows[0]["clients"], **medians}


def show(found: dict[str, Any], console: Console) -> None:
    settings = found["settings"]
    title = f"{Path(settings['model']).name}, {settings['cap']} + {settings['libraries']}"
    table = Table(title=title, title_justify="left")
    bounds = ("disk", "least", "of bound") if any("share" in row for row in found["rows"]) else ()
    for name in ("clients", "server", "tok/s", "TTFT", "answer", "charged", "read", *bounds):
        table.add_column(name, justify="left" if name == "server" else "right")
    for row in sorted(found["rows"], key=lambda row: int(row["clients"])):
        head = str(row["clients"]), row["name"]
        if "failed" in row:
            table.add_row(*head, row["failed"])
            continue
        charged = "" if row["charged"] is None else f"{row['charged'] / MIB:.0f}"
        read = "" if row["read"] is None else f"{row['read'] / MIB / max(1, row['tokens']):.1f} MiB"
        figures = f"{row['throughput']:.2f}", f"{row['ttft']:.0f}", f"{row['answer']:.0f}"
        bound = "", "", ""
        if "share" in row:
            bound = f"{row['disk'] / GIB:.2f} GiB/s", f"{row['least'] / MIB:.1f} MiB", f"{row['share']:.2f}"
        table.add_row(*head, *figures, charged, read, *(bound if bounds else ()))
    console.print(table)
