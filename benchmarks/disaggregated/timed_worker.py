"""`python -m disaggregated.timed_worker`: an attention worker with stopwatches in it."""

from __future__ import annotations

from disaggregated.breakdown import watch_worker
from moesaic.runtime.__main__ import main

if __name__ == "__main__":
    watch_worker()
    raise SystemExit(main())
