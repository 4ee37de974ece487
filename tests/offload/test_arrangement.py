from __future__ import annotations

import doctest
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from moesaic.models.headers import Place
from moesaic.offload import arrangement
from moesaic.offload.arrangement import Arrangement, merge_spans
from moesaic.offload.reading import ALIGNMENT

PLACES = st.lists(
    st.builds(
        Place,
        file=st.sampled_from([Path("a"), Path("b")]),
        offset=st.integers(0, 40 * ALIGNMENT),
        size=st.integers(1, 5 * ALIGNMENT),
        dtype=st.just("F32"),
        shape=st.just(()),
    ),
    max_size=12,
)
Block = tuple[Path, int]


def touched(place: Place) -> set[Block]:
    """The numbers of the blocks that these spans touch, one after the other."""
    last = (place.offset + place.size - 1) // ALIGNMENT
    return {(place.file, block) for block in range(place.offset // ALIGNMENT, last + 1)}


def in_memory(arranged: Arrangement) -> list[Block]:
    """For each block of memory, the block of the file that it holds."""
    return [
        (run.file, (run.offset + at) // ALIGNMENT)
        for run in arranged.runs
        for at in range(0, run.size, ALIGNMENT)
    ]


def test_the_example_in_the_docstring() -> None:
    done = doctest.testmod(arrangement)
    assert done.failed == 0 and done.attempted > 0


@given(PLACES)
def test_memory_holds_the_blocks_of_the_tensors_and_no_block_twice(places: list[Place]) -> None:
    arranged = Arrangement(places)
    blocks = in_memory(arranged)
    assert len(blocks) == len(set(blocks)) and set(blocks) == {b for one in places for b in touched(one)}
    assert arranged.size == len(blocks) * ALIGNMENT
    for place in places:
        at = arranged.memory_offsets[place]
        assert at % ALIGNMENT == place.offset % ALIGNMENT
        begin, end = arranged.span(place)
        assert begin <= at < begin + ALIGNMENT and end - ALIGNMENT < at + place.size <= end
        assert set(blocks[begin // ALIGNMENT : end // ALIGNMENT]) == touched(place)
    for one, other in itertools.pairwise(arranged.runs):
        assert one.file != other.file or one.offset + one.size < other.offset, "neighbours are one run"
    for run in arranged.runs:
        ends = [one.offset + one.size for one in places if one.file == run.file]
        inside = [end for end in ends if run.offset < end <= run.offset + run.size]
        assert run.offset + run.required_bytes == max(inside)


@given(PLACES, st.integers(1, 9))
def test_pages_are_equal_and_read_every_block_once(places: list[Place], pages: int) -> None:
    arranged = Arrangement(places)
    read, sizes = [], []
    for page in range(pages):
        begin, end = arranged.page(page, pages)
        sizes.append(end - begin)
        for run, (first, last) in arranged.pieces((begin, end)):
            assert run.memory_offset <= first < last <= run.memory_offset + run.size
            offset = run.offset + first - run.memory_offset
            read += [
                (run.file, block // ALIGNMENT) for block in range(offset, offset + last - first, ALIGNMENT)
            ]
    assert read == in_memory(arranged)
    assert max(sizes) - min(sizes) <= ALIGNMENT


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=10))
def test_merged_spans_cover_the_same_and_are_apart(parts: list[tuple[int, int]]) -> None:
    spans = sorted((begin, begin + size) for begin, size in parts)
    found = list(merge_spans(spans))
    assert {at for span in found for at in range(*span)} == {at for span in spans for at in range(*span)}
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
