"""One rank in a process of its own: collectives_rank.py PATH RANK SIZE TASK [FILE]

suite: runs the scenarios and writes what came of them to FILE. wait: after one all-reduce says "waiting" and
begins another. idle: after one all-reduce says "idle", and begins another when a line comes in. Whoever loses
the group says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.one_shot import OneShotGroup
from moesaic.transport.gathering import gather
from tests.support import collectives_scenarios

SECRET = b"a secret of the tests"


def say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


def main(path: str, rank: str, size: str, task: str, *file: str) -> None:
    say("started")
    peers = gather(path, SECRET, int(rank), int(size), seconds=10.0)
    group = OneShotGroup(peers)
    if task == "suite":
        outcome = collectives_scenarios.run(group)
        outcome["sent"] = np.array(peers.sent_bytes)
        with Path(file[0]).open("wb") as out:
            np.savez(out, allow_pickle=False, **outcome)
        group.close()
        return
    group.all_reduce(collectives_scenarios.rows(group.rank))
    say("waiting" if task == "wait" else "idle")
    if task == "idle":
        sys.stdin.readline()
    try:
        group.all_reduce(collectives_scenarios.rows(group.rank))
        say("done")
    except ConnectionLost as lost:
        say(f"lost: {lost}")


if __name__ == "__main__":
    main(*sys.argv[1:])
