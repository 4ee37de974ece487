from __future__ import annotations

import doctest

import pytest
import torch

from moesaic.core.errors import ConfigError
from moesaic.offload import arena
from moesaic.offload.arena import Arena
from moesaic.offload.reading import ALIGNMENT


def test_the_example_in_the_docstring() -> None:
    done = doctest.testmod(arena)
    assert done.failed == 0 and done.attempted > 0


def test_portions_are_aligned_zeroed_and_apart() -> None:
    arena = Arena(20 * ALIGNMENT + 17)
    assert arena.size == 20 * ALIGNMENT
    sizes = [1, 4095, 4096, 4097, 0, 30000]
    parts = [arena.take(size) for size in sizes]
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert part.dtype == torch.uint8 and part.shape == (size,)
        assert part.data_ptr() % ALIGNMENT == 0 and not part.any()
        part.fill_(number + 1)
    assert [set(part.tolist()) for part in parts] == [{1}, {2}, {3}, {4}, set(), {6}]
    assert (
        arena.used_bytes == (1 + 1 + 1 + 2 + 0 + 8) * ALIGNMENT
        and arena.free_bytes == arena.size - arena.used_bytes
    )


def test_the_cap_is_kept() -> None:
    arena = Arena(3 * ALIGNMENT)
    arena.take(ALIGNMENT)
    with pytest.raises(ConfigError, match=r"fast memory: got 16384; allowed: at most 12288 bytes"):
        arena.take(2 * ALIGNMENT + 1)
    assert arena.used_bytes == ALIGNMENT, "what was refused took nothing"
    arena.take(2 * ALIGNMENT)
    assert arena.free_bytes == 0 and len(arena.take(0)) == 0


@pytest.mark.parametrize("size", [-4096, 0, 4095, 1 << 60, 1 << 70])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(ConfigError, match=f"fast memory: got {size}; allowed: ") as caught:
        Arena(size)
    assert "\n" not in str(caught.value)


def test_a_portion_outlives_its_arena() -> None:
    part = Arena(ALIGNMENT).take(100)
    part.fill_(9)
    assert int(part.sum()) == 900
