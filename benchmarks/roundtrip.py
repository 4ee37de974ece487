"""How long a tensor takes to an expert server and back, by transport.

    python benchmarks/roundtrip.py                          one client, one server
    python benchmarks/roundtrip.py --shape 2+2 --json       two clients, two servers
    pip install pyzmq                                       adds the lines of ZeroMQ

The tensor is [B, 1, 7168] in bf16, B * 14336 bytes, as in Expert-as-a-Service, section 5.5: each client sends
it to every server, each of which sends it back at once, and a round is over when all of them have answered.
A client copies its tensor into what the transport sends from; the answer stays where the transport puts it.
Every process is one of its own. With more processes than cores nobody spins.
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
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from moesaic.core.errors import ConnectionLost
from moesaic.transport.calls import Answerer, Caller
from moesaic.transport.listening import Listener, connect
from moesaic.transport.waiting import wait

ROW_BYTES = 7168 * 2
TRANSPORTS = ("shm", "unix", "tcp", "zmq-ipc", "zmq-tcp", "gloo")
NEEDS = {"zmq-ipc": "zmq", "zmq-tcp": "zmq", "gloo": "torch"}
INSTALL = {"zmq": "pip install pyzmq", "torch": "pip install torch"}
SPIN_SECONDS = 1e-3

Round = Callable[[], None]


# ---- ours


def serve_calls(options: argparse.Namespace) -> None:
    unix = options.transport in ("shm", "unix")
    where = f"unix:{options.folder}/{options.index}" if unix else "tcp:127.0.0.1:0"
    listener = Listener(where, options.secret.encode())
    say(listener.address)
    ends: list[Answerer] = []
    while True:
        wait(ends, [listener.fileno()], spin=options.spin)
        ends += listener.accepted()
        ends = [end for end in ends if answered(end)]


def answered(end: Answerer) -> bool:
    """Send back what is there. False if the client is done."""
    try:
        for call in end.poll():
            call.answer[:] = call.request
            call.publish(np.arange(call.rows))
    except ConnectionLost:
        end.close()
        return False
    return True


def ask_calls(options: argparse.Namespace) -> Round:
    kind = "shm" if options.transport == "shm" else "stream"
    callers = [connect(where, options.secret.encode(), kind) for where in options.servers]
    tensor = np.random.default_rng(0).integers(0, 256, options.batch * ROW_BYTES, np.uint8)

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


# ---- ZeroMQ: a router at the server, a dealer for each connection, no copies where it offers that


def serve_zmq(options: argparse.Namespace) -> None:
    import zmq

    ipc = options.transport == "zmq-ipc"
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{options.folder}/{options.index}" if ipc else "tcp://127.0.0.1:*")
    say(socket.get_string(zmq.LAST_ENDPOINT))
    while True:
        socket.send_multipart(socket.recv_multipart(copy=False), copy=False)


def ask_zmq(options: argparse.Namespace) -> Round:
    import zmq

    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in options.servers]
    for socket, where in zip(sockets, options.servers, strict=True):
        socket.connect(where)
    tensor = np.random.default_rng(0).integers(0, 256, options.batch * ROW_BYTES, np.uint8)

    def once() -> None:
        for socket in sockets:
            socket.send(tensor, copy=False)
        for socket in sockets:
            assert len(socket.recv(copy=False).buffer) == len(tensor)

    return once


# ---- gloo: point to point in one process group, clients first; a server takes its clients in turn


def join_gloo(options: argparse.Namespace, rank: int) -> Any:
    from torch import distributed

    world = options.clients + options.num_servers
    store = f"file://{options.folder}/gloo"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    return distributed


def serve_gloo(options: argparse.Namespace) -> None:
    import torch

    say("gloo")
    distributed = join_gloo(options, options.clients + options.index)
    tensors = [torch.empty(options.batch, 1, 7168, dtype=torch.bfloat16) for _ in range(options.clients)]
    for _ in range(options.warmup + options.rounds):
        for client, tensor in enumerate(tensors):
            distributed.recv(tensor, client)
            distributed.send(tensor, client)
    distributed.barrier()


def ask_gloo(options: argparse.Namespace) -> Round:
    import torch

    distributed = join_gloo(options, options.index)
    tensor = torch.randn(options.batch, 1, 7168).bfloat16()
    servers = range(options.clients, options.clients + options.num_servers)
    answers = [torch.empty_like(tensor) for _ in servers]

    def once() -> None:
        works = [distributed.isend(tensor, server) for server in servers]
        works += [distributed.irecv(into, server) for into, server in zip(answers, servers, strict=True)]
        for work in works:
            work.wait()

    return once


# ---- processes


def family(transport: str) -> str:
    return "calls" if transport in ("shm", "unix", "tcp") else transport.split("-")[0]


def say(text: str) -> None:
    print(text, flush=True)


def child(options: argparse.Namespace) -> None:
    if options.child == "server":
        return {"calls": serve_calls, "zmq": serve_zmq, "gloo": serve_gloo}[family(options.transport)](
            options
        )
    once = {"calls": ask_calls, "zmq": ask_zmq, "gloo": ask_gloo}[family(options.transport)](options)
    times = []
    for turn in range(options.warmup + options.rounds):
        started = time.perf_counter()
        once()
        if turn >= options.warmup:
            times.append(time.perf_counter() - started)
    if family(options.transport) == "gloo":
        from torch import distributed

        distributed.barrier()
    return say(json.dumps(times))


def start(options: argparse.Namespace, role: str, index: int, more: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", role, "--index", str(index), *more]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    errors = None if options.debug else subprocess.DEVNULL
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)


def measure(options: argparse.Namespace, transport: str, batch: int) -> list[float]:
    """Seconds of every round of every client."""
    clients, servers = shape(options.shape)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        common = ["--transport", transport, "--batch", str(batch), "--folder", folder, "--spin"]
        common += [str(spin(options)), "--rounds", str(options.rounds), "--warmup", str(options.warmup)]
        common += ["--clients", str(clients), "--num-servers", str(servers), "--secret", options.secret]

        def started(role: str, count: int, more: list[str]) -> Iterator[subprocess.Popen[str]]:
            for index in range(count):
                one = processes.enter_context(start(options, role, index, common + more))
                processes.callback(one.kill)
                yield one

        where = [one.stdout.readline().strip() for one in started("server", servers, []) if one.stdout]
        asking = list(started("client", clients, ["--servers", *where]))
        found = [json.loads(one.communicate()[0] or "[]") for one in asking]
        if not all(found):
            raise SystemExit(f"{transport}: a client failed; --debug shows its errors")
        return list(itertools.chain.from_iterable(found))


def shape(text: str) -> tuple[int, int]:
    clients, servers = text.split("+")
    return int(clients), int(servers)


def spin(options: argparse.Namespace) -> float:
    if options.spin is not None:
        return float(options.spin)
    return SPIN_SECONDS if sum(shape(options.shape)) <= len(os.sched_getaffinity(0)) else 0.0


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for transport in options.transport:
        needed = NEEDS.get(transport)
        if needed is not None and importlib.util.find_spec(needed) is None:
            print(f"{transport}: left out; {INSTALL[needed]}", file=sys.stderr)
            continue
        for batch in options.batch:
            times = np.array(measure(options, transport, batch)) * 1e6
            p50, p99 = np.percentile(times, [50, 99]).round(1).tolist()
            yield {
                "transport": transport,
                "shape": options.shape,
                "batch": batch,
                "p50_us": p50,
                "p99_us": p99,
            }


def show(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"round trip of [B, 1, 7168] bf16, {options.shape} processes: p50 / p99 in us")
    table.add_column("transport")
    for batch in options.batch:
        table.add_column(f"B = {batch}", justify="right")
    for transport, rows in itertools.groupby(found, key=lambda row: row["transport"]):
        table.add_row(transport, *[f"{row['p50_us']:,.0f} / {row['p99_us']:,.0f}" for row in rows])
    Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    one = "--child" in sys.argv  # a child gets one of what the parent gets many of
    parser.add_argument("--transport", nargs=None if one else "+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--batch", nargs=None if one else "+", type=int, default=[1, 16, 128, 512])
    parser.add_argument("--shape", default="1+1", help="clients + servers, such as 2+2 or 1+3")
    parser.add_argument("--rounds", type=int, default=1000)
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
