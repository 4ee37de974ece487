"""The `moesaic` command, and `python -m moesaic`: Ctrl-C ends it quietly from the first import on."""

from __future__ import annotations


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    try:
        from moesaic import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
