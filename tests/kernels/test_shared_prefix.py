"""Decode rows whose sequences share cache blocks have the same bits as with blocks of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.support.native_kernels import CACHED

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import stored_width
from moesaic.kernels.reference.cache import encode
from moesaic.kernels.table import Kernels

SPLIT = 256
"""Tokens of a split, as in csrc/attention.h."""


@dataclass(frozen=True)
class Case:
    """Sequences, each a path of (name of a piece, its tokens). Equal names are the same blocks."""

    paths: tuple[tuple[tuple[str, int], ...], ...]
    block_size: int = 16


def tree(*paths: str, piece: int, own: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    """One sequence for each word: its letters are pieces, of which equal beginnings are shared."""
    return tuple(
        (*((word[: end + 1], piece) for end in range(len(word))), (f"own {index}", own + 3 * index))
        for index, word in enumerate(paths)
    )


CASES = {
    "one prefix": Case(tree("a", "a", "a", "a", "a", "a", "a", piece=512, own=5)),
    "a tree": Case(tree("a", "ab", "abc", "abd", "b", "bc", "", "abc", piece=272, own=40)),
    "nothing shared": Case(tree("a", "b", "c", piece=300, own=9)),
    "shorter than a split": Case(tree("a", "a", piece=240, own=300)),
    "blocks of 24": Case(tree("a", "ab", "ab", piece=528, own=20), block_size=24),
    "an end on a split": Case(((("a", 512),), (("a", 512), ("b", 1)), (("a", 512), ("c", 256)))),
}


def tables(case: Case, shared: bool) -> tuple[list[list[int]], int]:
    """Blocks of each sequence, and their number. shared: equal pieces have equal blocks."""
    known: dict[str, list[int]] = {}
    found, total = [], 0
    for index, path in enumerate(case.paths):
        own: list[int] = []
        for name, tokens in path:
            name = name if shared else f"{index} {name}"
            if name not in known:
                count = -(-tokens // case.block_size)
                known[name] = list(range(total, total + count))
                total += count
            own += known[name]
        found.append(own)
    return found, total


def attend(
    native: Kernels, case: Case, shared: bool, heads: tuple[int, int], dtype: torch.dtype, latent: bool
) -> torch.Tensor:
    """One decode row of every sequence, and a chunk of three rows of the last one behind them."""
    blocks, total = tables(case, shared)
    lengths = [sum(tokens for _, tokens in path) for path in case.paths]
    blocks, lengths, rows = [*blocks, blocks[-1]], [*lengths, lengths[-1]], [1] * len(blocks) + [3]
    width = max(map(len, blocks))
    batch = TokenBatch(
        token_ids=np.zeros(sum(rows), np.int64),
        positions=np.concatenate([np.arange(n - r, n) for n, r in zip(lengths, rows, strict=True)]),
        query_starts=np.concatenate([[0], np.cumsum(rows)]),
        context_lens=np.array(lengths),
        block_tables=np.array([own + [0] * (width - len(own)) for own in blocks]),
        logit_rows=np.arange(1),
    )
    query_heads, key_heads = heads
    generator = torch.Generator().manual_seed(0)
    of_name: dict[str, torch.Tensor] = {}
    keys, values = (
        torch.zeros(total, case.block_size, key_heads, stored_width(32, dtype), dtype=dtype) for _ in range(2)
    )
    for own, path in zip(blocks, case.paths, strict=False):
        place = 0
        for name, tokens in path:
            count = -(-tokens // case.block_size)
            if name not in of_name:
                of_name[name] = torch.randn(2, count, case.block_size, key_heads, 32, generator=generator)
            mine = own[place : place + count]
            keys[mine], values[mine] = (encode(one, dtype) for one in of_name[name])
            place += count
    query = torch.randn(sum(rows), query_heads, 32, generator=generator)
    step = AttentionBatch.build(batch, case.block_size)
    if latent:
        return native.paged_attention(query, keys, None, step, 0.3, value_width=20)
    return native.paged_attention(query, keys, values, step, 0.3)


@pytest.mark.parametrize("dtype", CACHED, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits(native: Kernels, name: str, dtype: torch.dtype, threads: int) -> None:
    native.set_threads(threads, False)
    for heads, latent in (((8, 2), False), ((30, 1), True), ((3, 3), False)):
        wanted = attend(native, CASES[name], False, heads, dtype, latent)
        found = attend(native, CASES[name], True, heads, dtype, latent)
        assert torch.equal(found, wanted), (heads, latent)
        assert wanted.abs().sum() > 0
