"""`python -m grouped.rank FOLDER RANK SIZE`: one rank of a group, at the task that it finds in the folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grouped import ablation, latency
from grouped.processes import end_with_parent, leave
from moesaic.transport.gathering import gather

TASKS = {"latency": latency.on_rank, "ablation": ablation.on_rank}


def main(name: str, rank: str, size: str) -> None:
    end_with_parent()
    folder = Path(name)
    task = json.loads((folder / "task.json").read_text())
    peers = gather(str(folder / "socket"), task["secret"].encode(), int(rank), int(size))
    leave(folder, int(rank), TASKS[task["kind"]](peers, task, folder))
    peers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
