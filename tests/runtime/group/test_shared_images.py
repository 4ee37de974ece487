"""Copies of the KV and the states of all ranks: each rank gets back what the rank with its heads has had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.one_shot import local_group
from moesaic.kernels.states import StateSizes
from moesaic.kernels.table import REFERENCE
from moesaic.models.kvcache.memory import HybridMemory
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.models.kvcache.states import StateCache
from moesaic.models.spec import KVLayout
from moesaic.runtime.group import shared_images
from moesaic.runtime.group.shared_images import GroupMemory, next_message

CPU = torch.device("cpu")
HEADS = (1, 2, 1)
"""Key heads of each rank."""


def memory(rank: int, seed: int, dtype: torch.dtype) -> HybridMemory:
    torch.manual_seed(10 * seed + rank)
    kv = PagedKV(KVLayout(HEADS[rank], 6, 6), 2, 5, 4, dtype, CPU, REFERENCE)
    states = StateCache(StateSizes.of_convolution(5 * (rank + 1), 3), 2, seats=3, snapshots=1, device=CPU)
    for layer in range(2):
        for stored in (kv.keys(layer), kv.values(layer)):
            stored.view(torch.uint8).random_(0, 256)
        states.layer(layer).page_tails.normal_()
        states.layer(layer).tails.normal_()
    return HybridMemory(kv, states, (0, 2), 4)


class Ranks:
    """The ranks of a group, of which all but the first one are threads."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.memories = [memory(rank, seed, dtype) for rank in range(len(HEADS))]
        self.ends = local_group(len(HEADS))
        self.heard: list[bytes] = []
        self._threads = [
            threading.Thread(target=self._follow, args=(end, one))
            for end, one in list(zip(self.ends, self.memories, strict=True))[1:]
        ]
        for thread in self._threads:
            thread.start()
        self.whole = GroupMemory(self.ends[0], self.memories[0], lambda lost: lost)

    def _follow(self, end: Group, mine: HybridMemory) -> None:
        self.heard.append(next_message(end, mine))

    def end(self) -> None:
        """The others hear something that is no request."""
        self.ends[0].announce(b"a step")
        for thread in self._threads:
            thread.join()
        assert self.heard == [b"a step"] * (len(HEADS) - 1)


@contextmanager
def ranks(seed: int, dtype: torch.dtype) -> Iterator[Ranks]:
    made = Ranks(seed, dtype)
    yield made
    made.end()


@pytest.mark.parametrize("numbers", [1, 7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_each_rank_gets_what_the_rank_with_its_heads_has_had(
    dtype: torch.dtype, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_images, "ROUND", numbers)
    with ranks(1, dtype) as here, ranks(2, dtype) as there:
        blocks, places = np.array([3, 0, 4]), np.array([1, 2, 4])
        assert here.whole.num_layers == 2
        assert here.whole.layer_bytes == sum(one.layer_bytes for one in here.memories)
        assert here.whole.state_bytes == sum(one.state_bytes for one in here.memories)
        for layers, skipped in ((range(1), 0), (range(1, 2), 1)):
            data = here.whole.copy_blocks(blocks, layers)
            assert len(data) == 3 * here.whole.layer_bytes
            there.whole.put_blocks(places, layers, data, skipped)
        states = here.whole.copy_states(2, 1)
        assert len(states) == here.whole.state_bytes
        there.whole.put_states(1, 2, states)
    for mine, theirs in zip(here.memories, there.memories, strict=True):
        for layers, skipped in ((range(1), 0), (range(1, 2), 1)):
            copied = theirs.copy_blocks(places[skipped:], layers)
            assert (copied == mine.copy_blocks(blocks[skipped:], layers)).all()
            assert (theirs.copy_blocks(places[:skipped], layers).size > 0) == bool(skipped)
        assert (theirs.copy_states(1, 2) == mine.copy_states(2, 1)).all()


def test_a_damaged_request_ends_the_group() -> None:
    ends = local_group(2)
    request = shared_images._MARK.to_bytes(8, "little", signed=True)
    thread = threading.Thread(target=ends[0].announce, args=(request,))
    thread.start()
    with pytest.raises(ConnectionLost, match="a request for KV of 8 bytes"):
        next_message(ends[1], memory(1, 1, torch.float32))
    thread.join()
