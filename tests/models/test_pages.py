"""Huge pages: advice that changes no byte."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moesaic.models.checkpoint import Checkpoint
from moesaic.models.pages import PAGE, drop_pages, prefer_huge


def test_a_mapped_file_reads_the_same_after_advice(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, 5 * PAGE + 7, dtype=np.uint8)
    numbers.tofile(tmp_path / "file")
    with (tmp_path / "file").open("rb") as opened:
        found = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    prefer_huge(found.ctypes.data + 3, found.size - 3)
    assert (found == numbers).all()
    drop_pages(found.ctypes.data + 3, found.size - 3)
    assert (found == numbers).all()
    prefer_huge(found.ctypes.data, 0)
    drop_pages(found.ctypes.data + 1, PAGE)  # no whole page
    assert (found == numbers).all()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages")
@pytest.mark.parametrize("mapped", [True, False])
def test_a_whole_shard_is_asked_for_in_huge_pages_where_it_stays_mapped(tmp_path: Path, mapped: bool) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"b": torch.ones(3 * PAGE), "a": torch.zeros(PAGE)}, file)
    checkpoint = Checkpoint(tmp_path, use_mmap=mapped)
    assert checkpoint.tensor("b", 3 * PAGE, dtype=torch.float32).sum() == 3 * PAGE
    advised = [int(size) for size, flags in _mappings(file) if "hg" in flags]
    assert sum(advised) * 1024 >= (file.stat().st_size if mapped else 0)
    assert bool(advised) is mapped


def _mappings(file: Path) -> list[tuple[str, list[str]]]:
    """KiB and flags of each mapping of the file."""
    found, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(file))
        elif ours and line.startswith("Size:"):
            size = line.split()[1]
        elif ours and line.startswith("VmFlags:"):
            found.append((size, line.split()[1:]))
    return found
