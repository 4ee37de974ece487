"""Runs the demo and saves its terminal output as a picture, docs/demo.svg."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Returns the demo's exit code. The picture is written only when it is 0."""
    demo = subprocess.run([sys.executable, ROOT / "scripts" / "demo.py"], capture_output=True, text=True)
    console = Console(record=True, width=100, file=sys.stdout)
    console.print(Text("$ make demo", style="bold green"))
    # A reader's home is another one. A shell takes both.
    for line in demo.stdout.replace(str(Path.home()), "~").splitlines():
        style = {"$": "bold green", ">": "bold cyan", "[": "yellow"}.get(line[:1], "")
        console.print(Text(line, style=style))
    if demo.returncode == 0:
        console.save_svg(str(ROOT / "docs" / "demo.svg"), title="make demo")
    else:
        print(demo.stderr, file=sys.stderr)
    return demo.returncode


if __name__ == "__main__":
    raise SystemExit(main())
