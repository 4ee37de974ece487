"""What of several messages becomes one event."""

from __future__ import annotations

import threading
import time

import pytest

from moesaic.core.messages import Submit
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import Request, SamplingParams
from moesaic.policy.scheduling.schedulers.actions import Action, Event, RequestsArrived
from moesaic.runtime.worker import Worker
from moesaic.transport.local import LocalConnection, local_pair

REQUESTS = 5


class Still:
    """A scheduler that does nothing, and an executor that never has to."""

    is_busy = False

    def handle(self, event: Event, now: float) -> list[Action]:
        return []

    def progress(self) -> list[Event]:
        return []

    def find_grammar(self, request: Request) -> None:
        return None

    def stats(self) -> WorkerStats:
        return WorkerStats()


def one_after_the_other(connection: LocalConnection, seconds: float) -> threading.Thread:
    def run() -> None:
        for number in range(REQUESTS):
            connection.send(Submit([Request(number, [1], SamplingParams(), (2,))]))
            time.sleep(seconds)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("linger", "together"), [(2.0, True), (0.0, False)])
def test_an_idle_worker_that_lingers_begins_with_all(linger: float, together: bool) -> None:
    ours, theirs = local_pair()
    seen: list[int] = []

    def journal(event: Event, now: float, actions: list[Action]) -> None:
        assert isinstance(event, RequestsArrived)
        seen.append(len(event.requests))

    still = Still()
    worker = Worker(ours, still, still, time.monotonic, journal, linger=linger)  # type: ignore[arg-type]
    sending = one_after_the_other(theirs, 0.1)
    while sum(seen) < REQUESTS:
        worker.turn(timeout=1.0)
    sending.join()
    assert (len(seen) == 1) == together
