"""What went wrong, for people; and how the supervisor goes on after what nobody expected."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from moesaic.core.cluster_status import Failure

LOG = logging.getLogger(__name__)
MOST = 50
"""The last ones are remembered."""


class Failures:
    """Those of one cluster, oldest first."""

    def __init__(self) -> None:
        self._last: deque[Failure] = deque(maxlen=MOST)

    def all(self) -> list[Failure]:
        return list(self._last)

    def note(self, what: str, error: BaseException | None = None) -> None:
        """One line for a person. error: its traceback goes to the log."""
        LOG.warning("%s", what, exc_info=error)
        self._last.append(Failure(time.time(), what))

    def survive(self, action: Callable[[], None]) -> str | None:
        """Do it. What it raised, as one line; what fails again and again is noted once.

        Example: three actions that raise KeyError(7) leave one line, "the supervisor: KeyError: 7".
        """
        try:
            action()
        except Exception as error:
            what = f"the supervisor: {type(error).__name__}: {error}".partition("\n")[0]
            if not self._last or self._last[-1].what != what:
                self.note(what, error)
            return what
        return None
