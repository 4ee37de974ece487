"""`python -m tests.support.gpu_server_process`: an expert server on the device of `gpu_sanitizer`.

It shares memory with other processes by files (`gpu_shared_memory`). `servers` starts some of them for a
worker of the calling process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from moesaic.cluster import local
from moesaic.cluster.local import ChildProcess
from moesaic.config import ExpertServerConfig, HostTransport
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.experts import __main__ as experts
from moesaic.experts import process
from moesaic.experts.backend import CallPairs
from moesaic.experts.torch_backend import TorchBackend
from tests.support.gpu_nvshmem import nvshmem
from tests.support.gpu_process import take_device
from tests.support.gpu_sanitizer import in_thread
from tests.support.gpu_shared_memory import shared_memory

NAME = "tests.support.gpu_server_process"
SECRET = b"a secret of the tests"
LOADING = 60.0
"""Seconds after which a server counts as one that hangs."""


BROKEN = "BROKEN_GPU_OF_A_TEST"
"""Environment variable of a process whose answers have NaN from its fifth run on."""
GOOD_RUNS = 4


def started(config: ExpertServerConfig) -> ChildProcess:
    """In place of `cluster.local.spawn_server`."""
    return local.spawn_process(NAME, config.to_json(), "expert server", Path(config.model), config.devices)


def spoil() -> None:
    """The last number of each answer is NaN from the fifth run on."""
    run, runs = TorchBackend.run, itertools.count()

    def spoiled(self: TorchBackend, layer: int, parts: Sequence[CallPairs]) -> None:
        run(self, layer, parts)
        if next(runs) >= GOOD_RUNS:
            with torch.inference_mode():
                for part in parts:
                    part.results[:, -1] = torch.nan

    TorchBackend.run = spoiled  # type: ignore[method-assign]


class Servers:
    """Processes with experts, and who is to be asked."""

    def __init__(self, children: Sequence[ChildProcess], directory: Directory) -> None:
        self.children, self.directory = children, directory


@contextmanager
def servers(
    path: Path,
    layout: ExpertLayout,
    held: Sequence[Mapping[int, Sequence[int]]],
    broken: int | None = None,
    start: Callable[[ExpertServerConfig], ChildProcess] = started,
    transport: HostTransport = "cuda_ipc",
) -> Iterator[Servers]:
    """held: layer -> experts of each server. broken: the server whose answers have NaN after a while."""
    with ExitStack() as ending:
        children = []
        for number, experts_of in enumerate(held):
            config = ExpertServerConfig(
                str(path), layout, "unix:@", kernels="reference", device="cuda", transport=transport
            )
            with mock.patch.dict(os.environ, {BROKEN: "1"} if number == broken else {}):
                child = start(config)
            ending.callback(child.stop)
            wanted = {layer: list(ids) for layer, ids in experts_of.items()}
            child.connection.send(messages.Hold(1, wanted, SECRET))
            children.append(child)
        entries = [ServerEntry(number, 1, _loaded(child)) for number, child in enumerate(children)]
        placed = {number: {k: list(v) for k, v in one.items()} for number, one in enumerate(held)}
        yield Servers(children, Directory(1, entries, placed))


def _loaded(child: ChildProcess) -> Endpoint:
    """Where a server is reached, once it has its experts."""
    while True:
        message = child.connection.receive(LOADING)
        if isinstance(message, messages.HoldReply):
            return message.endpoint
        assert message is None or isinstance(message, messages.ServerReport), message


@contextmanager
def taken_device() -> Iterator[None]:
    """Within it this process is on the device, and so is the thread in which an expert server loads."""
    take_device()
    if BROKEN in os.environ:
        spoil()
    load = process._ExpertLoader._run

    def on_device(loader: process._ExpertLoader) -> None:
        with in_thread():
            load(loader)

    with shared_memory(), nvshmem(), mock.patch.object(process._ExpertLoader, "_run", on_device):
        yield


def main() -> int:
    """Returns the exit code."""
    with taken_device():
        return experts.main()


if __name__ == "__main__":
    raise SystemExit(main())
