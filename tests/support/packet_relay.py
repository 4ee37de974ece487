"""`python -m tests.support.packet_relay A B DELAY LOSS`: carries packets between two network interfaces.

Each packet leaves DELAY seconds after it came, and a share of LOSS of them is dropped. The choice of these is
the same in every run with the same packets.
"""

from __future__ import annotations

import heapq
import itertools
import random
import select
import socket
import sys
import time

EVERY = 3
"""ETH_P_ALL."""
PACKET, IGNORE_OUTGOING, VNET_HEADER = 263, 23, 15
"""SOL_PACKET, PACKET_IGNORE_OUTGOING, and PACKET_VNET_HDR: packets come and go with what the sender left to
the device, such as checksums and cutting into pieces."""
LARGEST = 1 << 17
"""Bytes."""


def opened(name: str) -> socket.socket:
    """A socket that gets the packets which come in at this interface, and sends packets there."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(PACKET, VNET_HEADER, 1)
    sock.setsockopt(PACKET, IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    sock.bind((name, EVERY))
    sock.setblocking(False)
    return sock


def main(one: str, other: str, delay: str, loss: str) -> None:
    left, right = opened(one), opened(other)
    partner, held, order = {left: right, right: left}, [], itertools.count()  # type: ignore[var-annotated]
    draw, seconds, share = random.Random(7), float(delay), float(loss)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for sock in select.select([left, right], [], [], wait)[0]:
            packet = sock.recv(LARGEST)
            if draw.random() >= share:
                heapq.heappush(held, (time.monotonic() + seconds, next(order), partner[sock], packet))
        while held and held[0][0] <= time.monotonic():
            _, _, sock, packet = heapq.heappop(held)
            try:
                sock.send(packet)
            except OSError:
                pass  # the link is down, or the queue is full: the packet is lost


if __name__ == "__main__":
    main(*sys.argv[1:])
