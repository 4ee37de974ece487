"""What all ranks of a group do together, on the first rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.kernels.table import Recording
from moesaic.runtime.group.rows import RowCollectives

Result = TypeVar("Result")


class Together:
    """The first rank's end of a group. It is closed after an error, in whose middle the others are."""

    def __init__(self, rows: RowCollectives, why: Callable[[ConnectionLost], MoesaicError]) -> None:
        """why: the error to raise where a rank is gone."""
        self.rows, self._why = rows, why
        self.made: list[Recording[Any]] = []
        """Graphs that may hold exchanges."""
        rows.when_closing(partial(free_recordings, self.made))

    def run(self, what: Callable[[], Result]) -> Result:
        """What takes part in an exchange of the ranks."""
        try:
            return what()
        except ConnectionLost as lost:
            self.rows.close()
            raise self._why(lost) from None
        except BaseException:
            self.rows.close()
            raise

    def announce(self, *numbers: int, step: bytes = b"") -> None:
        """Send a message to the other ranks."""
        self.rows.group.announce(np.array(numbers, np.int64).tobytes() + step)


def at_first(rows: int, ranks: int) -> list[int]:
    """Rows of each rank where the first one has all of them."""
    return [rows, *[0] * (ranks - 1)]


def free_recordings(made: list[Recording[Any]]) -> None:
    """Destroy these recordings."""
    while made:
        made.pop().free()
