"""What the router keeps of each worker's load is what its requests come to, counted one by one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from moesaic.cluster.requests import Entry
from moesaic.cluster.router import Router
from moesaic.core import messages
from moesaic.core.request import FinishReason, Request, SamplingParams
from moesaic.policy.placement.dispatch import WorkerLoad
from tests.cluster.test_router_requests import joined, token


def asked(request_id: int, prompt: int) -> messages.Submit:
    params = SamplingParams(max_tokens=99)
    return messages.Submit([Request(request_id, [1] * prompt, params, (), 0.0)])


def counted(router: Router) -> dict[int, WorkerLoad]:
    """The slow and obvious way: over all requests."""
    found = {}
    for number, worker in router._workers.items():
        mine = [entry for entry in router._entries.values() if entry.worker == number]
        rows = [len(entry.request.prompt_token_ids) + len(entry.tokens) for entry in mine]
        blocks = sum(-(-count // worker.info.block_size) for count in rows)
        if not worker.is_draining:
            found[number] = WorkerLoad(worker.info.num_blocks, blocks, len(mine))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_kept_through_everything(seed: int) -> None:
    rng, router, alive, last = Random(seed), Router(), set[int](), 0
    seen: set[str] = set()
    for number in range(600):
        open_ones = sorted(router._entries)
        what = rng.choice(["submit", "submit", "token", "token", "token", "end", "cancel", "worker", "drain"])
        match what:
            case "submit":
                router.send(asked(number, rng.randrange(1, 60)))
            case "token" | "end" if open_ones:
                request = rng.choice(open_ones)
                worker = router._entries[request].worker
                if worker is not None:
                    router.take(worker, token(request, 7, FinishReason.STOP if what == "end" else None))
            case "cancel":
                router.send(messages.Cancel([number + 5, *open_ones[:1]]))
            case "worker" if rng.random() < 0.5 or not alive:
                alive.add(last)
                joined(router, last)
                last += 1
            case "worker":
                router.leave(alive.pop())
            case "drain" if alive and rng.random() < 0.1:
                router.drain(min(alive))
        seen.add(what)
        assert router.loads() == counted(router)
        for worker in alive:
            mine = [entry for entry in router._entries.values() if entry.worker == worker]
            assert router.is_drained(worker) == (not mine)
    assert len(seen) == 6 and router.moved_requests > 0


class Unread(dict[int, Entry]):
    """Requests by their number; nobody walks over all of them."""

    def refuse(self, *arguments: Any) -> Any:
        raise AssertionError("all requests were looked at")

    values = items = keys = __iter__ = refuse


def test_a_request_is_placed_and_told_of_without_a_look_at_the_others() -> None:
    router = Router()
    joined(router, 0)
    joined(router, 1)
    router._entries = Unread()
    for number in range(20):
        router.send(asked(number, 3))
        router.take(0, token(number, 1))
    router.send(messages.Cancel([3, 4]))
    assert not router.is_drained(0)
    assert sum(load.requests for load in router.loads().values()) == 18
