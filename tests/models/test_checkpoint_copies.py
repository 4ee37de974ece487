"""Copies of weights in memory of the process's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.models import checkpoint
from moesaic.models.checkpoint import BYTES_AT_A_TIME, Copies
from moesaic.models.pages import ALIGNMENT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_aligned_equal_and_apart(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks, one of them for a tensor that is larger."""
    monkeypatch.setattr(checkpoint, "BYTES_AT_A_TIME", 1 << 12)
    shapes = [(3, 5), (1, 1), (40, 50), (64,), (0, 4), (7, 9), (1000,), (33, 31)]
    originals = [torch.randn(shape).to(dtype) for shape in shapes]
    copies = Copies()
    taken = [copies.copy(original) for original in originals]
    for original, copy in zip(originals, taken, strict=True):
        assert torch.equal(original, copy) and copy.is_contiguous() and copy.dtype == dtype
        assert copy.data_ptr() % ALIGNMENT == 0
    taken[0].fill_(1.0)
    for original, copy in list(zip(originals, taken, strict=True))[1:]:
        assert torch.equal(original, copy)


def test_a_copy_outlives_what_made_it() -> None:
    copy = Copies().copy(torch.arange(9.0))
    assert copy.tolist() == list(range(9))


def test_pages_that_hold_nothing_cost_nothing() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    copies, before = Copies(), resident()
    kept = copies.copy(torch.ones(16))
    assert kept.sum() == 16 and resident() - before < BYTES_AT_A_TIME // 4
