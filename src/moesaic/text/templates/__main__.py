"""The program of a renderer. Its parent starts it by its path and says where modules are found."""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Serve the parent until it closes standard input. Returns the exit code."""
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    from moesaic.text.templates import process

    return process.serve(settings["seconds"], settings["memory"])


if __name__ == "__main__":
    raise SystemExit(main())
