from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.core.test_tokens import batch

from moesaic.kernels import table
from moesaic.models.block import Projections
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.models.spec import KVLayout
from moesaic.offload.caches import MovingCache, ResidentCache
from moesaic.offload.link import Link
from moesaic.offload.parts import MicroBatch

SIZE = 4
LAYERS = 2


class Copies:
    """Takes the place of a block. Its attention tells which keys a row could see."""

    def attention(self, query: object, keys: torch.Tensor, values: object, batch: object) -> torch.Tensor:
        lens, tables = batch.batch.context_lens, batch.batch.block_tables  # type: ignore[attr-defined]
        rows = [keys[torch.from_numpy(row)].flatten(0, 2) for row in tables]
        return torch.cat([row[:count] for row, count in zip(rows, lens, strict=True)])


def cache(layout: KVLayout, dtype: torch.dtype) -> PagedKV:
    """A cache of twelve blocks whose numbers tell where they are."""
    kv = PagedKV(layout, LAYERS, 12, SIZE, dtype, torch.device("cpu"), table.REFERENCE)
    for layer in range(LAYERS):
        numbers = torch.arange(12.0 * SIZE).view(-1, 1, 1) + 1000 * (layer + 1)
        kv.write(layer, numbers, None, torch.arange(12 * SIZE))
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("in_key", [False, True])
@pytest.mark.parametrize(("rows", "before"), [([1, 1], [3, 8]), ([3, 1], [0, 4]), ([2, 5], [4, 7])])
def test_a_cache_that_moves_shows_attention_what_one_that_stays_shows(
    rows: list[int], before: list[int], in_key: bool, dtype: torch.dtype
) -> None:
    layout = KVLayout(1, 1, 1, value_in_key=in_key)
    whole = batch(rows, before, wanted=[0])
    tables = np.array([[7, 2, 9], [4, 11, 0]])
    whole = type(whole)(**{**vars(whole), "block_tables": tables})
    stays, moves = cache(layout, dtype), cache(layout, dtype)
    down, up = Link(), Link()
    caches = (ResidentCache(stays, SIZE), MovingCache(moves, layout, SIZE, table.REFERENCE, down, up))
    key = torch.arange(float(sum(rows))).view(-1, 1, 1) - 50
    shown = []
    for each in caches:
        part = MicroBatch(whole, np.arange(sum(rows)), each.attention(whole), torch.zeros(1), torch.zeros(1))
        part.projections = Projections(key, key, None if in_key else key + 0.5)
        each.load(1, part)
        each.attend(1, Copies(), part)  # type: ignore[arg-type]
        each.save(1, part)
        assert part.attention_output is not None and not part.local and not part.unsaved_rows
        shown.append(part.attention_output)
    assert torch.equal(*shown)
    for layer in range(LAYERS):
        assert torch.equal(stays.keys(layer), moves.keys(layer))
        assert torch.equal(stays.values(layer), moves.values(layer))
    had = sum(-(-count // SIZE) for count in before)
    assert down.copied_bytes == had * stays.keys(0)[0].nbytes * (1 if in_key else 2)
    assert up.copied_bytes == sum(rows) * 4 * (1 if in_key else 2)
