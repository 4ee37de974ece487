"""`python -m moesaic.cluster.solving FOLDER SECONDS`: solves one placement from live routing, then ends.

It runs with the lowest priority, so that it takes only time that serving leaves. SIGALRM ends it after
SECONDS. The end of its stdin ends it too, since nobody would read its answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from moesaic.cluster.solving.job import answer


def main() -> int:
    """Answer the job in the folder. Returns the exit code."""
    folder, seconds = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(seconds)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    answer(folder)
    return 0


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
