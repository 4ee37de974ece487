"""One rank in a process of its own: rows_rank.py PATH RANK SIZE BACKEND TASK [FILE]

suite: runs the scenarios of `row_scenarios` and writes what came of them to FILE. wait: after one all-reduce
says "waiting" and begins another. idle: after one all-reduce says "idle" and waits for a line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.one_shot import OneShotGroup
from moesaic.runtime.group.tensor_rows import DeviceRows
from moesaic.runtime.group.torch_peers import TorchPeers
from moesaic.transport.gathering import gather
from tests.support import row_scenarios
from tests.support.collectives_rank import SECRET, say


def main(path: str, rank: str, size: str, backend: str, task: str, *file: str) -> None:
    say("started")
    device = "cuda" if backend == "nccl" else "cpu"
    group = OneShotGroup(gather(path, SECRET, int(rank), int(size), seconds=60.0))
    rows = DeviceRows(group, TorchPeers(backend, group, torch.device(device)))
    if task == "suite":
        outcome = row_scenarios.run(rows, device)
        with Path(file[0]).open("wb") as out:
            np.savez(out, allow_pickle=False, **outcome)
        group.announce(b"")  # nobody closes before all are done
        rows.close()
        return
    rows.all_reduce(torch.ones(3, device=device))
    say("waiting" if task == "wait" else "idle")
    if task == "idle":
        sys.stdin.readline()
    try:
        rows.all_reduce(torch.ones(3, device=device))
        say("done")
    except ConnectionLost as lost:
        say(f"lost: {lost}")


if __name__ == "__main__":
    main(*sys.argv[1:])
