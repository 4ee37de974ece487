"""What a rank computes around an exchange in Triton: the bits of the reference, in one launch each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.group.test_rows import in_threads, same
from tests.support.thread_peers import thread_peers
from tests.support.triton_kernels import DEVICE, IS_INTERPRETED, TRITON, Launches

from moesaic.experts.collectives.group import Traffic
from moesaic.gpu.triton import launching
from moesaic.kernels.table import REFERENCE
from moesaic.runtime.group.tensor_rows import DeviceRows

pytestmark = pytest.mark.slow


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.cpu().contiguous().view(torch.int32)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 400), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=25)
def test_sums_have_the_bits_of_the_reference(
    ranks: int, rows: int, width: int, copies: int, seed: int
) -> None:
    """Of numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    addends = torch.randn(ranks * rows, width, generator=generator)
    addends *= 10.0 ** torch.randint(-6, 7, addends.shape, generator=generator)
    addends[torch.rand(addends.shape, generator=generator) < 0.1] = -0.0
    found = TRITON.sum_ranks(addends.to(DEVICE), ranks, copies)
    assert torch.equal(bits(found), bits(REFERENCE.sum_ranks(addends, ranks, copies)))
    if ranks > 2 and addends.numel() > 100:
        turned = addends.view(ranks, rows, width).flip(0).reshape(-1, width)
        assert not torch.equal(bits(found), bits(REFERENCE.sum_ranks(turned, ranks, copies)))


@given(st.integers(0, 9), st.integers(1, 5000), st.integers(0, 99))
@settings(max_examples=15)
def test_rows_move_as_in_the_reference(rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    some, order = torch.randn(rows, width, generator=generator), torch.randperm(rows, generator=generator)
    there = some.to(DEVICE), order.to(DEVICE)
    moved = TRITON.permute_rows(*there)
    assert torch.equal(bits(moved), bits(REFERENCE.permute_rows(some, order)))
    assert torch.equal(bits(TRITON.restore_rows(*there)), bits(REFERENCE.restore_rows(some, order)))
    assert torch.equal(bits(TRITON.restore_rows(moved, there[1])), bits(some))


class Alike:
    """Peers that all send what this rank sends."""

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return rows.new_ones(sum(receive), *rows.shape[1:])


CALLS: dict[str, tuple[Callable[[DeviceRows, torch.Tensor, Any], torch.Tensor], int]] = {
    "all-reduce": (lambda rows, some, order: rows.all_reduce(some), 1),
    "reduce-scatter": (lambda rows, some, order: rows.reduce_scatter(some, [3, 2, 2]), 1),
    "permuted reduce-scatter": (lambda rows, some, order: rows.reduce_scatter(some, [3, 2, 2], order), 2),
    "all-gather": (lambda rows, some, order: rows.all_gather(some[:3], [3, 2, 2]), 1),
    "all-gather that restores": (lambda rows, some, order: rows.all_gather(some[:3], [3, 2, 2], order), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_launches_of_a_collective(name: str) -> None:
    """Beside the exchanges. Copies of the order to the device are not counted."""
    call, wanted = CALLS[name]
    group: Any = SimpleNamespace(rank=0, size=3, traffic=Traffic())
    rows, some = DeviceRows(group, Alike(), TRITON), torch.ones(7, 8, device=DEVICE)  # type: ignore[arg-type]
    before = Launches.count
    call(rows, some, torch.randperm(7).numpy())
    assert Launches.count - before == wanted


@pytest.mark.skipif(not IS_INTERPRETED, reason="ranks are threads here")
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_have_the_bits_and_bytes_of_the_host(size: int) -> None:
    lock, run, ends = threading.Lock(), launching.run, thread_peers(size)

    def alone(*launched: Any) -> None:
        with lock:  # the interpreter keeps the present program in its module
            run(*launched)

    with mock.patch.object(launching, "run", alone):
        same(in_threads(size, lambda group: DeviceRows(group, ends[group.rank], TRITON)), size)
