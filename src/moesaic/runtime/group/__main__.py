"""`python -m moesaic.runtime.group`: one rank of a tensor-parallel group, started by the first of its host.

The first line of the standard input is the place where the ranks meet (`meeting.RankPlace`), as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.runtime import out_of_memory
from moesaic.runtime.group.build_rank import build_follower
from moesaic.runtime.group.launcher import ALIVE, ALIVE_SECONDS
from moesaic.runtime.group.meeting import RankPlace, meet
from moesaic.runtime.prefix_cache.build import build_own_part
from moesaic.trace import logs


def main() -> int:
    """Compute the steps of the first rank until it is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="moesaic.runtime.group", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--config", required=True, help="settings as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine decides when its workers end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.reserve_stdout()
    line = sys.stdin.readline()
    if not line:
        return 0  # the first rank has ended
    place = RankPlace.from_line(line)
    last_acts: list[Callable[[], None]] = []
    threading.Thread(target=_end_with_first_rank, args=(last_acts,), daemon=True).start()
    threading.Thread(target=_send_alive, daemon=True).start()
    config = WorkerConfig.from_json(arguments.config)
    logs.set_up(f"rank {arguments.rank} of an attention worker", config.log_level)
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    try:
        group = meet(place, lambda meeting: None)
        follower = build_follower(config, group)
        prefixes = build_own_part(config, follower.memory, group.rank)
        if prefixes is not None:
            last_acts.append(prefixes.flush)
        follower.follow(prefixes)
    except ConnectionLost:
        return 0
    except MoesaicError as error:
        return _end(str(error))
    except torch.OutOfMemoryError as error:
        return _end(out_of_memory.describe_step_error(error))
    return 0


def _end(reason: str) -> int:
    """Tell the first rank, which shows the reason to the user. Returns the exit code."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), reason.encode() + b"\n")
    return 2


def _send_alive() -> None:
    """Write signs of life, from a thread of its own since a step may take long."""
    with contextlib.suppress(BrokenPipeError):  # the other thread ends this process
        while True:
            os.write(sys.stdout.fileno(), ALIVE)
            time.sleep(ALIVE_SECONDS)


def _end_with_first_rank(last_acts: list[Callable[[], None]]) -> None:
    """End this process when its standard input ends. last_acts: what is to be done before."""
    sys.stdin.read()
    for act in last_acts:
        act()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
