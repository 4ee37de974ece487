"""The same random numbers for every test, and no warnings of NumPy, with which the interpreter computes.

exp overflows to infinity in a sigmoid, as on a GPU, and the result is 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield
