"""Short searches: fewer simulations, and fewer requests in each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moesaic.planning.deployment import ideas, search, trials


@pytest.fixture(autouse=True, scope="package")
def short() -> Iterator[None]:
    """A search takes a fraction of a second."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (search, "FIRST", 3),
            (search, "SECOND", 1),
            (trials, "EVENTS", 9000),
            (trials, "REQUESTS", 25),
            (trials, "LOOKS", 50),
            (ideas, "ENOUGH_EXPERTS", 0),
        ):
            patch.setattr(module, name, value)
        yield
