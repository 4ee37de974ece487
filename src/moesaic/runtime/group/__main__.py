"""`python -m moesaic.runtime.group`: a rank of a tensor-parallel group but the first, which starts it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from moesaic.collectives.one_shot import OneShotGroup
from moesaic.config import WorkerConfig
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.runtime import out_of_memory
from moesaic.runtime.group.build_rank import follower
from moesaic.runtime.group.launcher import ALIVE, ALIVE_SECONDS, READY_SECONDS
from moesaic.transport.gathering import gather


def main() -> int:
    """Follow the first rank until it is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="moesaic.runtime.group", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--socket", required=True, help="where the group meets")
    parser.add_argument("--config", required=True, help="settings as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine decides when its workers end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    secret = bytes.fromhex(sys.stdin.readline())
    threading.Thread(target=_end_with_the_first, args=(Path(arguments.socket),), daemon=True).start()
    threading.Thread(target=_live, daemon=True).start()
    config = WorkerConfig.from_json(arguments.config)
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    try:
        peers = gather(
            arguments.socket,
            secret,
            arguments.rank,
            config.parallel.tensor_parallel_size,
            seconds=READY_SECONDS,
        )
        follower(config, OneShotGroup(peers)).follow()
    except ConnectionLost:
        return 0
    except MoesaicError as error:
        return _end(str(error))
    except torch.OutOfMemoryError as error:
        return _end(out_of_memory.of_step(error))
    return 0


def _end(why: str) -> int:
    """The first rank is told, whose user sees it. Returns the exit code."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), why.encode() + b"\n")
    return 2


def _live() -> None:
    """Signs of life from a thread of its own: a step may take long."""
    with contextlib.suppress(BrokenPipeError):  # the other thread ends this process
        while True:
            os.write(sys.stdout.fileno(), ALIVE)
            time.sleep(ALIVE_SECONDS)


def _end_with_the_first(meeting: Path) -> None:
    """meeting: the socket, alone in its folder; still there where the first one ended before all had met."""
    sys.stdin.read()
    with contextlib.suppress(OSError):
        meeting.unlink(missing_ok=True)
        meeting.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
