"""Attention workers start quickly in all tests of clusters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import forked_workers


@pytest.fixture(scope="package", autouse=True)
def forking() -> Iterator[forked_workers.Forking]:
    with forked_workers.process() as started:
        yield started
