"""Tensors exchanged by torch.distributed: NCCL between GPUs, gloo between processes on a CPU.

The ranks find each other through a file in the memory of the first rank, which only processes of the same
user can open. Neither library encrypts, so all ranks have to be on one host. gloo listens on 127.0.0.1.

torch's store opens the file by its path at each use, and once more when it is freed. So every rank has a
descriptor of its own, which it closes after the store. Otherwise its number can belong to another file then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.group import Group

MEET_SECONDS = 120.0
"""Seconds that the ranks have to connect."""
C10D: Any = distributed
"""torch's stubs leave out some of what is used here."""
LONGEST_WAIT = timedelta(days=1)
"""gloo gives up an exchange after this time. A rank that is gone ends it at once."""


class _Backend(Protocol):
    """What is used of a backend of torch.distributed."""

    def alltoall_base(
        self, output: torch.Tensor, rows: torch.Tensor, receive: list[int], send: list[int], options: Any, /
    ) -> distributed.Work | None: ...

    def abort(self) -> None: ...


class TorchPeers:
    """`TensorPeers` through torch.distributed. Every rank of the group makes its own at the same time."""

    def __init__(self, backend: str, group: Group, device: torch.device) -> None:
        """backend: nccl or gloo. Raises ConnectionLost if the ranks cannot connect."""
        probe = torch.zeros(group.size, device=device)  # if this fails, the others notice it in `announce`
        self._name = backend
        self._backend: _Backend | None = None
        self._frees: list[Callable[[], None]] = []
        self._file = os.memfd_create("moesaic-ranks") if group.rank == 0 else None
        path = group.announce(f"/proc/{os.getpid()}/fd/{self._file}".encode()).decode()
        try:
            if self._file is None:
                self._file = os.open(path, os.O_RDWR)
            self._backend = _connect(backend, group, self._file)
        except (OSError, RuntimeError) as error:
            self._file = None  # stays open: the error's frames hold the store
            raise self._close_after_error(error) from None
        one_row_each = [1] * group.size
        self.exchange(probe, one_row_each, one_row_each)  # NCCL connects in its first one

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        if self._backend is None:
            raise ConnectionLost("this end of the group is closed")
        output = rows.new_empty(sum(receive), *rows.shape[1:])
        options = C10D.AllToAllOptions()
        options.asyncOp = False  # NCCL then takes the current stream, and keeps no memory for another one
        work = None
        try:
            try:
                work = self._backend.alltoall_base(output, rows, list(receive), list(send), options)
                if work is not None:
                    work.wait()
            finally:
                work = None  # it holds the store, and an error's traceback would hold it
        except RuntimeError as error:
            raise self._close_after_error(error) from None
        return output

    @property
    def capturable(self) -> bool:
        """NCCL's exchanges are launches on a stream. Those of gloo are the host's work."""
        return self._name == "nccl"

    def when_closing(self, free: Callable[[], None]) -> None:
        """NCCL ends a connection only when no graph holds one of its exchanges, even after an error."""
        self._frees.append(free)

    def close(self) -> None:
        frees, self._frees = self._frees, []
        for free in frees:
            free()
        if self._backend is not None:
            self._backend.abort()
            self._backend = None  # frees the store
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _close_after_error(self, error: Exception) -> ConnectionLost:
        if not (self.capturable and torch.cuda.is_current_stream_capturing()):
            self.close()  # else whoever records a graph closes once that is given up
        return ConnectionLost(f"an exchange of rows through {self._name} failed: {_sentence(error)}")


def _connect(backend: str, group: Group, file: int) -> _Backend:
    """The backend, which alone holds the store. file: this rank's descriptor."""
    store = C10D.FileStore(f"/proc/self/fd/{file}", group.size)
    store.set_timeout(timedelta(seconds=MEET_SECONDS))
    return (_nccl if backend == "nccl" else _gloo)(store, group)


def _nccl(store: Any, group: Group) -> _Backend:
    nccl = C10D.ProcessGroupNCCL
    backend: _Backend = nccl(store, group.rank, group.size, nccl.Options())
    return backend


def _gloo(store: Any, group: Group) -> _Backend:
    gloo = C10D.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], LONGEST_WAIT
    backend: _Backend = gloo(store, group.rank, group.size, options)
    return backend


def _sentence(error: Exception) -> str:
    """The first sentence of an error of torch, without the place in its source."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
