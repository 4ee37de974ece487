"""`python -m tests.support.gpu_process serve ...`: the `moesaic` command on the device of `gpu_sanitizer`.

The process that plans, worker processes, their ranks and expert servers get the device, and graphs. The API's
process needs none. Workers and servers share memory of the device by files, and have an NVSHMEM by TCP.
So do expert servers that join from other hosts.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from moesaic.cluster import launcher, local
from moesaic.commands import cli
from moesaic.config import WorkerConfig
from moesaic.core import gpu_parts

NAME = "tests.support.gpu_process"


def _worker(config: WorkerConfig) -> local.ChildProcess:
    """In place of that of `cluster.local`."""
    model = Path(config.model.model)
    return local.spawn_process(NAME, config.to_json(), "worker process", model, config.devices)


def main() -> int:
    """Run the command line or, of a worker process, its `main`. Returns the exit code."""
    from tests.support import gpu_server_process

    if sys.argv[1] == "join":
        with gpu_server_process.taken_device():
            return cli.main()
    if "--connection-fd" not in sys.argv and "--rank" not in sys.argv:
        with (
            patch("moesaic.cluster.launch.spawn_worker", _worker),
            patch.object(launcher, "spawn_worker", _worker),
            patch.object(launcher, "spawn_server", gpu_server_process.started),
            patch.object(gpu_parts, "check_nvshmem"),
        ):
            return cli.main()
    take_device()
    if "--rank" in sys.argv:
        from moesaic.runtime.group import __main__ as group

        return group.main()
    from moesaic.runtime import __main__ as runtime
    from moesaic.runtime.group import launcher as ranks
    from tests.support.gpu_graphs import Graph
    from tests.support.gpu_nvshmem import nvshmem
    from tests.support.gpu_shared_memory import shared_memory

    Graph.beside = _config().model.cudagraph_mode == "full"  # the host has to look at servers meanwhile
    spawn = partial(ranks.spawn_rank, module=NAME)
    with shared_memory(), nvshmem(), patch.object(ranks, "spawn_rank", spawn):
        return runtime.main()


def _config() -> WorkerConfig:
    """Of this worker process."""
    return WorkerConfig.from_json(sys.argv[sys.argv.index("--config") + 1])


def take_device() -> None:
    """Give the calling thread the device until the process ends."""
    from tests.support.gpu_graphs import graphs
    from tests.support.gpu_sanitizer import sanitized

    np.seterr(all="ignore")  # the interpreter's own warnings
    for device in (sanitized(), graphs()):
        device.__enter__()
        _HELD.append(device)


_HELD: list[object] = []

if __name__ == "__mp_main__":  # the process that plans, which multiprocessing started
    take_device()
if __name__ == "__main__":
    raise SystemExit(main())
