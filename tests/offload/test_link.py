from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.offload import link as module
from moesaic.offload.link import PIECE, Link, MappedFile


class Clock:
    """Takes the place of `time`. Sleeping takes the time that was asked for, and everything else
    takes none."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_copy_takes_as_long_as_the_link_says(clock: Clock) -> None:
    """A copy of 2.5 MiB over a link of 1 MiB/s takes 2.5 s, piece by piece."""
    link = Link(float(PIECE))
    source = np.arange(5 * PIECE // 2, dtype=np.uint8)
    target = np.zeros_like(source)
    link.fill(target, source)
    assert clock.slept == [1.0, 1.0, 0.5] and link.copied_bytes == len(source)
    assert np.array_equal(target, source)


def test_a_link_without_a_speed_waits_for_nobody(clock: Clock) -> None:
    Link().copy(torch.ones(1000))
    assert clock.slept == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_copies_have_the_same_numbers_in_memory_of_their_own(dtype: torch.dtype) -> None:
    whole = torch.arange(24).view(4, 6).to(dtype)
    link = Link()
    for source in (whole, whole[:, ::2], whole.T, whole[:0]):
        made = link.copy(source)
        assert torch.equal(made, source) and made.is_contiguous() and made.dtype == dtype
        assert not len(made) or made.data_ptr() != source.data_ptr()
    assert link.copied_bytes == (24 + 12 + 24) * dtype.itemsize


def test_gathered_blocks_come_in_the_order_that_was_asked(clock: Clock) -> None:
    link, source = Link(64.0), torch.arange(40.0).view(5, 4, 2)
    target = torch.empty(2, 4, 2)
    link.gather(target, source, torch.tensor([3, 0]))
    assert torch.equal(target, source[[3, 0]])
    assert sum(clock.slept) == pytest.approx(1.0) and link.copied_bytes == 64


def test_a_mapped_file_reads_what_is_there_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    link = Link()
    file = MappedFile(tmp_path / "file", link)
    into = bytearray(50)
    assert file.read(10, memoryview(into)) == 50 and bytes(into) == bytes(range(10, 60))
    into = bytearray(b"x" * 50)
    assert file.read(80, memoryview(into)) == 20  # the file ends there
    assert bytes(into) == bytes(range(80, 100)) + b"x" * 30
    assert link.copied_bytes == 70
    file.close()
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "none", link)
