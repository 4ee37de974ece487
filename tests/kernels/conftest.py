"""The native kernels of every instruction set that this CPU has.

Those of table.INTEGER have the kernels of another set, except for experts: test_integers.py has these.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.native_kernels import native_sets

from moesaic.kernels import table
from moesaic.kernels.table import Kernels


@pytest.fixture(params=native_sets())
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The kernels of one instruction set, on one thread. The random number generator starts anew."""
    torch.manual_seed(0)
    kernels = table.pick("cpu", request.param)
    kernels.set_threads(1, False)
    yield kernels
    kernels.set_threads(1, False)
    table.pick("cpu")
