"""The other process in tests of calls.

server ADDRESS MODE    MODE echo: answer = request, all rows at once; first: only row 0; never: no rows;
                       asleep: echo, and no spinning
client ADDRESS KIND    posts one call and stays
"""

from __future__ import annotations

import sys

import numpy as np

from moesaic.core.errors import ConnectionLost
from moesaic.transport.calls import Answerer
from moesaic.transport.listening import NIXL_KIND, Listener, connect
from moesaic.transport.waiting import wait

SECRET = b"a secret of the tests"
ROWS = {"echo": slice(None), "asleep": slice(None), "first": slice(1), "never": slice(0)}


def serve(address: str, mode: str) -> None:
    listener = Listener(address, SECRET, kinds=NIXL_KIND)
    say(listener.address)
    ends: list[Answerer] = []
    while True:
        wait(ends, [listener.fileno()], spin=0.0 if mode == "asleep" else 50e-6)
        ends += listener.take_connections()
        for end in list(ends):
            try:
                answer(end, mode)
            except ConnectionLost:
                ends.remove(end)
                end.close()


def answer(end: Answerer, mode: str) -> None:
    for call in end.poll():
        call.answer[:] = call.request
        call.publish(np.arange(call.rows)[ROWS[mode]])
        if mode in ("first", "never"):
            say("answered")


def say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


def stay(address: str, kind: str) -> None:
    caller = connect(address, SECRET, kind, 1 << 20)
    call = caller.open(4, 2, 2)
    assert call is not None
    call.request[:] = b"abcd"
    caller.post(call)
    say("posted")
    while True:
        wait([caller], timeout=0.1)


if __name__ == "__main__":
    {"server": serve, "client": stay}[sys.argv[1]](*sys.argv[2:])
