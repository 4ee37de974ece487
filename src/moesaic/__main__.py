"""The `moesaic` command and `python -m moesaic`. Ctrl-C ends it without a traceback, even during imports."""

from __future__ import annotations


def main() -> int:
    """Run this process's command line. Returns the exit code."""
    try:
        from moesaic.commands import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
