"""The worker's end of a mailbox at an expert server, and the form of it whose devices share memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from moesaic.core.errors import ConfigError, ConnectionLost, DamagedMessage
from moesaic.core.messages import JoinJob
from moesaic.experts import wire
from moesaic.gpu.exchange.mailbox import ANSWER, HEAD, REQUEST, MailboxClient, connect_mailbox
from moesaic.gpu.ipc.device_sharing import DeviceSharing, SharedMemory

_NAMES = struct.Struct("<IIII")
"""Rows, hidden size, most pairs, and bytes of the first name."""


@dataclass(frozen=True)
class RowMemory:
    """The memory of a worker that a server opens: what both know of it."""

    rows: int
    """Hidden rows, of `hidden` float32 numbers."""
    hidden: int
    pairs: int
    """Most pairs of a request, each with an answer row."""
    rows_name: bytes
    answers_name: bytes

    @property
    def request_bytes(self) -> int:
        """The bytes of the largest request."""
        return wire.size(self.rows, self.pairs, self.hidden, False, on_device=True)

    def pack(self) -> bytes:
        """What the worker sends."""
        head = _NAMES.pack(self.rows, self.hidden, self.pairs, len(self.rows_name))
        return head + self.rows_name + self.answers_name

    @classmethod
    def unpack(cls, message: bytes) -> RowMemory:
        """The inverse of `packed`. Raises DamagedMessage."""
        if len(message) < _NAMES.size:
            raise DamagedMessage("the names of a worker's memory are cut off")
        rows, hidden, pairs, length = _NAMES.unpack_from(message)
        names = message[_NAMES.size :]
        if not (0 < rows <= wire.MOST_ROWS and 0 < pairs <= wire.MOST_ROWS and length <= len(names)):
            raise DamagedMessage(f"a worker names memory of {rows} rows and {pairs} pairs")
        return cls(rows, hidden, pairs, names[:length], names[length:])


class ServerMailbox(Protocol):
    """The worker's end of what its device shares with one server. Used by the worker's thread."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """The first numbers of a column of `Exchange.addresses`."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether the server has answered everything, so that it looks at nothing until the next request."""
        ...

    def alive(self, force: bool = False) -> bool:
        """Whether the server is connected."""
        ...

    def doubts(self) -> bool:
        """Whether an answer had NaN or infinities since the last call."""
        ...

    def wake(self) -> None:
        """A graph with requests begins, or still runs: the server polls from now on."""
        ...

    def end_graph(self) -> None:
        """The graph has ended."""
        ...

    def progress(self) -> tuple[int, int]:
        """Pairs that were sent, and pairs that were answered, since the last call. A request between two
        calls may be missed, together with its answer.
        """
        ...

    def leave(self) -> None:
        """Post no more. The memory is kept until the server can no longer write into it: see `free`."""
        ...

    def free(self) -> bool:
        """Free the memory, after `leave`, if the server is done with it. Returns False if it is not yet."""
        ...

    def close(self) -> None:
        """Close a mailbox by which nothing was asked, so that its server writes nothing."""
        ...


class Progress:
    """What a server was asked and has answered, by the words that the host sees."""

    def __init__(self, last_request: int = 0) -> None:
        """last_request: number of the last request before, which others have counted."""
        self._pending_pairs = 0
        """Pairs of the last request that was seen, until its answer is seen."""
        self._last_request = last_request
        """Number of that request."""

    def news(self, request_number: int, answer_number: int, request: memoryview) -> tuple[int, int]:
        """Returns the pairs sent and answered, from the numbers of the last request and answer."""
        sent_pairs, answered_pairs = 0, 0
        if request_number != self._last_request:
            answered_pairs, self._pending_pairs = self._pending_pairs, 0
            self._last_request, sent_pairs = request_number, wire.read_counts(request)[1]
            self._pending_pairs = sent_pairs
        if self._pending_pairs and answer_number == self._last_request:
            answered_pairs, self._pending_pairs = answered_pairs + self._pending_pairs, 0
        return sent_pairs, answered_pairs


class IpcMailbox:
    """A ServerMailbox by CUDA IPC. The segment and the answer rows belong to it."""

    def __init__(
        self,
        mailbox: MailboxClient,
        segment: SharedMemory,
        answers: SharedMemory,
        spare: Callable[[SharedMemory], None],
    ) -> None:
        """segment: as the device sees it. spare: takes answer rows into which no server will write."""
        self._mailbox, self._segment, self._answers = mailbox, segment, answers
        self._spare, self._progress = spare, Progress()

    @property
    def addresses(self) -> tuple[int, ...]:
        words = self._segment.tensor.data_ptr()
        return words + HEAD, words + 8 * REQUEST, words + 8 * ANSWER, self._answers.tensor.data_ptr()

    @property
    def is_quiet(self) -> bool:
        return self._mailbox.request_number == self._mailbox.answer_number

    def alive(self, force: bool = False) -> bool:
        return self._mailbox.look(force)

    def doubts(self) -> bool:
        return self._mailbox.doubts()

    def wake(self) -> None:
        self._mailbox.wake()

    def end_graph(self) -> None:
        self._mailbox.clear_awake()

    def progress(self) -> tuple[int, int]:
        return self._progress.news(
            self._mailbox.request_number, self._mailbox.answer_number, self._mailbox.request
        )

    def leave(self) -> None:
        self._mailbox.leave()

    def free(self) -> bool:
        if not self._mailbox.has_server_left:
            return False
        self._mailbox.close()
        self._segment.close()
        self._answers.close()
        return True

    def close(self) -> None:
        self._mailbox.close()
        self._segment.close()
        self._spare(self._answers)


class MailboxDialer(Protocol):
    """Makes mailboxes at servers, of one kind."""

    @property
    def rows(self) -> torch.Tensor:
        """The hidden rows that servers read, as `Exchange.rows` describes them."""
        ...

    @property
    def job_id(self) -> bytes:
        """The name of a job that this worker could found. It is empty without one."""
        ...

    def dial(self, address: str, secret: bytes) -> ServerMailbox:
        """A mailbox at the server at `address`, made by a thread of its own.

        Raises ConfigError and ConnectionLost.
        """
        ...

    def join(self, place: JoinJob) -> None:
        """Take this place in a job. Mailboxes that need none ignore it."""
        ...

    def close(self) -> None:
        """Free memory that servers have opened. None has it open any more."""
        ...


class IpcDialer:
    """A MailboxDialer by CUDA IPC."""

    job_id = b""

    def __init__(self, sharing: DeviceSharing, rows: int, pairs: int, hidden: int) -> None:
        """rows, pairs: the most of a request."""
        self._sharing, self._sizes = sharing, (rows, hidden, pairs)
        self._memory = sharing.export(4 * rows * hidden)
        self.rows = self._memory.tensor[: 4 * rows * hidden].view(torch.float32).view(rows, hidden)
        self._spare: list[SharedMemory] = []
        """Memory for answers that a server may have open, though it was never asked. So it cannot be freed,
        and the next attempt takes it."""

    def dial(self, address: str, secret: bytes) -> ServerMailbox:
        rows, hidden, pairs = self._sizes
        try:
            answers = self._spare.pop()
        except IndexError:  # other threads may have taken the last one
            answers = self._sharing.export(4 * pairs * hidden)
        try:
            names = RowMemory(rows, hidden, pairs, self._memory.name, answers.name)
            mailbox = connect_mailbox(address, secret, names.request_bytes, names.pack())
            try:
                segment = self._sharing.map_host(mailbox.memory)
                return IpcMailbox(mailbox, segment, answers, self._spare.append)
            except ConfigError:
                mailbox.close()
                raise
        except (ConfigError, ConnectionLost):
            self._spare.append(answers)
            raise

    def join(self, place: JoinJob) -> None:
        pass

    def close(self) -> None:
        self._memory.close()
