"""`python -m disaggregated.timed_server`: an expert server with stopwatches in it."""

from __future__ import annotations

from disaggregated.breakdown import watch_server
from moesaic.experts.__main__ import main

if __name__ == "__main__":
    watch_server()
    raise SystemExit(main())
