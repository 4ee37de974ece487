"""The worked examples in the docstrings, and memory that is used again."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.support import faulty_transport
from tests.support.call_pairs import ask, incoming, pair, rows_of

from moesaic.transport import address, calls, sockets
from moesaic.transport.sockets import Blocks


@pytest.mark.parametrize("module", [address, calls, faulty_transport, sockets], ids=lambda one: one.__name__)
def test_docstrings(module: ModuleType) -> None:
    done = doctest.testmod(module, extraglobs={"np": np})
    assert done.attempted > 0 and done.failed == 0


def test_idle_blocks_are_limited() -> None:
    some = Blocks(keep_bytes=3 * 4096)
    taken = [some.take(1) for _ in range(4)]
    for block in taken:
        some.give_back(block)
    assert some.take(4096) is taken[3]
    assert not any(some.take(1) is block for block in taken)


def test_a_socket_uses_its_memory_again(tmp_path: Path) -> None:
    with pair("unix", tmp_path) as (caller, answerer):
        blocks_seen = []
        for _ in range(10):
            call = ask(caller, b"a", 1, 100_000)
            (one,) = incoming(caller, answerer)
            one.publish(np.array([0]))
            rows_of(caller, answerer, call, 1)
            blocks_seen += [one.answer.obj, call.answer.obj]
            caller.release(call)
        assert len({id(block) for block in blocks_seen}) == 2


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 1 << 20])
def test_blocks_are_large_enough(count: int) -> None:
    block = Blocks(1 << 21).take(count)
    assert len(block) >= count and len(block) & len(block) - 1 == 0
