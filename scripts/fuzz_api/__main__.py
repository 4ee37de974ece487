"""Sends right and wrong requests to a real server with low limits. No answer may be a 5xx.

    python -m scripts.fuzz_api                        20,000 calls
    python -m scripts.fuzz_api --calls 100000         as `make full` does
    python -m scripts.fuzz_api --seed 3               other requests
    python -m scripts.fuzz_api --replay failure.json  the request that failed, once more

The server is `moesaic serve demo` with an expert server, 64 descriptors, a short queue and few connections.
Requests come from the published schema, valid and invalid, and are then changed: wrong types, deep nesting,
huge numbers, NaN, invalid UTF-8, content types, methods, headers, paths, half requests, bytes that are no
HTTP. Several connections send at the same time, and /health and /metrics are asked meanwhile.

The exit code is 1 when there was a 5xx other than the 503 for too many connections, when a complete request
got no answer, when /health was not 200, when the server printed a traceback, or when it did not end with 0.
The first failing request is written to --failure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from scripts.fuzz_api.requests import HALF, LEAVE, Call, Maker, Seed, seeds

SECONDS = 60.0
"""Longer than any answer may take."""
API_KEY, ADMIN_KEY = "fuzz-api-key", "fuzz-admin-key"
DESCRIPTORS = 64
COMMAND = (
    *("serve", "demo", "--port", "0", "--json", "--threads", "1", "--max-model-len", "256"),
    *("--max-num-seqs", "4", "--max-queue", "4", "--max-connections", "8"),
    *("--timeout-header", "2", "--timeout-body", "2", "--timeout-keep-alive", "2"),
    *("--attention-workers", "1", "--expert-servers", "1"),
    *("--api-key", API_KEY, "--admin-key", ADMIN_KEY),
)
UNANSWERED = "no answer"


@dataclass
class Tally:
    """What was answered. Threads share it."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(endpoint, status) -> number."""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[tuple[Call, str, str]] = field(default_factory=list)
    """Requests, their status, and the answer or the error."""
    health: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, call: Call, status: str, text: str) -> None:
        with self.lock:
            self.answers[call.endpoint, status] += 1
            self.kinds[call.kind, status] += 1
            if failed(call, status, text):
                self.failures.append((call, status, text))

    @property
    def calls(self) -> int:
        return sum(self.answers.values())


def failed(call: Call, status: str, text: str) -> bool:
    """Whether the server owed another answer."""
    if status == UNANSWERED:
        return call.ending == ""
    meant = (
        "too_many_connections" in text or "the server has too many connections" in text
    )  # Anthropic's form
    return status.startswith("5") and not meant


class Client:
    """One connection, which is kept as long as the server keeps it. Use it as `with Client(port)`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._sock: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def send(self, call: Call) -> tuple[str, str]:
        """The status and the text of the answer. A kept connection that has ended is replaced once."""
        kept = self._sock is not None
        status, text = self._send(call)
        if status == UNANSWERED and kept and call.ending == "":
            status, text = self._send(call)
        return status, text

    def _send(self, call: Call) -> tuple[str, str]:
        try:
            if self._sock is None:
                self._sock = socket.create_connection(("127.0.0.1", self._port), timeout=SECONDS)
            sent = ""
            try:
                self._sock.sendall(call.data)
                if call.ending == HALF:
                    self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:  # an early answer may have come before
                sent = repr(error)
            if call.ending == LEAVE:
                self.close()
                return "left", ""
            return self._read(call, sent)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            return UNANSWERED, repr(error)

    def _read(self, call: Call, sent: str) -> tuple[str, str]:
        assert self._sock is not None
        answer = http.client.HTTPResponse(self._sock, method=call.method)
        answer.begin()
        text = answer.read().decode(errors="replace")
        if call.method == "HEAD" and answer.getheader("Retry-After"):  # the only 503 with it while it serves
            text = "too_many_connections"
        if answer.will_close or call.ending or sent:
            self.close()
        return str(answer.status), text

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None


@contextmanager
def serving(log: IO[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server and its port. What it prints on stderr goes to `log`."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    command = [sys.executable, "-m", "moesaic", *COMMAND]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=limit)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise SystemExit(f"the server ended with code {process.wait()}")
        yield process, int(json.loads(line)["url"].rsplit(":", 1)[1])
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


def fuzz(port: int, found: list[Seed], arguments: argparse.Namespace) -> Tally:
    """Send all calls from several threads, and show how far they are."""
    tally, left, over = Tally(), iter(range(arguments.calls)), threading.Event()

    def send(number: int) -> None:
        maker = Maker(
            found, "demo", (API_KEY, API_KEY, ADMIN_KEY, None), random.Random(f"{arguments.seed} {number}")
        )
        with Client(port) as client:
            while not over.is_set():
                with tally.lock:
                    if next(left, None) is None:
                        break
                call = maker.make()
                tally.count(call, *client.send(call))

    def look() -> None:
        while not over.wait(0.5):
            for path in ("/health", "/metrics"):
                call = Call(
                    path, "", "GET", f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
                )
                with Client(port) as client:
                    status = client.send(call)[0]
                with tally.lock:
                    tally.health[status] += 1

    threads = [threading.Thread(target=send, args=(number,)) for number in range(arguments.connections)]
    watch = threading.Thread(target=look)
    began = time.monotonic()
    for thread in [*threads, watch]:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            threads[0].join(1.0) if threads[0].is_alive() else time.sleep(0.2)
            progress(tally, arguments.calls, time.monotonic() - began)
            if arguments.minutes and time.monotonic() - began > 60 * arguments.minutes:
                break
    finally:
        over.set()
        for thread in [*threads, watch]:
            thread.join()
    progress(tally, arguments.calls, time.monotonic() - began)
    sys.stderr.write("\n")
    return tally


def progress(tally: Tally, calls: int, seconds: float) -> None:
    with tally.lock:
        done, bad = tally.calls, len(tally.failures)
    rate = done / seconds if seconds else 0.0
    sys.stderr.write(f"\r{done:,} of {calls:,} calls, {rate:.0f}/s, {bad} failed, {seconds:.0f} s ")
    sys.stderr.flush()


def report(title: str, counted: Counter[tuple[str, str]]) -> str:
    """A table: a row for each name, a column for each status."""
    statuses = sorted({status for _, status in counted})
    names = sorted({name for name, _ in counted})
    rows = [[title, *statuses]]
    rows += [[name, *(str(counted[name, status] or "") for status in statuses)] for name in names]
    rows += [["all", *(str(sum(counted[name, status] for name in names)) for status in statuses)]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:{'<' if column == 0 else '>'}{widths[column]}}" for column, cell in enumerate(row))
        for row in rows
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.fuzz_api",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, help="end earlier, after this time")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--connections", type=int, default=12)
    parser.add_argument(
        "--each", type=int, default=100, help="requests that the schema gives for each operation"
    )
    parser.add_argument(
        "--failure", type=Path, default=Path("fuzz_api_failure.json"), help="where it is written"
    )
    parser.add_argument("--replay", type=Path, help="send the request in this file only")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryFile("w+") as log:
        with serving(log) as (process, port):
            if arguments.replay:
                call = Call.from_json(json.loads(arguments.replay.read_text())["call"])
                with Client(port) as client:
                    status, text = client.send(call)
                print(f"{call.endpoint} ({call.kind}): {status}\n{text}")
                return int(failed(call, status, text))
            document: dict[str, Any] = json.load(
                urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json")
            )
            tally = fuzz(port, seeds(document, arguments.each, arguments.seed), arguments)
        log.seek(0)
        said = log.read()
    return summed_up(tally, process.returncode, said, arguments.failure)


def summed_up(tally: Tally, code: int | None, said: str, failure: Path) -> int:
    """Print the figures, write the first failing request, and return the exit code."""
    print(report("endpoint", tally.answers), report("kind of request", tally.kinds), sep="\n\n")
    print(f"\n/health and /metrics meanwhile: {dict(tally.health)}; the server ended with code {code}")
    lines = said.splitlines()
    print(f"the server printed {len(lines)} lines", *lines[:20], sep="\n  ")
    for call, status, text in tally.failures[:20]:
        print(f"failed: {call.endpoint} ({call.kind}): {status} {text[:200]}")
    if tally.failures:
        call, status, text = tally.failures[0]
        failure.write_text(
            json.dumps({"call": call.as_json(), "status": status, "text": text[:2000]}, indent=2)
        )
        print(f"the first is in {failure}: python -m scripts.fuzz_api --replay {failure}")
    bad = len(tally.failures) or set(tally.health) - {"200"} or "Traceback (most" in said or code
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
