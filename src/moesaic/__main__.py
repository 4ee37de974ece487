"""`python -m moesaic`: the same as the `moesaic` command."""

from __future__ import annotations

from moesaic.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
