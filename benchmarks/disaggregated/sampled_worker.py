"""`python -m disaggregated.sampled_worker`: an attention worker whose queues are sampled."""

from __future__ import annotations

from disaggregated.depths import watch_worker
from moesaic.runtime.__main__ import main

if __name__ == "__main__":
    watch_worker()
    raise SystemExit(main())
