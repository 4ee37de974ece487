"""A TCP socket whose bytes travel in encrypted records (sealing.py).

It has the methods of a socket that stream.py and frames.py use, so both send and receive as over any socket.
Unix sockets are used as they are: their bytes do not leave the host.

Sending: a piece of memory of at least DIRECT bytes is encrypted from where it lies. Smaller pieces are copied
together first, so that a header and its rows are one record. Such a record carries at most SMALL bytes, also
of a large piece behind a header. The more bytes wait, the larger is a record, so system calls are few.
With few bytes, small records let one end encrypt while the other one decrypts.

Receiving: bytes are read into a buffer. A record is decrypted directly into its destination if that has room
for all of it. Otherwise it is decrypted into a second buffer and copied from there. While a large record
arrives, nothing is read beyond it but a header, since the rest would have to be moved. The memory of a
connection is bounded, whatever is sent. It is allocated when it is first written.

One thread may send while another receives.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np

from moesaic.transport.sealing import HEADER, OVERHEAD, RECORD, TAG, Keys, Opener, Sealer

SMALL = 1 << 16
"""Maximum bytes of a record that is copied together, and of each record while few bytes wait."""
SHARE = 8
"""A record of a large piece carries this part of the bytes that wait, between SMALL and RECORD."""
DIRECT = SMALL // 2
"""Bytes of a piece from which on it is encrypted without a copy."""
_EMPTY = memoryview(b"")


class SealedSocket:
    """`sock`, which belongs to it from now on. It blocks where `sock` does, and raises the same errors.

    Receiving also raises DamagedMessage for bytes that the other end did not seal.
    """

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        self._socket = sock
        self._sealer, self._opener = Sealer(keys.sending), Opener(keys.receiving)
        self._plain_buffer, self._record = _memory(SMALL), _memory(RECORD + OVERHEAD)
        self._unsent_record, self._num_plain_bytes = _EMPTY, 0
        """The rest of a record that the socket has not accepted, and the bytes of its plaintext."""
        self._buffer = _memory(RECORD + OVERHEAD + HEADER)
        self._start, self._end = 0, 0
        """Where received bytes that are not decrypted begin and end in the buffer."""
        self._record_length: int | None = None
        """Bytes that the next record carries, once its header has arrived."""
        self._decrypted_bytes, self._plain = _EMPTY, _memory(RECORD)
        """Decrypted bytes that nobody has taken, and the memory for them."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._socket.setblocking(blocking)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self._socket.setsockopt(level, option, value)

    def shutdown(self, direction: int) -> None:
        self._socket.shutdown(direction)

    def close(self) -> None:
        self._socket.close()

    def send(self, data: memoryview, flags: int = 0) -> int:
        """Send the first bytes of `data`, at most RECORD. See `sendmsg`."""
        return self._send([data], flags)

    def sendall(self, data: memoryview) -> None:
        """Send all of `data`, over a socket that blocks. The rest of a record that `send` began counts."""
        while len(data):
            data = data[self._send([data], 0) :]

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """Send the first bytes of these pieces as one record. Returns how many bytes of them are sent.

        If the socket accepts only a part of the record, this raises BlockingIOError. The next call must name
        the same bytes, and sends the rest of that record.
        """
        return self._send(pieces, 0)

    def recv_into(self, view: memoryview) -> int:
        """Fill the beginning of `view`. Returns how many bytes, 0 at the end of the stream."""
        return self.recvmsg_into([view])[0]

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        """Fill the beginning of `views`. Returns (bytes,), which is (0,) at the end of the stream.

        A record that has arrived but is not taken yet does not make the socket readable. So a caller that
        polls has to call again until this raises BlockingIOError.
        """
        if not len(self._decrypted_bytes):
            record = self._receive_record()
            if record is None:
                return (0,)
            count = len(record) - TAG
            if len(views[0]) >= count:
                self._opener.open(record, views[0][:count])
                return (count,)
            self._opener.open(record, self._plain[:count])
            self._decrypted_bytes = self._plain[:count]
        num_available = len(self._decrypted_bytes)
        for view in views:
            part = self._decrypted_bytes[: len(view)]
            view[: len(part)] = part
            self._decrypted_bytes = self._decrypted_bytes[len(part) :]
        return (num_available - len(self._decrypted_bytes),)

    # ---- sending

    def _send(self, pieces: Sequence[memoryview], flags: int) -> int:
        if not len(self._unsent_record):
            plain = self._next_plain(pieces)
            size = self._sealer.seal(plain, self._record)
            self._unsent_record, self._num_plain_bytes = self._record[:size], len(plain)
        while len(self._unsent_record):
            self._unsent_record = self._unsent_record[self._socket.send(self._unsent_record, flags) :]
        return self._num_plain_bytes

    def _next_plain(self, pieces: Sequence[memoryview]) -> memoryview:
        """[1 to RECORD] the first bytes of the pieces in one place."""
        if len(pieces) == 1 or len(pieces[0]) >= DIRECT:
            waiting = sum(map(len, pieces))
            return pieces[0][: min(RECORD, max(SMALL, waiting // SHARE))]
        num_filled = 0
        for piece in pieces:
            part = piece[: SMALL - num_filled]
            self._plain_buffer[num_filled : num_filled + len(part)] = part
            num_filled += len(part)
        return self._plain_buffer[:num_filled]

    # ---- receiving

    def _receive_record(self) -> memoryview | None:
        """The next record without its header, valid until the next call. None at the end of the stream."""
        while True:
            if self._record_length is None and self._end - self._start >= HEADER:
                self._record_length = self._opener.length(self._buffer[self._start :][:HEADER])
                self._start += HEADER
            if self._record_length is not None and self._end - self._start >= self._record_length + TAG:
                record = self._buffer[self._start :][: self._record_length + TAG]
                self._start += len(record)
                self._record_length = None
                return record
            if not self._read():
                return None

    def _read(self) -> bool:
        """Make one system call. Returns False at the end of the stream, which is between two records."""
        if self._start:
            waiting = self._buffer[self._start : self._end]
            self._buffer[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        end = len(self._buffer)
        if self._record_length is not None and self._record_length > SMALL:
            end = self._record_length + TAG + HEADER
        got = self._socket.recv_into(self._buffer[self._end : end])
        if not got and (self._end or self._record_length is not None):
            raise self._opener.cut()
        self._end += got
        return bool(got)


Wire = socket.socket | SealedSocket
"""What the frames of a connection travel through."""


def wire(sock: socket.socket, keys: Keys) -> Wire:
    """What to send through after the handshake: `sock` itself if it is a Unix socket, else a SealedSocket.

    Each end looks at its own socket, so no message can ask for a connection without encryption.
    """
    return sock if sock.family == socket.AF_UNIX else SealedSocket(sock, keys)


def _memory(count: int) -> memoryview:
    """[count] bytes whose pages are allocated when they are first written."""
    return np.empty(count, np.uint8).data
