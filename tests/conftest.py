"""What holds for every test: no network; properties without a deadline, on the same examples every time."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.support.forked_workers import Forking

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["_MOESAIC_EMULATE_AMX"] = "1"  # tiles in plain C++, in builds that were made with them
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU

hypothesis.settings.register_profile("moesaic", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
# Other examples: `pytest --hypothesis-profile=random`, and with --hypothesis-seed the same ones again.
hypothesis.settings.load_profile("moesaic")


def pytest_collection() -> None:
    """Nothing that is imported or collected goes away: nobody need look for garbage meanwhile."""
    gc.disable()


def pytest_collection_finish() -> None:
    """And what is there now stays, the garbage too: to look for it would take a second in each process."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A command that runs in this process sets the level of log lines. The next test has the default."""
    yield
    logging.getLogger("moesaic").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def forking() -> Iterator[Forking]:
    """The processes that fork workers, started when a test needs them; see `tests.support.forked_workers`."""
    from tests.support.forked_workers import Forking  # and with it moesaic, which most tests import anyway

    started = Forking()
    yield started
    started.end()


@pytest.fixture(scope="module")
def quick_workers(forking: Forking) -> Iterator[None]:
    """Worker processes that this one starts are there at once, as are their ranks and expert servers."""
    with forking.quick():
        yield
