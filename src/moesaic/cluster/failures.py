"""Records failures, and keeps the supervisor running after unexpected exceptions."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from moesaic.core.cluster_status import Failure

LOG = logging.getLogger(__name__)
MOST = 50
"""Maximum number of failures that are kept, the latest ones."""
LONGEST = 2000
"""Maximum characters of a failure. The rest is cut off."""


class Failures:
    """The failures of one cluster, oldest first."""

    def __init__(self) -> None:
        self._last: deque[Failure] = deque(maxlen=MOST)

    def all(self) -> list[Failure]:
        return list(self._last)

    def note(self, what: str, error: BaseException | None = None) -> None:
        """Records a failure as one line. error: its traceback goes to the log.

        A peer may have written a part of `what`. So nothing of it can look like another line of the log.
        """
        what = "".join(one if one.isprintable() else "?" for one in what[:LONGEST])
        LOG.warning("%s", what, exc_info=error)
        self._last.append(Failure(time.time(), what))

    def survive(self, action: Callable[[], None]) -> str | None:
        """Runs `action`. Returns its exception as one line, or None. A failure that repeats is recorded once.

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
