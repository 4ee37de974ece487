"""What holds for every test: no network; properties without a deadline, on the same examples every time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

hypothesis.settings.register_profile("moesaic", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
# Other examples: `pytest --hypothesis-profile=random`, and with --hypothesis-seed the same ones again.
hypothesis.settings.load_profile("moesaic")


def pytest_collection_finish() -> None:
    """What is there now stays: no collection of garbage need look at seven thousand tests and torch again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quick_workers() -> Iterator[None]:
    """Worker processes that this one starts are there at once; see `tests.warm`."""
    from tests import warm  # and with it moesaic, which most tests import anyway

    with warm.process():
        yield
