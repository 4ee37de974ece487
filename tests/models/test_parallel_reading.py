"""`read_each` reads in several threads what a loop would read: the same contents, order and error."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.models.parallel_reading import read_each


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(request.param)))
    return int(request.param)


def test_the_order_is_that_of_the_keys(threads: int) -> None:
    first_waits = threading.Event()

    def read(key: int) -> int:
        if key == 0 and threads > 1:
            assert first_waits.wait(timeout=60)  # another thread reads the next key meanwhile
        if key == 1:
            first_waits.set()
        return -key

    assert list(read_each(read, range(20))) == [-key for key in range(20)]
    assert list(read_each(read, [])) == []


@given(st.lists(st.booleans(), max_size=30), st.sampled_from([1, 2, 3, 8]))
def test_the_first_error_is_raised_and_ends_reading(are_bad: list[bool], threads: int) -> None:
    """are_bad: whether each key cannot be read."""
    read_keys: list[int] = []

    def read(key: int) -> int:
        read_keys.append(key)
        if are_bad[key]:
            raise ValueError(key)
        return key

    first_bad = are_bad.index(True) if True in are_bad else len(are_bad)
    contents: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(threads)))
        error = pytest.raises(ValueError, match=f"^{first_bad}$") if True in are_bad else nullcontext()
        with error:
            contents.extend(read_each(read, range(len(are_bad))))
    assert contents == list(range(first_bad))
    assert all(key <= first_bad + threads for key in read_keys)
    assert len(set(read_keys)) == len(read_keys)
