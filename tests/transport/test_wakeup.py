"""A bell that is rung from another thread, before and after its end."""

from __future__ import annotations

import os
import select

import pytest

from moesaic.transport.wakeup import Wakeup


def rings(wakeup: Wakeup) -> bool:
    found = bool(select.select([wakeup], [], [], 0)[0])
    assert found == wakeup.rung
    return found


def test_it_rings_until_it_is_cleared() -> None:
    wakeup = Wakeup()
    assert not rings(wakeup)
    for _ in range(100_000):  # more than a pipe holds
        wakeup.ring()
    assert rings(wakeup)
    wakeup.clear()
    assert not rings(wakeup)
    wakeup.close()


@pytest.mark.parametrize("before", [True, False], ids=["rung before", "rung after"])
def test_after_its_end_it_uses_nobody_elses_file(before: bool) -> None:
    """Whoever opens something next gets its descriptors."""
    wakeup = Wakeup()
    if before:
        wakeup.ring()
    wakeup.close()
    reading, writing = os.pipe()
    assert (reading, writing) == (wakeup._reading, wakeup._writing)
    os.set_blocking(reading, False)
    if not before:
        wakeup.ring()
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    os.write(writing, b"theirs")
    wakeup.clear()
    assert os.read(reading, 10) == b"theirs"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("first", [True, False], ids=["before the byte", "behind the byte"])
def test_cleared_while_it_is_rung_it_does_not_ring_for_ever(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sleeps on it would wake again and again without ever being told to look."""
    wakeup, write = Wakeup(), os.write
    wakeup.ring()  # so there is something to clear

    def interrupted(descriptor: int, data: bytes) -> int:
        if first:
            wakeup.clear()
        written = write(descriptor, data)
        if not first:
            wakeup.clear()
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        wakeup.ring()
    assert wakeup.rung  # in both cases it was rung after the last look
    wakeup.clear()
    assert not rings(wakeup)
    wakeup.close()
