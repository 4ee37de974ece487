"""Writes into the memory of another process by NIXL, NVIDIA's library over UCX.

Both ends of a link have an area of memory of the same size. Each writes from its own area to the same place
in the area of the other. A write has a number, and the other end hears that number once all bytes are there.

Each link has an agent of its own, so NIXL gives a peer access to the area of its link and to nothing else.
Nothing tells a sleeping process about a write, so somebody has to call `pump` while writes are under way.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport.authentication import Deadline
from moesaic.transport.sealed_socket import Wire

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Packages with the library. Host memory needs no CUDA, so either will do."""
INSTALL = "pip install 'moesaic[nixl]'"
DONE_SECONDS = 50e-6
"""The most that `settle` takes: a few times what a short write takes by RDMA."""
CLOSE_SECONDS = 1.0
"""How long writes may go on after `close`."""
_CARD, _NUMBER = struct.Struct("<QI"), struct.Struct("<Q")
_MAX_CARD = 1 << 20
_HELLO, _MEETING_DONE = b"hello", b"+"


def available() -> bool:
    """Whether the library is installed."""
    return any(importlib.util.find_spec(name) is not None for name in PACKAGES)


def check_nixl(ucx_tls: str | None) -> None:
    """Raises ConfigError if links cannot be made on this host. ucx_tls: the variable UCX_TLS.

    Without the variable UCX may open a TCP port through which anybody can write to this process. So it has
    to be set.
    """
    check_installed()
    if not ucx_tls:
        raise ConfigError("--transport nixl: set UCX_TLS on every host, such as UCX_TLS=rc for RDMA")
    try:
        _agent(_library(), "check")
    except Exception:  # NIXL's errors have no base class of their own
        raise ConfigError.field("UCX_TLS", ucx_tls, "transports that UCX finds on this host") from None


def check_installed() -> None:
    """Raises ConfigError if the library is not installed."""
    if not available():
        allowed_transports = f"auto, shm, socket (NIXL is not installed: {INSTALL})"
        raise ConfigError.field("--transport", "nixl", allowed_transports)


def _library() -> Any:
    """NIXL's module, which has to be installed."""
    name = next(name for name in PACKAGES if importlib.util.find_spec(name) is not None)
    module = importlib.import_module(f"{name}._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to the standard output
    return module


def _agent(library: Any, name: str) -> Any:
    # NIXL's own thread would take a third of a core while nothing happens.
    return library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


class NixlLink:
    """This end of a link. Only one thread at a time may use it.

    area_bytes: bytes of the area at both ends. Raises ConnectionLost if there is no such link.
    """

    def __init__(self, area_bytes: int) -> None:
        self.area = memoryview(mmap.mmap(-1, area_bytes))
        """[area_bytes] Pages are allocated when they are first written, or now if the network pins them."""
        self._begin = np.frombuffer(self.area, np.uint8).ctypes.data
        self._writes: dict[int, Any] = {}
        """Number -> a write under way."""
        self._arrived_numbers: set[int] = set()
        self._peer, self._peer_begin = "", 0
        library = _library()
        try:
            self._agent: Any = _agent(library, secrets.token_hex(8))
            self._memory = self._agent.register_memory([(self._begin, area_bytes, 0, "")], "DRAM")
        except Exception as error:
            raise ConnectionLost(f"NIXL offers no link here: {error!r}") from None
        self.failure: str | None = None
        """Why nothing more can be written, or None."""

    @property
    def writing(self) -> int:
        """Number of writes under way. A link that has failed only lets go of them, when it is closed."""
        return 0 if self.failure is not None else len(self._writes)

    def meet(self, wire: Wire, first: bool, deadline: Deadline) -> None:
        """Exchange addresses over an authenticated connection, then reach each other. Both ends call it.

        first: True at one of the two ends. Raises ConnectionLost or OSError.
        """
        metadata = self._agent.get_agent_metadata()
        wire.sendall(memoryview(_CARD.pack(self._begin, len(metadata)) + metadata))
        self._peer_begin, length = _CARD.unpack(_read(wire, _CARD.size))
        if length > _MAX_CARD:
            raise ConnectionLost(f"the other end sent {length} bytes about itself")
        peer_metadata = bytes(_read(wire, length))
        try:
            self._peer = self._agent.add_remote_agent(peer_metadata).decode()
            self._greet(wire, first, deadline)
        except TimeoutError:
            raise ConnectionLost("NIXL does not reach the other host (UCX_TLS, UCX_NET_DEVICES)") from None
        except (OSError, ConnectionLost):
            raise
        except Exception as error:
            raise ConnectionLost(f"NIXL does not reach the other host: {error!r}") from None

    def write(self, number: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Begin to write these (begin, end) parts of the area. They must not change until they have arrived.

        number: one that no other write of this end has. Does nothing if the link has failed.
        """
        if self.failure is not None:
            return
        sources = [(self._begin + begin, end - begin, 0) for begin, end in pieces]
        targets = [(self._peer_begin + begin, end - begin, 0) for begin, end in pieces]
        note = _NUMBER.pack(number)
        try:
            descriptors = [self._agent.get_xfer_descs(areas, "DRAM") for areas in (sources, targets)]
            handle = self._agent.initialize_xfer("WRITE", *descriptors, self._peer, note)
            self._writes[number] = handle
            self._settle(number, self._agent.transfer(handle, note))
        except Exception as error:
            self._fail(error)

    def settle(self, number: int) -> None:
        """Wait DONE_SECONDS at most for the end of a write, which only this end can tell the other one."""
        deadline = time.monotonic() + DONE_SECONDS
        while self.failure is None and number in self._writes and time.monotonic() < deadline:
            self.pump()

    def pump(self) -> bool:
        """Go on with what is under way at both ends. Returns whether something ended or arrived."""
        num_writes = len(self._writes)
        has_arrivals = False
        if self.failure is not None:
            return False
        try:
            for message in self._agent.get_new_notifs().get(self._peer, ()):
                if len(message) == _NUMBER.size:
                    self._arrived_numbers.add(*_NUMBER.unpack(message))
                    has_arrivals = True
            for number, handle in list(self._writes.items()):
                self._settle(number, self._agent.check_xfer_state(handle))
        except Exception as error:
            self._fail(error)
        return has_arrivals or len(self._writes) < num_writes

    def take(self, number: int) -> bool:
        """Whether the other end's write of this number has arrived. Each is reported once."""
        if number not in self._arrived_numbers:
            return False
        self._arrived_numbers.remove(number)
        return True

    def close(self) -> None:
        """End the link. Writes under way go on for CLOSE_SECONDS in a thread, also when the process ends."""
        if self._agent is None:
            return
        ending = _Ending(self._agent, self._memory, self._writes, self.area)
        self._agent, self._memory, self._writes = None, None, {}
        self.failure = self.failure or "this end is closed"
        if ending.writes:
            # Not a daemon thread: Python would end it within the library, which aborts the process.
            threading.Thread(target=ending.run, name="nixl", daemon=False).start()
        else:
            ending.end()

    def _greet(self, wire: Wire, first: bool, deadline: Deadline) -> None:
        """Reach each other by NIXL, so that the first write need not wait for that. Both ends have to move
        until the last word, which goes over `wire`."""
        wire.setblocking(False)
        if first:
            self._agent.send_notif(self._peer, _HELLO)
        has_met = False
        while not has_met:
            for message in self._agent.get_new_notifs().get(self._peer, ()):
                if message == _HELLO and first:
                    wire.setblocking(True)
                    wire.sendall(memoryview(_MEETING_DONE))
                    has_met = True
                elif message == _HELLO:
                    self._agent.send_notif(self._peer, _HELLO)
            if not first:
                with contextlib.suppress(BlockingIOError):
                    has_met = bytes(_read(wire, len(_MEETING_DONE))) == _MEETING_DONE
            deadline.left()
            os.sched_yield()

    def _settle(self, number: int, state: str) -> None:
        if state == "DONE":
            self._agent.release_xfer_handle(self._writes.pop(number))
        elif state == "ERR":
            raise ConnectionLost("a write failed")

    def _fail(self, error: Exception) -> None:
        """Nothing more is written. The connection beside the link says whether the peer is gone."""
        self.failure = f"NIXL cannot write to the other end: {error!r}"


class _Ending:
    """The agent of a link that was closed."""

    def __init__(self, agent: Any, memory: Any, writes: dict[int, Any], area: memoryview) -> None:
        self._agent, self._memory, self.writes = agent, memory, writes
        self._area: memoryview | None = area

    def run(self) -> None:
        """Finish the writes. A peer that is gone or does nothing ends this too."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(Exception):
            while self.writes and time.monotonic() < deadline:
                self._agent.get_new_notifs()
                states = {
                    number: self._agent.check_xfer_state(write_number)
                    for number, write_number in self.writes.items()
                }
                self.writes = {
                    write_number: self.writes[write_number]
                    for write_number, state in states.items()
                    if state == "PROC"
                }
                time.sleep(1e-4)
            for _ in range(10):  # the last words of the writes
                self._agent.get_new_notifs()
                time.sleep(1e-3)
        self.end()

    def end(self) -> None:
        """Free everything."""
        with contextlib.suppress(Exception):
            for handle in self.writes.values():
                self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(self._memory)
        self.writes, self._agent, self._memory, self._area = {}, None, None, None


def _read(wire: Wire, count: int) -> memoryview:
    data = memoryview(bytearray(count))
    num_filled = 0
    while num_filled < count:
        got = wire.recv_into(data[num_filled:])
        if not got:
            raise ConnectionLost("the other end closed the connection during the handshake")
        num_filled += got
    return data
