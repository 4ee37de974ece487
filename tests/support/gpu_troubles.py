"""A child process of `make gpu` whose cases fail, hang, crash and start processes that do not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu import child
from scripts.gpu.plan import Found, Part, Work

CASES = ("raises", "good", "hangs", "crashes", "good again")


def run(work: Work, case: str) -> Found:
    """What the case's name says."""
    sys.stderr.write(f"this is {case}\n")
    sys.stderr.flush()
    if case == "raises":
        raise ValueError("no such thing")
    if case == "hangs":
        sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(work.folder, "pid").write_text(str(sleeping.pid))
        time.sleep(1000)
    if case == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"ok": True, "process": os.getpid()}


PART = Part(60, 20, lambda work: CASES, run, fresh=False)

if __name__ == "__main__":
    raise SystemExit(child.main({"troubles": PART}))
