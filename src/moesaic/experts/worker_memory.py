"""The memory of a worker in which servers find the rows of requests and leave their answers."""

from __future__ import annotations

from typing import Protocol

from moesaic.experts.client import ExpertRequest, RequestArrays, RowPlace
from moesaic.experts.outstanding import AnswerMemory, HostAnswers
from moesaic.kernels.table import Put
from moesaic.transport.calls import Caller


class WorkerMemory(Protocol):
    """The memory of one worker. But for `wrap_caller`, the worker's thread uses it."""

    is_frozen: bool
    """Whether nothing is freed now."""

    @property
    def answers(self) -> AnswerMemory:
        """Puts answers together."""
        ...

    def wrap_caller(self, caller: Caller) -> Caller:
        """The connection to a server, with memory for its answers. Any thread may call it."""
        ...

    def arrays(self, request: ExpertRequest) -> RequestArrays:
        """The request with its rows where servers get them."""
        ...

    def give_back(self, place: RowPlace) -> None:
        """No server needs the rows at this place any more."""
        ...

    def poll(self) -> None:
        """Free the memory of connections that are gone."""
        ...

    def close(self) -> None:
        """Free all memory that no server uses. All connections are closed."""
        ...


class HostWorkerMemory:
    """A WorkerMemory whose rows travel in the requests. They are in memory of this host."""

    is_frozen = False

    def __init__(self, put: Put) -> None:
        """put: copies rows of answers."""
        self.answers: AnswerMemory = HostAnswers(put)

    def wrap_caller(self, caller: Caller) -> Caller:
        """The connection itself, which has its memory."""
        return caller

    def arrays(self, request: ExpertRequest) -> RequestArrays:
        """The arrays of the request, which are in memory of this host."""
        return request.arrays

    def give_back(self, place: RowPlace) -> None:
        """No rows have a place."""

    def poll(self) -> None:
        """The memory of a connection ends with it."""

    def close(self) -> None:
        """There is nothing to free."""
