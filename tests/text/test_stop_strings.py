"""Where answers stop."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.text.stop_strings import StopStrings


@pytest.mark.slow
@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=24),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=9), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=5),
    keep=st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_arrives(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    """Against the obvious version: wait for all the text, cut at the stop string that ends first."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    search = StopStrings(stops).search(keep)
    given_out, found = "", None
    for begin, end in itertools.pairwise(bounds):
        piece, found = search.push(text[begin:end])
        given_out += piece
        if found:
            break
    if not found:
        given_out += search.push("", final=True)[0]
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not ends:
        assert (given_out, found) == (text, None)
        return
    end = min(end for end, _ in ends)
    longest = max((stop for at, stop in ends if at == end), key=len)
    assert found == longest
    assert given_out == text[: end if keep else end - len(longest)]


@pytest.mark.parametrize("stop", ["a" * 100_000, "a" * 10_000 + "b", "ab" * 50_000])
def test_text_that_is_held_back_costs_no_more_than_other_text(stop: str) -> None:
    """A server's event loop does this, so a request with such stop strings must not delay others."""
    search = StopStrings([stop + str(number) for number in range(16)]).search(keep=False)
    text = (stop[:2] * 10_000)[:20_000]
    began, out = time.process_time(), ""
    for at in range(0, len(text), 4):
        out += search.push(text[at : at + 4])[0]
    assert out + search.held_text == text
    assert time.process_time() - began < 20
