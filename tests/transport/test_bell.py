"""A bell that is rung from another thread, before and after its end."""

from __future__ import annotations

import os
import select

import pytest

from moesaic.transport.bell import Bell


def rings(bell: Bell) -> bool:
    found = bool(select.select([bell], [], [], 0)[0])
    assert found == bell.rung
    return found


def test_it_rings_until_it_is_cleared() -> None:
    bell = Bell()
    assert not rings(bell)
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()
    assert rings(bell)
    bell.clear()
    assert not rings(bell)
    bell.close()


def test_rung_after_its_end_it_writes_into_nobody_elses_file() -> None:
    """Whoever opens something next gets its descriptors."""
    bell = Bell()
    bell.close()
    reading, writing = os.pipe()
    assert (reading, writing) == (bell._reading, bell._writing)
    os.set_blocking(reading, False)
    bell.ring()
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    os.close(reading)
    os.close(writing)
