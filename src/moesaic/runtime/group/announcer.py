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


class Announcer:
    """The first rank's end of a group. It is closed after an error, in whose middle the others are."""

    def __init__(self, rows: RowCollectives, explain_loss: Callable[[ConnectionLost], MoesaicError]) -> None:
        """explain_loss: the error to raise where a rank is gone."""
        self.rows, self._explain_loss = rows, explain_loss
        self.recordings: list[Recording[Any]] = []
        """Graphs that may hold exchanges."""
        rows.when_closing(partial(free_recordings, self.recordings))

    def run(self, operation: Callable[[], Result]) -> Result:
        """What takes part in an exchange of the ranks."""
        try:
            return operation()
        except ConnectionLost as lost:
            self.rows.close()
            raise self._explain_loss(lost) from None
        except BaseException:
            self.rows.close()
            raise

    def announce(self, *numbers: int, step: bytes = b"") -> None:
        """Send a message to the other ranks."""
        self.rows.group.announce(np.array(numbers, np.int64).tobytes() + step)


def at_first(rows: int, ranks: int) -> list[int]:
    """Rows of each rank where the first one has all of them."""
    return [rows, *[0] * (ranks - 1)]


def free_recordings(recordings: list[Recording[Any]]) -> None:
    """Destroy these recordings."""
    while recordings:
        recordings.pop().free()
