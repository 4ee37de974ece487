"""A group whose ranks are processes: started with a task, timed together, ended with their parent."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.experts.collectives.group import Group

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
AT_A_TIME = 10
"""Number of calls of one operation before the next operation's turn."""
WARMUP = 5
PATIENCE = 30.0
"""Seconds that one rank may end later than another."""

Call = Callable[[], object]
Advance = Callable[[int, int], None]


# ---- the parent


@contextmanager
def task_folder(task: Mapping[str, Any]) -> Iterator[Path]:
    """A private folder in which the ranks find their task and write their results."""
    with tempfile.TemporaryDirectory(prefix="collectives-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps({"secret": secrets.token_hex(16), **task}))
        yield folder


def run(folder: Path, size: int, advance: Advance) -> list[Any]:
    """The results of each of `size` ranks. advance: is called with what is done and of how much."""
    with ExitStack() as stack:
        ranks = [_started(stack, folder, rank, size) for rank in range(size)]
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            done, total = map(int, line.split())
            advance(done, total)
        codes = [_ended(one) for one in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    return [json.loads(_result(folder, rank).read_text()) for rank in range(size)]


def _started(stack: ExitStack, folder: Path, rank: int, size: int) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "grouped.rank", str(folder), str(rank), str(size)],
            stdin=pipe,
            stdout=pipe if rank == 0 else None,
            text=True,
            cwd=Path(__file__).parent.parent,
            env=os.environ | ENVIRONMENT,
        )
    )
    stack.callback(process.kill)
    return process


def _ended(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"found-{rank}.json"


# ---- a rank


def leave(folder: Path, rank: int, found: object) -> None:
    """Writes this rank's result for the parent."""
    _result(folder, rank).write_text(json.dumps(found))


def report(rank: int, done: int, total: int) -> None:
    """Reports progress to the parent. Only the first rank's report counts."""
    if rank == 0:
        print(done, total, flush=True)


def end_with_parent() -> None:
    """End this process when the parent closes its standard input or dies."""

    def wait_for_it() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait_for_it, daemon=True).start()


def timed(
    group: Group, operations: Mapping[str, Call], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds of each call on this rank. All ranks begin each call together.

    rounds: of each operation, at least; fewer once all of them together took `seconds` an operation.
    """
    for once in operations.values():
        for _ in range(WARMUP):
            once()
    times: dict[str, list[float]] = {name: [] for name in operations}
    end = time.perf_counter() + seconds * len(operations)
    done = 0
    while agreed(group, done < rounds and time.perf_counter() < end):
        for name, once in operations.items():
            for _ in range(AT_A_TIME):
                times[name].append(one(group, once))
        done += AT_A_TIME
    return times


def one(group: Group, once: Call) -> float:
    """Seconds of one call that all ranks begin together."""
    group.announce(b"")
    before = time.perf_counter()
    once()
    return time.perf_counter() - before


def agreed(group: Group, yes: bool) -> bool:
    """The value that the first rank has."""
    return group.announce(b"+" if yes else b"") == b"+"


# ---- numbers


def slowest(times: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """[ranks][calls] seconds -> [calls] until the last rank was through.

    Example: [[1, 5], [2, 3]] -> [2, 5].
    """
    found: npt.NDArray[np.float64] = np.array(times).max(axis=0)
    return found
