"""What it costs and gains to have the experts in processes of their own.

    python benchmarks/disaggregation.py one /tmp/qwen             a worker and a server against one process
    python benchmarks/disaggregation.py colocated                 two ranks, by schedule and skew
    python benchmarks/disaggregation.py kill demo --svg kill.svg  tokens/s while an expert server is killed
    python benchmarks/disaggregation.py queues demo --svg q.svg   arrivals near saturation, by queue policy
    python benchmarks/disaggregation.py affinity demo --profile p.npz --prompts a.jsonl b.jsonl
                                                                  two ranks, by dispatch and placement

Shown are medians of interleaved rounds: what is compared takes turns, and stays loaded meanwhile. Every
process of a cluster has one thread, in `one` --threads. --quick: a look at whether it works. Checkpoints come
from `make_checkpoint.py`; `colocated` writes its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from disaggregated import affinity, colocated, kill, one, queues
from rich.console import Console

from moesaic.core.errors import MoesaicError

PARTS = {"one": one, "colocated": colocated, "kill": kill, "queues": queues, "affinity": affinity}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, part in PARTS.items():
        command = commands.add_parser(name, help=(part.__doc__ or "").splitlines()[0])
        if part is not colocated:
            command.add_argument("model", nargs="?", default="demo", help="a Hugging Face directory, or demo")
        part.add(command)
        command.add_argument("--json", type=Path, help="write all numbers here")
        command.add_argument("--quick", action="store_true", help="few and short runs")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    part = PARTS[arguments.command]
    if arguments.quick:
        part.quick(arguments)
    try:
        found = part.measure(arguments)
    except MoesaicError as error:
        raise SystemExit(f"disaggregation: {error}") from error
    part.show(found, Console(width=140))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    if getattr(arguments, "svg", None):
        Path(arguments.svg).write_text(part.picture(found, arguments))


if __name__ == "__main__":
    main()
