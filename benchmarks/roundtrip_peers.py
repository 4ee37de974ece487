"""The transports that `roundtrip.py` compares ours with: ZeroMQ, gloo and NIXL.

Each has a server, which says where it is and sends back what comes, and a client, which returns what makes
one round. All send the tensor from where it lies; for NIXL that is memory that was registered.
"""

from __future__ import annotations

import argparse
import base64
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ROW_BYTES = 7168 * 2
NEEDS = {
    "zmq-ipc": "zmq",
    "zmq-tcp": "zmq",
    "gloo": "torch",
    "nixl": "nixl",
    "nixl-flag": "nixl",
    "calls-nixl": "nixl_cu12",
}
INSTALL = {
    "zmq": "pip install pyzmq",
    "torch": "pip install torch",
    "nixl_cu12": "pip install 'moesaic[nixl]'",
    "nixl": "pip install --no-deps nixl nixl-cu12 (with dependencies it brings a torch for CUDA, 5.8 GB)",
}
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "ERROR"}
"""Environment variables of every process. NIXL writes its log to the standard output."""

Round = Callable[[], None]
Bytes = npt.NDArray[np.uint8]


def say(text: str) -> None:
    print(text, flush=True)


def random_bytes(options: argparse.Namespace) -> Bytes:
    rng = np.random.default_rng(0)
    return np.frombuffer(rng.bytes(options.batch * ROW_BYTES), np.uint8)


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
    tensor = random_bytes(options)

    def once() -> None:
        for socket in sockets:
            socket.send(tensor, copy=False)
        for socket in sockets:
            assert len(socket.recv(copy=False).buffer) == len(tensor)

    return once


# ---- gloo: point to point in one process group, clients first; a server takes whoever comes first


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
    tensor = torch.empty(options.batch, 1, 7168, dtype=torch.bfloat16)
    client = 0 if options.clients == 1 else None
    while True:
        distributed.send(tensor, distributed.recv(tensor, client))


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


# ---- NIXL: one-sided writes into the other's registered memory, over whatever UCX picks


@dataclass(eq=False)
class Link:
    """A peer's slot here, and the prepared writes into ours there."""

    slot: int
    tensor: Any
    flag: Any
    turn: int = 0
    """Number of rounds that have begun."""


class Registered:
    """An agent and its memory: for each peer a slot that it writes to, of `size` bytes and a flag, then ours.

    The other side hears of a write by a notification, or polls a flag that is written after the tensor.
    There is nothing to block on: who waits polls, and after `spin` seconds yields its core between two looks.
    """

    def __init__(self, name: str, size: int, peers: int, options: argparse.Namespace) -> None:
        from nixl import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        self.size, self.stride, self.own = size, size + 64, peers * (size + 64)
        self.memory: Bytes = np.zeros(self.own + self.stride, np.uint8)
        self.start = self.memory.ctypes.data
        self.agent.register_memory([(self.start, self.memory.nbytes, 0, "")], "DRAM")
        self.flagged = options.transport == "nixl-flag"
        self.spin, self.since = options.spin, 0.0

    def card(self, slot: int) -> bytes:
        """What a peer needs to write to this slot, or to the first of them and those that follow."""
        metadata: bytes = self.agent.get_agent_metadata()
        return f"{self.start + slot * self.stride}:".encode() + metadata

    def link(self, slot: int, card: bytes, skip: int, source: int) -> Link:
        """skip: slots to pass over there. source: where what is written begins here."""
        address, _, metadata = card.partition(b":")
        peer = self.agent.add_remote_agent(metadata)
        there = int(address) + skip * self.stride

        def write(here: int, offset: int, size: int) -> Any:
            local = self.agent.get_xfer_descs([(self.start + here, size, 0)], "DRAM")
            remote = self.agent.get_xfer_descs([(there + offset, size, 0)], "DRAM")
            return self.agent.initialize_xfer("WRITE", local, remote, peer)

        return Link(slot, write(source, 0, self.size), write(self.own + self.size, self.size, 8))

    def flag(self, slot: int) -> npt.NDArray[np.int64]:
        at = slot * self.stride + self.size
        return self.memory[at : at + 8].view(np.int64)

    def push(self, links: list[Link]) -> None:
        """Write the tensor of the next round and notify the peer."""
        self.since = time.perf_counter()
        for link in links:
            link.turn += 1
        self._write([link.tensor for link in links], b"" if self.flagged else b"round")
        if self.flagged:
            self.memory[self.own + self.size :][:8].view(np.int64)[0] = links[0].turn
            self._write([link.flag for link in links], b"")

    def _write(self, transfers: list[Any], notification: bytes) -> None:
        states = [self.agent.transfer(one, notification) for one in transfers]
        while any(state != "DONE" for state in states):
            assert "ERR" not in states
            self.rest()
            states = [self.agent.check_xfer_state(one) for one in transfers]

    def news(self) -> list[tuple[str, bytes]]:
        """(who, what) of every notification. Also what makes UCX get on."""
        found: dict[str, list[bytes]] = self.agent.get_new_notifs()
        return [(name, message) for name, messages in found.items() for message in messages]

    def rest(self) -> None:
        if time.perf_counter() - self.since >= self.spin:
            os.sched_yield()


def serve_nixl(options: argparse.Namespace) -> None:
    size = options.batch * ROW_BYTES
    here = Registered(f"server {options.index}", size, options.clients, options)
    say(base64.b64encode(here.card(0)).decode())
    links: dict[str, Link] = {}
    while True:
        news = here.news()
        for name, message in news:
            if name in links:
                here.push([links[name]])
            else:
                slot = int(name.split()[-1])
                links[name] = here.link(slot, message, 0, slot * here.stride)
        for link in links.values() if here.flagged else ():
            if here.flag(link.slot)[0] > link.turn:
                here.push([link])
        if not news:
            here.rest()


def ask_nixl(options: argparse.Namespace) -> Round:
    tensor = random_bytes(options)
    here = Registered(f"client {options.index}", len(tensor), options.num_servers, options)
    here.memory[here.own :][: len(tensor)] = tensor
    cards = [base64.b64decode(one) for one in options.servers]
    links = [here.link(slot, card, options.index, here.own) for slot, card in enumerate(cards)]
    for slot in range(len(links)):
        here.agent.send_notif(f"server {slot}", here.card(slot))

    def once() -> None:
        here.push(links)
        left = len(links)
        while left > 0:
            left -= len(here.news())
            if here.flagged and answered(links):
                return
            here.rest()

    def answered(links: Iterable[Link]) -> bool:
        return all(here.flag(link.slot)[0] == link.turn for link in links)

    once()
    for link in links:
        assert np.array_equal(here.memory[link.slot * here.stride :][: len(tensor)], tensor)
    return once


SERVE = {"zmq": serve_zmq, "gloo": serve_gloo, "nixl": serve_nixl}
ASK = {"zmq": ask_zmq, "gloo": ask_gloo, "nixl": ask_nixl}
