"""`python -m tests.support.gpu_server_process`: an expert server on the device of `gpu_sanitizer`.

It shares memory with other processes by files (`gpu_shared_memory`). `servers` starts some of them for a
worker of the calling process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moesaic.cluster import local
from moesaic.cluster.local import ChildProcess
from moesaic.config import ExpertServerConfig
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.experts import __main__ as experts
from tests.support.gpu_process import take_device
from tests.support.gpu_shared_memory import shared_memory

NAME = "tests.support.gpu_server_process"
SECRET = b"a secret of the tests"
LOADING = 60.0
"""Seconds after which a server counts as one that hangs."""


def started(config: ExpertServerConfig) -> ChildProcess:
    """In place of `cluster.local.spawn_server`."""
    return local._spawn(NAME, config.to_json(), "expert server")


class Servers:
    """Processes with experts, and who is to be asked."""

    def __init__(self, children: Sequence[ChildProcess], directory: Directory) -> None:
        self.children, self.directory = children, directory


@contextmanager
def servers(
    path: Path, layout: ExpertLayout, held: Sequence[Mapping[int, Sequence[int]]], schedule: str = "lockstep"
) -> Iterator[Servers]:
    """held: layer -> experts of each server."""
    with ExitStack() as ending:
        children = []
        for experts_of in held:
            config = ExpertServerConfig(
                str(path), layout, "unix:@", kernels="reference", device="cuda", transport="cuda_ipc",
                schedule=schedule,  # type: ignore[arg-type]
            )  # fmt: skip
            child = started(config)
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
        if isinstance(message, messages.Holds):
            return message.endpoint
        assert message is None or isinstance(message, messages.ServerReport), message


def main() -> int:
    take_device()
    with shared_memory():
        return experts.main()


if __name__ == "__main__":
    raise SystemExit(main())
