"""A bell that is rung from another thread, before and after its end."""

from __future__ import annotations

import os
import select

import pytest

from moesaic.transport.wakeup import Bell


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


@pytest.mark.parametrize("first", [True, False], ids=["before the byte", "behind the byte"])
def test_cleared_while_it_is_rung_it_does_not_ring_for_ever(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sleeps on it would wake again and again without ever being told to look."""
    bell, write = Bell(), os.write
    bell.ring()  # so there is something to clear

    def interrupted(descriptor: int, data: bytes) -> int:
        if first:
            bell.clear()
        written = write(descriptor, data)
        if not first:
            bell.clear()
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        bell.ring()
    assert bell.rung  # in both cases it was rung after the last look
    bell.clear()
    assert not rings(bell)
    bell.close()
