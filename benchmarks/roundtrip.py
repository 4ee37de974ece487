"""How long a tensor takes to an expert server and back, by transport.

    python benchmarks/roundtrip.py                          one client, one server
    python benchmarks/roundtrip.py --shape 2+2 --json       two clients, two servers
    python benchmarks/roundtrip.py --transport tcp tcp-plain --batch 1 --turns 5
                                                            what encryption costs a message of 14 KB
    pip install pyzmq                                       adds the lines of ZeroMQ
    pip install --no-deps nixl nixl-cu12                    adds those of NIXL

The tensor is [B, 1, 7168] in bf16, B * 14336 bytes, as in Expert-as-a-Service, section 5.5: each client sends
it to every server, each of which sends it back at once, and a round is over when all of them have answered.
Ours copy the tensor into what they send from, the others send it from where it lies; the answer stays where
the transport puts it. Every process is one of its own. With more processes than cores nobody spins; NIXL,
which has nothing to block on, yields between two looks. All clients begin their rounds at the same moment
and make --rounds of them, or as many as --seconds allow. With --turns the transports take turns, so that
whatever else the machine does meets all of them.

tcp is encrypted, as moesaic sends over TCP. tcp-plain is the same code without encryption, for comparison
only. calls-nixl is --transport nixl: the tensor goes by NIXL and the rest by TCP. UCX_TLS says how NIXL may
send it.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from roundtrip_peers import ASK, ENVIRONMENT, INSTALL, NEEDS, ROW_BYTES, SERVE, Round, random_bytes, say

from moesaic.core.errors import ConnectionLost
from moesaic.transport import listening
from moesaic.transport.calls import Answerer, Caller
from moesaic.transport.listening import NIXL_KIND, Listener, connect
from moesaic.transport.waiting import wait

OURS = ("shm", "unix", "tcp", "tcp-plain", "calls-nixl")
KINDS = {"shm": "shm", "calls-nixl": "nixl"}
"""Of ours -> kind of `connect`. Others have streams."""
TRANSPORTS = (*OURS, "zmq-ipc", "zmq-tcp", "gloo", "nixl", "nixl-flag")
SPIN_SECONDS = 1e-3
WARMUP_SHARE = 0.25
"""The largest share of --seconds for the warm-up rounds."""
PATIENCE = 60.0
"""Seconds beyond --seconds after which a measurement counts as stuck."""


# ---- ours


def serve_calls(options: argparse.Namespace) -> None:
    unix = options.transport in ("shm", "unix")
    where = f"unix:{options.folder}/{options.index}" if unix else "tcp:127.0.0.1:0"
    listener = Listener(where, options.secret.encode(), kinds=NIXL_KIND)
    say(listener.address)
    ends: list[Answerer] = []
    while True:
        wait(ends, [listener.fileno()], spin=options.spin)
        ends += listener.take_connections()
        ends = [end for end in ends if answered(end)]


def answered(end: Answerer) -> bool:
    """Send back what has arrived. Returns False if the client has finished."""
    try:
        for call in end.poll():
            call.answer[:] = call.request
            call.publish(np.arange(call.rows))
    except ConnectionLost:
        end.close()
        return False
    return True


def ask_calls(options: argparse.Namespace) -> Round:
    kind = KINDS.get(options.transport, "stream")
    callers = [connect(where, options.secret.encode(), kind) for where in options.servers]
    tensor = random_bytes(options)

    def once() -> None:
        open_calls = [(caller, ask(caller)) for caller in callers]
        left = len(callers) * options.batch
        while left:
            wait(callers, spin=options.spin)
            left -= sum(len(rows) for caller in callers for _, rows in caller.poll())
        for caller, call in open_calls:
            caller.release(call)

    def ask(caller: Caller) -> Any:
        call = caller.open(len(tensor), options.batch, ROW_BYTES)
        assert call is not None
        np.frombuffer(call.request, np.uint8)[:] = tensor
        caller.post(call)
        return call

    return once


# ---- processes


def family(transport: str) -> str:
    return "calls" if transport in OURS else transport.split("-")[0]


def child(options: argparse.Namespace) -> None:
    kind = family(options.transport)
    if options.transport == "tcp-plain":
        listening.wire = lambda sock, keys: sock
    if options.child == "server":
        end_with_parent()
        return (SERVE | {"calls": serve_calls})[kind](options)
    once = (ASK | {"calls": ask_calls})[kind](options)
    timed(once, options.warmup, options.seconds * WARMUP_SHARE)
    say("ready")
    sys.stdin.readline()
    parent = end_with_parent()
    say(json.dumps(timed(once, options.rounds, options.seconds)))
    return parent.join()  # whoever left now would end gloo's group for the others


def timed(once: Round, most: int, seconds: float) -> list[float]:
    """Seconds of each round: `most` rounds, or those that begin within `seconds`."""
    times: list[float] = []
    started = now = time.perf_counter()
    while len(times) < most and now - started < seconds:
        before = time.perf_counter()
        once()
        now = time.perf_counter()
        times.append(now - before)
    return times


def end_with_parent() -> threading.Thread:
    """End this process when the parent closes its standard input or dies."""

    def wait_for_it() -> None:
        sys.stdin.read()
        os._exit(0)

    thread = threading.Thread(target=wait_for_it, daemon=True)
    thread.start()
    return thread


def start(options: argparse.Namespace, role: str, index: int, more: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", role, "--index", str(index), *more]
    errors = None if options.debug else subprocess.DEVNULL
    pipe = subprocess.PIPE
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)


def measure(options: argparse.Namespace, transport: str, batch: int) -> list[list[float]]:
    """Seconds of every round, for each client."""
    clients, servers = shape(options.shape)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        common = ["--transport", transport, "--batch", str(batch), "--folder", folder, "--spin"]
        common += [str(spin(options)), "--rounds", str(options.rounds), "--warmup", str(options.warmup)]
        common += ["--clients", str(clients), "--num-servers", str(servers), "--secret", options.secret]
        common += ["--seconds", str(options.seconds)]

        def started(role: str, count: int, more: list[str]) -> Iterator[subprocess.Popen[str]]:
            for index in range(count):
                one = processes.enter_context(start(options, role, index, common + more))
                limit = threading.Timer(2 * options.seconds + PATIENCE, one.kill)
                limit.start()
                processes.callback(one.kill)
                processes.callback(limit.cancel)
                yield one

        where = [heard(one) for one in started("server", servers, [])]
        asking = list(started("client", clients, ["--servers", *where]))
        if not all(heard(one) == "ready" for one in asking):
            raise SystemExit(f"{transport}: a client failed or got stuck; --debug shows its errors")
        for one in asking:
            print("go", file=one.stdin, flush=True)
        found = [json.loads(heard(one) or "[]") for one in asking]
        if not all(found):
            raise SystemExit(f"{transport}: a client failed or got stuck; --debug shows its errors")
        return found


def heard(process: subprocess.Popen[str]) -> str:
    """The next line of the process, or nothing if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def shape(text: str) -> tuple[int, int]:
    clients, servers = text.split("+")
    return int(clients), int(servers)


def spin(options: argparse.Namespace) -> float:
    if options.spin is not None:
        return float(options.spin)
    return SPIN_SECONDS if sum(shape(options.shape)) <= len(os.sched_getaffinity(0)) else 0.0


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    transports = [transport for transport in options.transport if installed(transport)]
    times: dict[tuple[str, int], list[list[float]]] = {}
    for batch, _, transport in itertools.product(options.batch, range(options.turns), transports):
        times.setdefault((transport, batch), []).extend(measure(options, transport, batch))
    for transport, batch in itertools.product(transports, options.batch):
        found = times[transport, batch]
        p50, p99 = (np.percentile(np.concatenate(found), [50, 99]) * 1e6).round(1).tolist()
        yield {
            "transport": transport,
            "shape": options.shape,
            "batch": batch,
            "rounds": min(map(len, found)),
            "p50_us": p50,
            "p99_us": p99,
        }


def installed(transport: str) -> bool:
    needed = NEEDS.get(transport)
    if needed is None or importlib.util.find_spec(needed) is not None:
        return True
    print(f"{transport}: left out; {INSTALL[needed]}", file=sys.stderr)
    return False


def show(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"round trip of [B, 1, 7168] bf16, {options.shape} processes: p50 / p99 in us")
    if any(row["rounds"] < options.rounds for row in found):
        table.caption = f"(n): n rounds, as --seconds {options.seconds:g} ended them"
    table.add_column("transport")
    for batch in options.batch:
        table.add_column(f"B = {batch}", justify="right")
    for transport, rows in itertools.groupby(found, key=lambda row: row["transport"]):
        table.add_row(transport, *[cell(row, options.rounds) for row in rows])
    Console(width=max(120, Console().width)).print(table)


def cell(row: dict[str, Any], rounds: int) -> str:
    """Example: "3,749 / 9,530 (412)" if there were fewer rounds than asked for."""
    few = f" ({row['rounds']})" if row["rounds"] < rounds else ""
    return f"{row['p50_us']:,.0f} / {row['p99_us']:,.0f}{few}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    one = "--child" in sys.argv  # a child gets one of what the parent gets many of
    parser.add_argument("--transport", nargs=None if one else "+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--batch", nargs=None if one else "+", type=int, default=[1, 16, 128, 512])
    parser.add_argument("--shape", default="1+1", help="clients + servers, such as 2+2 or 1+3")
    parser.add_argument("--rounds", type=int, default=1000, help="of each client")
    parser.add_argument("--seconds", type=float, default=2.0, help="the most that the rounds may take")
    parser.add_argument("--turns", type=int, default=1, help="times that the transports take turns")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--spin", type=float, help="seconds that a process looks before it sleeps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true", help="show the errors of the processes")
    parser.add_argument("--secret", default=secrets.token_hex(16), help=argparse.SUPPRESS)
    for hidden in ("--child", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--index", "--clients", "--num-servers"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--servers", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.child:
        child(options)
        return
    found = list(results(options))
    print(json.dumps(found)) if options.json else show(found, options)


if __name__ == "__main__":
    main()
