"""Connects the processes of a group: rank 0 listens on a Unix socket, and the others join it.

    a rank -> rank 0: the handshake of authentication.py, then rank and size
    rank 0 -> a rank, once all are there: one byte with descriptors: that of the memory, then a socket to
                      each other rank from 1 on, in order of rank

The connection to rank 0 then serves as the socket between the two. No file remains, and with an @name there
is none at any time.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import _shm
from moesaic.transport import address as addresses
from moesaic.transport.authentication import (
    Deadline,
    Terms,
    check_secret,
    check_terms,
    prove_as_client,
    prove_as_server,
    read_exactly,
)
from moesaic.transport.peers import HALF_BYTES
from moesaic.transport.shared_peers import MAX_PEERS, SharedPeers
from moesaic.transport.shm import make_segment

_log = logging.getLogger(__name__)

GATHER_SECONDS = 60.0
"""Seconds that all ranks of a group have to connect."""
HANDSHAKE_SECONDS = 10.0
_RANK_AND_SIZE = struct.Struct("<II")
_OK = b"+"
_RETRY_SECONDS = 0.01


def gather(
    path: str,
    secret: bytes,
    rank: int,
    size: int,
    capacity: int = HALF_BYTES,
    seconds: float = GATHER_SECONDS,
) -> SharedPeers:
    """This rank's end of a group of `size` processes. Returns once all of them have called it.

    path: Unix socket of rank 0, a file or an @name.
    capacity: maximum bytes that a rank sends in one round, the same for all ranks.

    Raises ConfigError for settings that cannot work, and ConnectionLost if not all ranks connect in
    `seconds`.
    """
    if not 1 <= size <= MAX_PEERS:
        raise ConfigError.field("size", size, f"1 to {MAX_PEERS} ranks on one host")
    if not 0 <= rank < size:
        raise ConfigError.field("rank", rank, f"0 to {size - 1}")
    terms, deadline = Terms("shm", capacity), Deadline(seconds)
    check_secret(secret)
    check_terms(terms)
    address = addresses.parse(f"unix:{path}")
    try:
        return (_host if rank == 0 else _join)(address, secret, (rank, size), terms, deadline)
    except OSError as error:
        raise ConnectionLost(f"rank {rank} of {size} found no group at {path}: {error}") from None


def _host(
    address: addresses.Address, secret: bytes, place: tuple[int, int], terms: Terms, deadline: Deadline
) -> SharedPeers:
    _, size = place
    mapping, memory = make_segment(2 * size * terms.heap_bytes)
    sockets: dict[int, socket.socket] = {}
    listening, _ = addresses.bind(address)
    try:
        peers = _shm.Peers(mapping, 0, size)  # writes the header before the others look
        while len(sockets) < size - 1:
            deadline.apply(listening)
            sock, _ = listening.accept()
            rank = _accept_rank(sock, secret, size, terms, sockets.keys())
            if rank is not None:
                sockets[rank] = sock
        peers.close()
        _hand_out(sockets, memory)
        return SharedPeers(mapping, 0, sockets)
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise
    finally:
        listening.close()
        if address.file:
            Path(address.file).unlink(missing_ok=True)
        os.close(memory)


def _accept_rank(
    sock: socket.socket, secret: bytes, size: int, terms: Terms, taken_ranks: Collection[int]
) -> int | None:
    """The rank of the process that connected. None, with one line in the log, if it does not belong here."""
    deadline = Deadline(HANDSHAKE_SECONDS)
    try:
        if addresses.is_foreign(sock):
            raise ConnectionLost("a process of another user")
        peer_terms, _ = prove_as_server(sock, secret, deadline)
        rank, peer_size = _RANK_AND_SIZE.unpack(read_exactly(sock, _RANK_AND_SIZE.size, deadline))
        if peer_terms != terms or peer_size != size or not 1 <= rank < size or rank in taken_ranks:
            raise ConnectionLost(
                f"rank {rank} of {peer_size} with {peer_terms.heap_bytes} bytes does not belong to this group"
            )
    except (OSError, ConnectionLost, ConfigError) as error:
        _log.warning("dropped a peer: %s", error)
        sock.close()
        return None
    return int(rank)


def _hand_out(sockets: dict[int, socket.socket], memory: int) -> None:
    """Send each rank the memory and its sockets to the others."""
    ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in sockets}
    try:
        for low in sorted(sockets):
            for high in sorted(sockets):
                if low < high:
                    ends[low][high], ends[high][low] = socket.socketpair()
        for rank, sock in sockets.items():
            descriptors = [ends[rank][other_rank].fileno() for other_rank in sorted(ends[rank])]
            sock.settimeout(HANDSHAKE_SECONDS)
            socket.send_fds(sock, [_OK], [memory, *descriptors])
    finally:
        for pairs in ends.values():
            for end in pairs.values():
                end.close()


def _join(
    address: addresses.Address, secret: bytes, place: tuple[int, int], terms: Terms, deadline: Deadline
) -> SharedPeers:
    rank, size = place
    sock = _dial(address, deadline)
    sockets, memory = {0: sock}, -1
    try:
        prove_as_client(sock, secret, terms, deadline)
        sock.sendall(_RANK_AND_SIZE.pack(rank, size))
        deadline.apply(sock)
        # CLOEXEC: a child process must not inherit the memory of the group.
        data, descriptors, _, _ = socket.recv_fds(sock, len(_OK), size, socket.MSG_CMSG_CLOEXEC)
        if data != _OK or len(descriptors) != size - 1:
            raise ConnectionLost(f"rank 0 did not accept rank {rank} of {size} into the group at {address}")
        memory, other_ranks = descriptors[0], [other for other in range(1, size) if other != rank]
        for other_rank, descriptor in zip(other_ranks, descriptors[1:], strict=True):
            sockets[other_rank] = socket.socket(fileno=descriptor)
        return SharedPeers(_shm.Mapping(memory), rank, sockets)
    except BaseException:
        for peer_socket in sockets.values():
            peer_socket.close()
        raise
    finally:
        if memory >= 0:
            os.close(memory)


def _dial(address: addresses.Address, deadline: Deadline) -> socket.socket:
    """Connect to rank 0, which may begin to listen a little later."""
    while True:
        try:
            return addresses.dial(address, deadline.left())
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(_RETRY_SECONDS)
