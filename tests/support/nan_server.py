"""`python -m tests.support.nan_server`: an expert server whose arithmetic is broken.

`python -m tests.support.nan_server join ...` is `moesaic join` with the same arithmetic.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from moesaic.cluster import local
from moesaic.config import ExpertServerConfig
from moesaic.experts.backend import CallPairs
from moesaic.experts.native_backend import NativeBackend

ROOT = Path(__file__).parent.parent.parent
BROKEN = "BROKEN_ARITHMETIC_OF_A_TEST"
"""Environment variable with the path of a file. A process that can remove it is broken from its fifth run."""
GOOD_RUNS = 4


def environment(file: Path) -> dict[str, str]:
    """Makes `file`. One process of this environment will be broken."""
    file.touch()
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {BROKEN: str(file), "PYTHONPATH": paths}


@contextmanager
def one_broken_server(file: Path) -> Iterator[None]:
    """Of the expert servers that are started inside, one process is broken."""

    def server(config: ExpertServerConfig) -> local.ChildProcess:
        return local.spawn_process(
            "tests.support.nan_server", config.to_json(), "expert server", Path(config.model)
        )

    with patch.dict(os.environ, environment(file)), patch("moesaic.cluster.launcher.spawn_server", server):
        yield


def spoil() -> None:
    """The last number of each answer is NaN from the fifth run on."""
    run, runs = NativeBackend.run, 0

    def spoiled(self: NativeBackend, layer: int, parts: Sequence[CallPairs]) -> None:
        nonlocal runs
        run(self, layer, parts)
        runs += 1
        if runs > GOOD_RUNS:
            for part in parts:
                part.results[part.result_rows, -1] = np.nan

    NativeBackend.run = spoiled  # type: ignore[method-assign]


def main() -> int:
    """Runs the expert server or the command."""
    try:
        Path(os.environ[BROKEN]).unlink()
    except FileNotFoundError:
        pass
    else:
        spoil()
    if sys.argv[1:2] == ["join"]:
        from moesaic.commands.cli import main as command

        return command(sys.argv[1:])
    from moesaic.experts.__main__ import main as server

    return server()


if __name__ == "__main__":
    raise SystemExit(main())
