"""A script of several parts, each a module with `add`, `quick`, `measure`, `show` and perhaps `picture`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from rich.console import Console

from moesaic.core.errors import MoesaicError


def run(
    text: str | None,
    parts: Mapping[str, ModuleType],
    width: int,
    before: Callable[[argparse.ArgumentParser, ModuleType], None] = lambda command, part: None,
) -> None:
    """The part that the command line names. text: the script's own; before: adds arguments to a part's."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, part in parts.items():
        about = part.__doc__ or ""
        command = commands.add_parser(name, help=about.splitlines()[0], description=about)
        before(command, part)
        part.add(command)
        command.add_argument("--json", type=Path, help="write all numbers here")
        command.add_argument("--quick", action="store_true", help="few and short runs")
    arguments = parser.parse_args()
    part = parts[arguments.command]
    if arguments.quick:
        part.quick(arguments)
    try:
        found = part.measure(arguments)
    except MoesaicError as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    part.show(found, Console(width=width))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    if getattr(arguments, "svg", None):
        Path(arguments.svg).write_text(part.picture(found, arguments))
