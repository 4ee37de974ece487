"""A worker of this thread that asks an expert server of another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from moesaic.config import WorkerConfig
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.request import FinishReason, Request, SamplingParams
from moesaic.experts.server import ExpertServer
from moesaic.experts.torch_backend import TorchBackend
from moesaic.policy.scheduling.microqueue import MostTokensFirst
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, ExpertServerScheduler
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.worker import Worker
from moesaic.transport.listening import Listener
from moesaic.transport.local import local_pair
from moesaic.transport.wakeup import Wakeup

PATIENCE = 240.0
"""Seconds after which a worker counts as hanging, also on a busy machine."""
SECRET = b"a secret of the tests"
Follow = Callable[[Sequence[object], Callable[[messages.Serving], object]], bool]


@contextmanager
def server(path: Path, layout: ExpertLayout, folder: Path) -> Iterator[Directory]:
    """A thread with all experts, on the CPU, and who is to be asked."""
    arithmetic = TorchBackend(path, layout, "cpu", "reference", 1)
    held = {layer: list(range(layout.num_experts)) for layer in layout.layers}
    arithmetic.load(held)
    address = f"unix:{folder}/server"
    service = ExpertServerScheduler(layout.layers, MostTokensFirst(), EnoughPairs())
    listener = Listener(address, SECRET)
    serving = ExpertServer(layout, arithmetic, listener, service, time.monotonic)
    stopped = threading.Event()

    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not stopped.is_set():
                serving.turn(0.01)
        except BaseException as error:
            failed.append(error)
            serving.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Directory(1, [ServerEntry(0, 1, Endpoint(address))], {0: held})
    finally:
        stopped.set()
        thread.join()
        serving.close()
        if failed:
            raise failed[0]


def generated(
    config: WorkerConfig,
    directory: Directory,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    looked_at: Callable[[Worker], None] = lambda _: None,
    follow: Follow = lambda said, send: True,
    after: Callable[[int], None] = lambda _: None,
    faults: bool = False,
) -> dict[int, list[int]]:
    """Tokens of a worker that asks servers. looked_at: gets the worker at the end, before it closes.

    follow: gets, after each turn of the worker, its messages and how to send it some. It returns whether the
    worker may end. after: called after each turn, with the number of all tokens so far. faults: whether the
    worker may give up a server for its answers.
    AssertionError where it does so otherwise, since no other takes its place, where a request ends early, and
    after PATIENCE.
    """
    ours, theirs = local_pair()
    worker, _ = build_worker(WorkerContext(config, theirs, time.monotonic, wakeup=Wakeup()))
    requests = [Request(number, prompt, params) for number, prompt in enumerate(prompts)]
    ours.send(messages.Serving(directory, SECRET))
    ours.send(messages.Submit(requests))
    found: dict[int, list[int]] = {request.request_id: [] for request in requests}
    with closing(worker._servers):  # type: ignore[type-var]
        ended, late = False, time.monotonic() + PATIENCE
        while not ended or any(len(tokens) < params.max_tokens for tokens in found.values()):
            worker.turn(1.0)
            assert time.monotonic() < late, f"{found} after {PATIENCE} s"
            said = []
            while (message := ours.receive(0.0)) is not None:
                assert faults or not isinstance(message, messages.FaultyServer), message
                said.append(message)
                if isinstance(message, messages.Tokens):
                    told = zip(message.request_ids, message.token_ids, message.finish, strict=True)
                    for number, token, finish in told:
                        found[number].append(token)
                        assert finish in (None, FinishReason.LENGTH), finish
            after(sum(map(len, found.values())))
            ended = follow(said, ours.send)
        looked_at(worker)
    return found
