"""`python -m tests.support.faulty_worker`: an attention worker whose ways to the expert servers are bad."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from unittest.mock import patch

from moesaic.cluster import launcher, local
from moesaic.config import WorkerConfig
from moesaic.core.experts import ServerEntry
from moesaic.experts.connector import Connector
from moesaic.runtime.__main__ import main
from moesaic.transport.calls import Caller
from tests.support.faulty_transport import Faults, FaultyCaller

FAULTS = "FAULTS_OF_A_TEST"
"""Environment variable with the fields of Faults as JSON, and `seed`."""


@contextmanager
def faulty(faults: Faults, seed: int) -> Iterator[None]:
    """Attention workers that are started inside have `faults`, each connection by a seed of its own.

    Forked workers read them from their environment (`forked_workers`).
    """
    before = launcher.spawn_worker

    def worker(config: WorkerConfig) -> local.ChildProcess:
        if before is not local.spawn_worker:
            return before(config)
        return local.spawn_process(
            "tests.support.faulty_worker", config.to_json(), "worker process", Path(config.model.model)
        )

    root = str(Path(__file__).parent.parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    told = json.dumps(asdict(faults) | {"seed": seed})
    with (
        patch.dict(os.environ, {FAULTS: told, "PYTHONPATH": paths}),
        patch("moesaic.cluster.launcher.spawn_worker", worker),
    ):
        yield


def spoil() -> None:
    """Give every connection of this process the faults that its environment names, if it does."""
    if FAULTS not in os.environ:
        return
    told = json.loads(os.environ[FAULTS])
    seed = told.pop("seed")
    faults = Faults(**told)
    numbers = count(1_000 * seed)
    made = Connector.take_connections

    def spoiled(self: Connector) -> list[tuple[ServerEntry, Caller]]:
        return [(entry, FaultyCaller(caller, faults, next(numbers))) for entry, caller in made(self)]

    Connector.take_connections = spoiled  # type: ignore[method-assign]


if __name__ == "__main__":
    spoil()
    raise SystemExit(main())
