"""How many GB/s a connection carries, by transport and bytes of a call, and what bounds it.

    python benchmarks/bandwidth.py                       every transport on this host, and the bounds
    python benchmarks/bandwidth.py --hosts               TCP between two network namespaces; needs root
    python benchmarks/bandwidth.py --transport tcp --mib 8 --streams 1 2 4
                                                         several connections between the two processes

A client writes requests into the transport's memory and sends them, two at a time. The server is another
process. It answers each request with one byte as soon as all of it is there. So this is one direction of rows
and answers. With --streams each connection has a thread on either side. "KV" is a whole transfer as prefill
workers make it: blocks of 32 layers are copied out of a cache, sent in pieces of 8 MiB, and kept by the
receiver. tcp is encrypted, as moesaic always sends over TCP. tcp-plain is the same code without encryption,
for comparison only. What is compared takes turns. Shown are medians.

The bounds are those of one core: copying memory, and AES-256-GCM over records. "In two threads" is what
AES-256-GCM gives in two threads of one process, together.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.hosts import Hosts, missing

from moesaic.core.errors import ConnectionLost
from moesaic.transport import listening
from moesaic.transport.calls import Answerer
from moesaic.transport.listening import Listener, connect
from moesaic.transport.sealing import RECORD, TAG
from moesaic.transport.waiting import wait

TRANSPORTS = ("shm", "unix", "tcp-plain", "tcp")
MIB = 1 << 20
UNDER_WAY = 2
"""Calls of a connection that are open at once."""
WARM = 0.2
"""Seconds of a measurement that do not count."""
HEAP = 1 << 30
ONE = np.zeros(1, np.int64)


# ---- calls


def serve_calls(options: argparse.Namespace) -> None:
    listener = Listener(options.listen, bytes.fromhex(options.secret))
    print(json.dumps(listener.address), flush=True)
    while True:
        wait([], [listener.fileno()])
        for end in listener.take_connections():
            threading.Thread(target=answer, args=(end,), daemon=True).start()


def answer(end: Answerer) -> None:
    with suppress(ConnectionLost):  # the client has finished
        while True:
            wait([end], spin=0.0)
            for call in end.poll():
                call.publish(ONE)


def send_calls(options: argparse.Namespace, address: str) -> float:
    """GB/s of all connections together."""
    counts = [0] * options.streams
    threads = [
        threading.Thread(target=ask, args=(options, address, counts, number))
        for number in range(options.streams)
    ]
    for thread in threads:
        thread.start()
    time.sleep(WARM)
    before, begun = sum(counts), time.perf_counter()
    while sum(counts) == before or time.perf_counter() < begun + options.seconds:
        time.sleep(0.01)
    found = (sum(counts) - before) / (time.perf_counter() - begun) / 1e9
    counts.clear()  # ends the threads
    return found


def ask(options: argparse.Namespace, address: str, counts: list[int], number: int) -> None:
    """Send requests until `counts` is empty, and count the bytes of those that were answered."""
    kind = "shm" if options.transport == "shm" else "stream"
    caller = connect(address, bytes.fromhex(options.secret), kind, HEAP)
    data, under_way = np.random.default_rng(0).integers(0, 256, options.bytes, np.uint8), 0
    while counts:
        while under_way < UNDER_WAY:
            call = caller.open(options.bytes, 1, 1)
            assert call is not None
            np.frombuffer(call.request, np.uint8)[:] = data
            caller.post(call)
            under_way += 1
        wait([caller], spin=0.0)
        for call, _ in caller.poll():
            caller.release(call)
            under_way -= 1
            with suppress(IndexError):
                counts[number] += options.bytes
    caller.close()


# ---- processes


def child(options: argparse.Namespace) -> None:
    if options.transport == "tcp-plain":
        listening.wire = lambda sock, keys: sock
    serve, send = serve_calls, send_calls
    if options.kv:
        from bandwidth_kv import send_kv, serve_kv  # imports torch

        serve, send = serve_kv, send_kv
    if options.child == "server":
        serve(options)
    else:
        print(send(options, json.loads(options.where)), flush=True)


def measure(options: argparse.Namespace, hosts: Hosts | None, transport: str, case: list[str]) -> float:
    """GB/s of one case, between two new processes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        listen = f"unix:{folder}/s" if transport in ("shm", "unix") else "tcp:127.0.0.1:0"
        listen = listen if hosts is None else f"tcp:{hosts[1].address}:0"
        common = ["--transport", transport, "--seconds", str(options.seconds), "--secret", options.secret]

        def started(place: int, *more: str) -> subprocess.Popen[str]:
            command = [sys.executable, __file__, *common, *case, *more]
            begin: Callable[..., Any] = subprocess.Popen if hosts is None else hosts[place].popen
            one: subprocess.Popen[str] = begin(command, stdout=subprocess.PIPE, text=True)
            processes.enter_context(one)
            processes.callback(one.kill)
            return one

        where = heard(started(1, "--child", "server", "--listen", listen))
        return float(heard(started(0, "--child", "client", "--where", where)))


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("a process failed; its error is above")
    return line


# ---- bounds


def rate(once: Callable[[], object], count: int, seconds: float = 0.5) -> float:
    """GB/s of calls of `once`, each of which handles so many bytes."""
    once()
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        once()
        done += count
    return done / (time.perf_counter() - begun) / 1e9


def bounds() -> dict[str, float]:
    source, target = np.ones(64 * MIB, np.uint8), np.zeros(64 * MIB, np.uint8)
    found = {"copying memory": rate(lambda: np.copyto(target, source), len(source))}
    plain, sealed = source[:RECORD].data, target[: RECORD + TAG].data
    key, nonce, opened = AESGCM(bytes(32)), bytes(12), np.zeros(RECORD, np.uint8).data
    found["AES-256-GCM, encrypting"] = rate(lambda: key.encrypt_into(nonce, plain, None, sealed), RECORD)
    found["AES-256-GCM, decrypting"] = rate(lambda: key.decrypt_into(nonce, sealed, None, opened), RECORD)
    rates: list[float] = []

    def encrypt() -> None:
        mine, into = AESGCM(bytes(32)), np.zeros(RECORD + TAG, np.uint8).data
        rates.append(rate(lambda: mine.encrypt_into(nonce, plain, None, into), RECORD))

    threads = [threading.Thread(target=encrypt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["AES-256-GCM, in two threads"] = sum(rates)
    return found


def show(rows: list[dict[str, Any]], limits: dict[str, float]) -> None:
    names = list(dict.fromkeys(row["case"] for row in rows))
    table = Table("transport", title="GB/s in one direction")
    for name in names:
        table.add_column(name, justify="right")
    for transport in dict.fromkeys(row["transport"] for row in rows):
        found = {row["case"]: row["gb_per_s"] for row in rows if row["transport"] == transport}
        table.add_row(transport, *(f"{statistics.median(found[name]):.2f}" for name in names))
    console = Console(width=max(120, Console().width))
    console.print(table)
    for name, value in limits.items():
        console.print(f"{name}: {value:.1f} GB/s")


def cases(options: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> flags for the two processes."""
    found = {}
    for streams in options.streams:
        several = "" if options.streams == [1] else f" x {streams}"
        for mib in options.mib:
            found[f"{mib:g} MiB{several}"] = ["--bytes", str(int(mib * MIB)), "--streams", str(streams)]
    return found | ({"KV": ["--kv"]} if options.streams == [1] else {})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    one = "--child" in sys.argv  # a child gets one of what the parent gets many of
    parser.add_argument("--transport", nargs=None if one else "+", choices=TRANSPORTS)
    parser.add_argument("--mib", nargs="+", type=float, default=[0.0625, 1, 8, 64], help="of a call")
    parser.add_argument("--streams", nargs=None if one else "+", type=int, default=[1], help="connections")
    parser.add_argument("--hosts", action="store_true", help="between two network namespaces")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    for hidden in ("--child", "--listen", "--where"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kv", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--secret", default=secrets.token_hex(16), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.child:
        child(options)
        return
    if options.hosts and missing():
        raise SystemExit(missing())
    transports = options.transport or (TRANSPORTS[2:] if options.hosts else TRANSPORTS)
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2)) if options.hosts else None
        todo = [
            (transport, *case)
            for _ in range(options.turns)
            for case in cases(options).items()
            for transport in transports
        ]
        for transport, name, flags in track(todo, console=Console(stderr=True)):
            rates = found.setdefault((transport, name), [])
            rates.append(measure(options, hosts, transport, flags))
    rows = [{"transport": one, "case": case, "gb_per_s": rates} for (one, case), rates in found.items()]
    limits = bounds()
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bounds": limits}, indent=2))
    show(rows, limits)


if __name__ == "__main__":
    main()
