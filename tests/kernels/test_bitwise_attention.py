"""A row's attention has the same bits as in decode, in any chunk, over any blocks, beside any other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.support.native_kernels import CACHED, STORED, same_bits

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference.cache import encode
from moesaic.kernels.table import Kernels

torch.set_num_threads(1)
BLOCK_SIZE = 5
LENGTHS = (700, 300, 257, 40, 9, 1, 513, 30)
NUM_BLOCKS = 600
SAMPLE = (0, 1, 6, 15, 39, 100, 254, 255, 256, 257, 299, 400, 511, 512, 513, 600, 698, 699)
"""Positions whose bits are compared in longer chunks."""

Piece = tuple[int, int, int]
"""A sequence and its rows [start, stop) in a step."""
Rows = dict[tuple[int, int], torch.Tensor]
"""A dictionary (sequence, position) -> attention of that row."""


@dataclass(frozen=True)
class Shape:
    query_heads: int
    kv_heads: int
    key_width: int
    value_width: int
    in_key: bool = False


SHAPES = {
    "grouped": Shape(6, 2, 24, 20),
    "one by one": Shape(3, 3, 16, 16),
    "many on one key": Shape(30, 1, 7, 9),
    "latent": Shape(5, 1, 40, 33, in_key=True),
}


class Story:
    """Sequences with fixed random queries, keys and values, and steps over them."""

    def __init__(self, native: Kernels, shape: Shape, dtype: torch.dtype, window: int | None) -> None:
        self.native, self.shape, self.window = native, shape, window
        self.query = [torch.randn(length, shape.query_heads, shape.key_width) for length in LENGTHS]
        self.dtype = dtype
        self.keys, self.values = (
            [encode(torch.randn(length, shape.kv_heads, width), dtype) for length in LENGTHS]
            for width in (shape.key_width, shape.value_width)
        )
        self.lay_out(0)

    def lay_out(self, seed: int, garbage: float = 0.0) -> None:
        """Writes all tokens into blocks that `seed` scatters. Other places have `garbage`."""
        free = iter(np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist())
        self.key_cache, self.value_cache = (
            encode(torch.full((NUM_BLOCKS, BLOCK_SIZE, self.shape.kv_heads, width), garbage), self.dtype)
            for width in (self.shape.key_width, self.shape.value_width)
        )
        self.tables = []
        for key, value in zip(self.keys, self.values, strict=True):
            blocks = [next(free) for _ in range(-(-len(key) // BLOCK_SIZE))]
            slots = (torch.tensor(blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
            self.key_cache.flatten(0, 1)[slots[: len(key)]] = key
            self.value_cache.flatten(0, 1)[slots[: len(key)]] = value
            self.tables.append(blocks)

    def step(self, pieces: Sequence[Piece]) -> Rows:
        """Runs one step that computes `pieces` together."""
        tables = np.zeros((len(pieces), max(len(self.tables[index]) for index, _, _ in pieces)), np.int64)
        for line, (index, _, _) in enumerate(pieces):
            tables[line, : len(self.tables[index])] = self.tables[index]
        counts = [stop - start for _, start, stop in pieces]
        batch = TokenBatch(
            token_ids=np.zeros(sum(counts), np.int64),
            positions=np.concatenate([np.arange(start, stop) for _, start, stop in pieces]),
            query_starts=np.concatenate([[0], np.cumsum(counts)]),
            context_lens=np.array([stop for _, _, stop in pieces]),
            block_tables=tables,
            logit_rows=np.arange(1),
        )
        query = torch.cat([self.query[index][start:stop] for index, start, stop in pieces])
        values = None if self.shape.in_key else self.value_cache
        attention = AttentionBatch.build(batch, BLOCK_SIZE)
        found = self.native.paged_attention(
            query, self.key_cache, values, attention, 0.3, self.window, self.shape.value_width
        )
        names = [(index, position) for index, start, stop in pieces for position in range(start, stop)]
        return dict(zip(names, found, strict=True))

    def decode(self, sequence: int, position: int) -> torch.Tensor:
        """Computes one row alone."""
        return self.step([(sequence, position, position + 1)])[sequence, position]


def check(found: Rows, wanted: Rows) -> None:
    """Checks that the rows that both have are equal bit by bit."""
    both = found.keys() & wanted.keys()
    assert both
    for name in both:
        assert same_bits(found[name], wanted[name]), name


def chunks(sequence: int, stop: int, size: int) -> list[Piece]:
    return [(sequence, start, min(start + size, stop)) for start in range(0, stop, size)]


@pytest.mark.parametrize(
    ("dtype", "window"),
    [*((dtype, None) for dtype in CACHED), (STORED[0], 300), (STORED[1], 6), (torch.int8, 300)],
)
@pytest.mark.parametrize(
    "shape",
    [pytest.param(name, marks=pytest.mark.slow if name == "many on one key" else ()) for name in SHAPES],
)
def test_a_row_has_the_same_bits_however_it_is_computed(
    native: Kernels, shape: str, dtype: torch.dtype, window: int | None
) -> None:
    story = Story(native, SHAPES[shape], dtype, window)
    wanted = {(0, position): story.decode(0, position) for position in SAMPLE}
    for index, length in enumerate(LENGTHS):
        wanted[index, length - 1] = story.decode(index, length - 1)
    last = [(index, length - 1, length) for index, length in enumerate(LENGTHS)]
    for threads in (1, 2, 5):  # few rows are split over threads by tokens, many are not
        native.set_threads(threads, False)
        for piece in ((0, 0, 257), (0, 254, 256), (0, 250, 314), (0, 510, 517), (0, 100, 300)):
            check(story.step([piece]), wanted)
        check({(0, position): story.decode(0, position) for position in SAMPLE[::2]}, wanted)
        check(story.step(last), wanted)
        check(story.step([*last[3:], (0, 600, 700), *last[1:3]]), wanted)
        check(story.step([*last * 5, (0, 690, 700)]), wanted)
    check(story.step([(0, 0, 700)]), wanted)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_short_chunks_have_the_bits_of_single_rows(native: Kernels, shape: str, dtype: torch.dtype) -> None:
    story = Story(native, SHAPES[shape], dtype, None)
    single = {(1, position): story.decode(1, position) for position in range(300)}
    for size in (2, 7, 64, 300):
        for piece in chunks(1, 300, size):
            check(story.step([piece]), single)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("shape", SHAPES)
def test_where_blocks_lie_changes_no_bit(native: Kernels, shape: str, dtype: torch.dtype) -> None:
    story = Story(native, SHAPES[shape], dtype, None)
    steps: list[list[Piece]] = [[(0, 699, 700)], [(0, 600, 700), (1, 299, 300)], [(5, 0, 1), (6, 512, 513)]]
    wanted = [story.step(step) for step in steps]
    for seed, garbage in ((1, 1e30), (2, float("nan")), (3, -float("inf"))):
        story.lay_out(seed, garbage)
        for step, rows in zip(steps, wanted, strict=True):
            check(story.step(step), rows)


@pytest.mark.parametrize("dtype", CACHED)
def test_heads_that_meet_a_few_tokens_at_a_time_have_the_same_bits(
    native: Kernels, dtype: torch.dtype
) -> None:
    """A row alone takes the values of all heads in pieces of 64 KiB; many rows take each head's at once."""
    story = Story(native, Shape(16, 8, 24, 140), dtype, None)
    together = story.step([(1, 200, 300)])
    check({(1, position): story.decode(1, position) for position in (200, 255, 256, 299)}, together)
    check(story.step([(1, 290, 293)]), together)
    native.set_threads(64, False)  # more than twice the splits: each head is a task
    check({(1, 299): story.decode(1, 299)}, together)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("window", [None, 40])
def test_many_rows_that_share_widened_tokens_have_the_bits_of_single_rows(
    native: Kernels, window: int | None, dtype: torch.dtype
) -> None:
    """Widths are longer than a block of a sum and no multiple of a vector. Rows meet 48 to 192 at a time."""
    story = Story(native, Shape(2, 1, 1030, 1029), dtype, window)
    wanted = {(1, position): story.decode(1, position) for position in (0, 33, 95, 96, 255, 256, 290, 299)}
    for pieces in ([(1, 0, 300)], [(1, 0, 270), (2, 30, 257)], [(1, 200, 300), (3, 0, 40), (1, 20, 97)]):
        check(story.step(pieces), wanted)


@pytest.mark.parametrize(("dtype", "near"), [(STORED[0], range(98, 132)), (STORED[1], range(90, 163))])
def test_what_only_other_rows_attend_to_changes_no_bit(
    native: Kernels, dtype: torch.dtype, near: range
) -> None:
    """Many rows of a prompt share the tokens that they meet. Some are behind a row, or have left its window.

    near: The heads of neighbouring rows may lie in one tile. AMX multiplies 32 lines by 32 tokens.
    """
    story = Story(native, Shape(6, 1, 24, 20), dtype, 30)
    wanted = story.step([(0, 0, 300)])
    for part in (story.keys[0], story.values[0]):
        part[100] = torch.nan
    story.lay_out(0)
    found = story.step([(0, 0, 300)])
    check({name: row for name, row in found.items() if name[1] not in near}, wanted)
    assert all(found[0, position].isnan().all() for position in range(100, 130))


def test_a_window_wider_than_the_past_changes_no_bit(native: Kernels) -> None:
    story = Story(native, SHAPES["grouped"], torch.float32, None)
    wanted = story.step([(0, 0, 700)])
    story.window = 700
    check(story.step([(0, 0, 700)]), wanted)
    check({(0, position): story.decode(0, position) for position in SAMPLE}, wanted)
