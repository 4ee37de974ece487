"""What kernels in Triton's interpreter get in place of NVSHMEM's functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import triton
import triton.language as tl

from moesaic.gpu.triton import nvshmem

Put = Callable[[int, int, int, int, int, int], None]
"""As `nvshmem.put_signal`."""


@triton.jit
def _at_least(words, numbers):
    return tl.load(words.to(tl.pointer_type(tl.int64)), volatile=True) >= numbers


def calls(put: Put) -> AbstractContextManager[Any]:
    """Within it kernels send by `put`, and look at words in memory of the CPU."""

    def put_signal(*given: Any) -> None:
        put(*(int(one.handle.data.item()) for one in given))

    return mock.patch.multiple(nvshmem, put_signal=put_signal, at_least=_at_least)
