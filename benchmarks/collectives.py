"""What the collectives of attention under tensor parallelism cost, alone and in a served model.

    python benchmarks/collectives.py latency               each collective, by rows and local share; gloo's
    python benchmarks/collectives.py ablation profile.npz  an exchange, without one of its four savings each
    python benchmarks/collectives.py serve /tmp/qwen       the four forms against one process

Every rank is a process of its own with one thread. What is compared takes turns: in `latency` and `ablation`
the same processes do all of it, in `serve` all engines stay loaded. Times are those of the slowest rank,
bytes what the transport counted. --quick: a look at whether it works. Profiles come from `moesaic profile` or
from `routings.py`, checkpoints from `make_checkpoint.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grouped import ablation, latency, serve
from rich.console import Console

PARTS = {"latency": latency, "ablation": ablation, "serve": serve}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, part in PARTS.items():
        command = commands.add_parser(name, help=(part.__doc__ or "").splitlines()[0])
        part.add(command)
        command.add_argument("--json", type=Path, help="write all numbers here")
        command.add_argument("--quick", action="store_true", help="few and short runs")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    part = PARTS[arguments.command]
    if arguments.quick:
        part.quick(arguments)
    found = part.measure(arguments)
    part.show(found, Console(width=150))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
