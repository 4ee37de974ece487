"""The native kernels of every instruction set that this CPU has.

Those of table.INTEGER have the kernels of another set, except for experts: test_integers.py has these.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moesaic.kernels import table
from moesaic.kernels.table import Kernels

SETS = [
    *table.instruction_sets()[:1],
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in table.instruction_sets()[1:]
        if name not in table.INTEGER
    ),
] or [pytest.param("", marks=pytest.mark.skip("no native kernels in this build"))]


@pytest.fixture(params=SETS)
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The kernels of one instruction set, on one thread. The random number generator starts anew."""
    torch.manual_seed(0)
    kernels = table.pick("cpu", request.param)
    kernels.set_threads(1, False)
    yield kernels
    kernels.set_threads(1, False)
    table.pick("cpu")
