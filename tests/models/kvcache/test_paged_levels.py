"""Where numbers that are not finite began, in a cache on two levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.kernels import table
from moesaic.models.kvcache.paged_kv import PagedKV, SplitKV
from moesaic.models.spec import KVLayout

LAYERS, SIZE, FAST, SLOW = 3, 4, 2, 3


def paged(blocks: int) -> PagedKV:
    layout = KVLayout(1, 2, 2)
    return PagedKV(layout, LAYERS, blocks, SIZE, torch.float32, torch.device("cpu"), table.REFERENCE)


@pytest.mark.parametrize("seed", range(20))
def test_a_number_is_found_where_one_cache_would_find_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole, split = paged(FAST + SLOW), SplitKV(paged(FAST), paged(SLOW))
    for _ in range(int(rng.integers(0, 3))):
        layer, slot = int(rng.integers(LAYERS)), int(rng.integers((FAST + SLOW) * SIZE))
        rows = torch.full((1, 1, 2), torch.nan)
        part, at = (split.fast, slot) if slot < FAST * SIZE else (split.slow, slot - FAST * SIZE)
        for kv, place in ((whole, slot), (part, at)):
            kv.write(layer, rows, rows, torch.tensor([place]))
    for _ in range(10):
        blocks = rng.permutation(FAST + SLOW)
        length = int(rng.integers(1, (FAST + SLOW) * SIZE + 1))
        assert split.first_not_finite(blocks, length) == whole.first_not_finite(blocks, length)
