"""The most memory that a worker of `run-batch --fast-memory` takes, for several caps and lengths of prompts.

`peak` is the worker's VmHWM, `beyond the cap` what of it is more than --fast-memory, `API` the peak of the
process that started it; `libraries` is the peak of a process that has imported all that a worker imports and
loaded nothing. A cap that is too small is refused, and the smallest that is not is told.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import make_checkpoint
import numpy as np
from countdown import Clock, Tell
from rich.console import Console
from rich.table import Table

from offloading.disk import _measured
from offloading.telling import _number

SHAPE = "qwen3-moe-0.96b"
"""The shape of the checkpoint that is written when none is given."""
MIB = 1 << 20
PAUSE = 0.02
"""Seconds between two samples of a process's memory."""
LIBRARIES = (
    "import moesaic.runtime.build, moesaic.runtime.offloaded_worker; print(open('/proc/self/status').read())"
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"a Hugging Face directory (default: writes {SHAPE})")
    parser.add_argument("--caps", nargs="+", default=["450MiB", "600MiB", "800MiB"])
    parser.add_argument(
        "--prompt-lens", nargs="+", type=int, default=[200, 2000], help="of the longest prompt"
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--gen-len", type=int, default=8)
    parser.add_argument("--hardware", type=Path, help="of `moesaic hardware measure`; measured if not given")


def quick(arguments: argparse.Namespace) -> None:
    arguments.caps, arguments.prompt_lens, arguments.requests = arguments.caps[-1:], [100], 8


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """A row for each cap and length."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments.model = Path(arguments.model or folder / "model").absolute()
        if not arguments.model.exists():
            make_checkpoint.write(SHAPE, arguments.model)
        hardware = arguments.hardware or _measured(arguments, folder / "this.toml")
        runs = [(cap, longest) for longest in arguments.prompt_lens for cap in arguments.caps]
        rows = []
        with Clock([_step(*run) for run in runs]) as clock:
            clock.what = "run-batch"
            for cap, longest in runs:

                def once(tell: Tell, cap: str = cap, longest: int = longest) -> dict[str, Any]:
                    return _run(arguments, hardware, folder, cap, longest)

                rows.append(clock.timed(_step(cap, longest), once))
    return {"model": arguments.model.name, "libraries": _libraries(), "rows": rows}


def _step(cap: str, longest: int) -> str:
    return f"{cap}, prompts up to {longest}"


def _run(
    arguments: argparse.Namespace, hardware: Path, folder: Path, cap: str, longest: int
) -> dict[str, Any]:
    asked, answered = folder / "in.jsonl", folder / "out.jsonl"
    asked.write_text("".join(line + "\n" for line in lines(arguments.requests, longest, arguments.gen_len)))
    answered.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "moesaic", "run-batch", "-i", str(asked), "-o", str(answered), "--json"),
        *("--model", str(arguments.model), "--served-model-name", "it", "--hardware", str(hardware)),
        *("--fast-memory", cap),
    ]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        peaks = watched(process)
        said.seek(0)
        last = said.read().strip().rpartition("\n")[2]
    row = {"cap": cap, "longest": longest, "worker": None, "api": None, "refused": None}
    if process.returncode:
        return row | {"refused": told(last)}
    return row | {"worker": max(peaks[1:], default=None), "api": peaks[0]}


def lines(requests: int, longest: int, generate: int) -> list[str]:
    """Completions of random prompts, one of them the longest, the others from one token on."""
    rng = np.random.default_rng(0)
    found = []
    for index, length in enumerate([longest, *rng.integers(1, longest + 1, requests - 1)]):
        prompt = rng.integers(1, 255, length).tolist()
        body = {"model": "it", "prompt": prompt, "max_tokens": generate, "ignore_eos": True, "temperature": 0}
        line = {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
        found.append(json.dumps(line))
    return found


def watched(process: subprocess.Popen[Any]) -> list[int]:
    """The most bytes that the process, then its children, had resident until it ended."""
    peaks: dict[int, int] = {process.pid: 0}
    while process.poll() is None:
        for pid in (process.pid, *children(process.pid)):
            peak = _number(Path(f"/proc/{pid}/status"), "VmHWM:")
            peaks[pid] = max(peaks.get(pid, 0), (peak or 0) * 1024)
        time.sleep(PAUSE)
    return list(peaks.values())


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def told(refusal: str) -> str:
    """Example: "...; allowed: at least 625MiB for it" -> "at least 625MiB"."""
    found = re.search(r"at least \S+", refusal)
    return found.group() if found else refusal


def _libraries() -> int:
    said = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True
    ).stdout
    [kibibytes] = [int(line.split()[1]) for line in said.splitlines() if line.startswith("VmHWM:")]
    return 1024 * kibibytes


def show(found: dict[str, Any], console: Console) -> None:
    from moesaic.config import parse_bytes

    table = Table(
        title=f"{found['model']}, MiB; libraries {found['libraries'] / MIB:.0f}", title_justify="left"
    )
    for name in ("prompts up to", "cap", "peak of the worker", "beyond the cap", "API"):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        head = str(row["longest"]), row["cap"]
        if row["worker"] is None:
            table.add_row(*head, f"refused: {row['refused']}", "", "")
            continue
        beyond = row["worker"] - parse_bytes("--caps", row["cap"])
        table.add_row(*head, *(f"{size / MIB:.0f}" for size in (row["worker"], beyond, row["api"])))
    console.print(table)
