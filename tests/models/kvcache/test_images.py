"""Copies of blocks and states: in every cache type, the bytes are found again in another cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.models.kvcache.test_paged_kv import DTYPES, GROUPED, LATENT, paged

from moesaic.kernels.states import StateSizes
from moesaic.models.kvcache.memory import HybridMemory
from moesaic.models.kvcache.paged_kv import PagedKV, bytes_per_token
from moesaic.models.kvcache.states import StateCache, state_bytes
from moesaic.models.spec import KVLayout

SIZES = StateSizes(key_heads=2, value_heads=4, key_width=8, value_width=6, taps=4)
CONVOLUTION = StateSizes.of_convolution(channels=10, taps=3)


def filled(kv: PagedKV) -> PagedKV:
    for layer in range(2):
        for stored in (kv.keys(layer), kv.values(layer)):
            stored.view(torch.uint8).random_(0, 256)
    return kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [GROUPED, LATENT])
def test_blocks_are_the_same_in_other_places(layout: KVLayout, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    kv, other = filled(paged(layout, dtype)), paged(layout, dtype)
    blocks, places = np.array([3, 0, 4]), np.array([1, 2, 4])
    data = kv.copy_blocks(blocks, range(2))
    assert (kv.num_layers, kv.layer_bytes) == (2, 4 * bytes_per_token(layout, 1, dtype))
    assert len(data) == 3 * 2 * kv.layer_bytes
    apart = [kv.copy_blocks(blocks, range(layer, layer + 1)) for layer in range(2)]
    assert (np.concatenate(apart) == data).all()
    other.put_blocks(places, range(1, 2), apart[1], num_skipped=1)
    assert not other.keys(0).view(torch.uint8).any() and other.keys(1).view(torch.uint8).any()
    other.put_blocks(places, range(2), data, num_skipped=1)
    for layer in range(2):
        for mine, theirs in ((kv.keys, other.keys), (kv.values, other.values)):
            found, there = mine(layer).view(torch.uint8), theirs(layer).view(torch.uint8)
            assert torch.equal(there[[2, 4]], found[[0, 4]]) and not there[[0, 1, 3]].any()


@pytest.mark.parametrize("sizes", [SIZES, CONVOLUTION])
def test_states_are_the_same_in_other_places(sizes: StateSizes) -> None:
    torch.manual_seed(1)
    here, there = (
        HybridMemory(
            paged(GROUPED, torch.float32),
            StateCache(sizes, num_layers=2, seats=3, snapshots=2, device=torch.device("cpu")),
            state_layers=(0, 2),
            num_layers=4,
        )
        for _ in range(2)
    )
    before, after = here._states, there._states
    tensors = ("pages", "page_tails", "keys", "updates", "decays", "tails")
    for layer in range(2):
        for name in tensors:
            getattr(before.layer(layer), name).normal_()
    data = here.copy_states(page=4, seat=0)
    assert len(data) == here.state_bytes == sum(state_bytes(sizes, 2))
    there.put_states(page=1, seat=2, data=data)
    for layer in range(2):
        for name, (mine, other) in zip(tensors, [(4, 1)] * 2 + [(0, 2)] * 4, strict=True):
            found, put = getattr(before.layer(layer), name), getattr(after.layer(layer), name)
            assert torch.equal(found[mine], put[other])
            put[other] = 0
            assert not put.any()
