"""Records failures, and keeps the supervisor running after unexpected exceptions."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from moesaic.core.cluster_status import Failure

LOG = logging.getLogger(__name__)
MAX_FAILURES = 50
"""Maximum number of failures that are kept, the latest ones."""
MAX_CHARACTERS = 2000
"""Maximum characters of a failure. The rest is cut off."""


class Failures:
    """The failures of one cluster, oldest first."""

    def __init__(self) -> None:
        self._last: deque[Failure] = deque(maxlen=MAX_FAILURES)

    def list_failures(self) -> list[Failure]:
        return list(self._last)

    def note(self, message: str, error: BaseException | None = None) -> None:
        """Records a failure as one line. error: its traceback goes to the log.

        A peer may have written a part of `message`. So nothing of it can look like another line of the log.
        """
        message = "".join(
            character if character.isprintable() else "?" for character in message[:MAX_CHARACTERS]
        )
        LOG.warning("%s", message, exc_info=error)
        self._last.append(Failure(time.time(), message))

    def run_safely(self, action: Callable[[], None]) -> str | None:
        """Runs `action`. Returns its exception as one line, or None. A failure that repeats is recorded once.

        Example: three actions that raise KeyError(7) leave one line, "the supervisor: KeyError: 7".
        """
        try:
            action()
        except Exception as error:
            message = f"the supervisor: {type(error).__name__}: {error}".partition("\n")[0]
            if not self._last or self._last[-1].what != message:
                self.note(message, error)
            return message
        return None
