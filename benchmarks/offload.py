"""Models larger than the fast memory, on real hierarchies of this machine.

    python benchmarks/make_checkpoint.py qwen3-moe-2.6b /tmp/big
    benchmarks/setup_peer.sh llama /tmp/llama
    python -m venv /tmp/accelerate && /tmp/accelerate/bin/pip install torch transformers accelerate
    python benchmarks/offload.py disk /tmp/big --prompts question.jsonl \\
        --llama /tmp/llama --accelerate /tmp/accelerate
    python benchmarks/offload.py cores --svg gantt.svg --json cores.json
    python benchmarks/offload.py latency --svg latency.svg
    python benchmarks/offload.py memory

`disk`: RAM over the disk, beside llama.cpp and accelerate. `cores`: two cores as two levels, every schedule
beside its price. `latency`: what a layer takes there, by micro-batch and context. `memory`: the peaks of
workers beside their caps. --quick: does it work?
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from offloading import cores, disk, latency, memory
from rich.console import Console

from moesaic.core.errors import MoesaicError

PARTS = {"disk": disk, "cores": cores, "latency": latency, "memory": memory}


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, part in PARTS.items():
        text = part.__doc__ or ""
        command = commands.add_parser(name, help=text.splitlines()[0], description=text)
        part.add(command)
        command.add_argument("--json", type=Path, help="write all numbers here")
        command.add_argument("--quick", action="store_true", help="few and short runs")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    part = PARTS[arguments.command]
    if arguments.quick:
        part.quick(arguments)
    try:
        found = part.measure(arguments)
    except MoesaicError as error:
        raise SystemExit(f"offload: {error}") from error
    part.show(found, Console(width=160))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    if getattr(arguments, "svg", None):
        arguments.svg.write_text(part.picture(found, arguments))


if __name__ == "__main__":
    main()
