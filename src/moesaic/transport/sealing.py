"""Encrypted records: the bytes of a TCP connection after its handshake.

A record carries 1 to RECORD bytes and consists of two AES-256-GCM messages, each with a tag of 16 bytes:

    20 bytes        n: 4 bytes, little-endian
    n + 16 bytes    the n bytes

The length has a tag of its own, so a changed length is found at once. Otherwise an end could wait for bytes
that never come. The messages of each direction are numbered from 0. The number is the nonce and is not sent.
So a message opens only unchanged and in its place. A changed, repeated, missing or moved one raises
DamagedMessage.

The keys of a direction come from HKDF-SHA256 over the secret, both random numbers of the handshake, a label
of the direction, and the terms. A direction takes a new key after every KEY_MESSAGES messages. With 32 GiB a
key, an attacker's chance to break one stays below 2^-60.

No key is used with a nonce twice:

- The random numbers are new in each handshake, so a connection that is made again has other keys.
- The directions have different labels, so the ends of a connection do not share a key.
- A Sealer takes each number from a counter before it encrypts, and the counter only grows. That step is
  atomic, so it also holds if two threads seal at once. Their records would then arrive in a wrong order,
  which the other end refuses.
- A record that a socket accepts in part is kept and sent on. It is never sealed again.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from moesaic.core.errors import ConnectionLost, DamagedMessage

RECORD = 1 << 19
"""Maximum bytes that a record carries."""
TAG = 16
_LENGTH = struct.Struct("<I")
HEADER = _LENGTH.size + TAG
"""Bytes of a sealed length."""
OVERHEAD = HEADER + TAG
"""Bytes of a record in addition to those that it carries."""
KEY_MESSAGES = 1 << 17
"""Messages that are sealed with one key."""
MAX_MESSAGES = 1 << 64
"""Messages of one direction of a connection. The nonce has room for no larger number."""
KEY = 32
_NONCE = struct.Struct("<4xQ")
_NUMBER = struct.Struct("<Q")


class Keys(NamedTuple):
    """What one end of a connection seals and opens with: a secret of 32 bytes for each direction."""

    sending: bytes
    receiving: bytes

    def swap(self) -> Keys:
        """The keys of the other end."""
        return Keys(self.receiving, self.sending)


def derive_client_keys(secret: bytes, nonces: bytes, context: bytes) -> Keys:
    """The keys of the client's end.

    nonces: the random numbers of both ends. context: what else both ends have agreed on.
    """

    def derive(label: bytes) -> bytes:
        return HKDF(algorithm=SHA256(), length=KEY, salt=nonces, info=label + context).derive(secret)

    return Keys(derive(b"moesaic client to server"), derive(b"moesaic server to client"))


class _Cipher:
    """AES-GCM with the key and nonce that belong to each message of a direction, whose secret this is."""

    def __init__(self, secret: bytes, first: int) -> None:
        """first: number of the first message."""
        self._secret, self._epoch = secret, -1
        self._numbers: Iterator[int] = itertools.count(first)

    def next(self) -> tuple[AESGCM, bytes]:
        """The key and the nonce of the next message. Raises ConnectionLost after MAX_MESSAGES."""
        number = next(self._numbers)
        if number >= MAX_MESSAGES:
            raise ConnectionLost(f"the connection has carried {MAX_MESSAGES} messages, the most that it may")
        if number // KEY_MESSAGES != self._epoch:
            self._epoch = number // KEY_MESSAGES
            info = b"moesaic key" + _NUMBER.pack(self._epoch)
            self._key = AESGCM(HKDFExpand(algorithm=SHA256(), length=KEY, info=info).derive(self._secret))
        return self._key, _NONCE.pack(number)


class Sealer:
    """Makes the records of one direction, whose secret is `secret`. first: number of the first message."""

    def __init__(self, secret: bytes, first: int = 0) -> None:
        self._cipher = _Cipher(secret, first)

    def seal(self, plain: memoryview, target: memoryview) -> int:
        """Write the next record into `target`, which does not overlap `plain`. Returns the record's bytes.

        plain: [1 to RECORD] bytes. target: at least OVERHEAD bytes more. Raises ValueError for another size,
        and ConnectionLost after MAX_MESSAGES.
        """
        if not 1 <= len(plain) <= RECORD:
            raise ValueError(f"a record of {len(plain)} bytes; allowed: 1 to {RECORD}")
        size = len(plain) + OVERHEAD
        key, nonce = self._cipher.next()
        key.encrypt_into(nonce, _LENGTH.pack(len(plain)), None, target[:HEADER])
        key, nonce = self._cipher.next()
        key.encrypt_into(nonce, plain, None, target[HEADER:size])
        return size


class Opener:
    """Reads the records of one direction: `length`, then `open`. After a damaged record it reads none.

    Both raise DamagedMessage for bytes that the other end did not seal at this place, and ConnectionLost
    after MAX_MESSAGES.
    """

    def __init__(self, secret: bytes, first: int = 0) -> None:
        self._cipher = _Cipher(secret, first)
        self._records = 0
        """Records that were opened."""
        self._damage: DamagedMessage | None = None

    def length(self, header: memoryview) -> int:
        """How many bytes the next record carries. header: its first HEADER bytes."""
        plain = bytearray(_LENGTH.size)
        self._open(header, memoryview(plain))
        (count,) = _LENGTH.unpack(plain)
        if not 1 <= count <= RECORD:  # the other end knows the secret and is not moesaic
            raise self._end(f"it carries {count} bytes; allowed: 1 to {RECORD}")
        return int(count)

    def open(self, record: memoryview, target: memoryview) -> None:
        """Decrypt what the record carries. record: the record after its header.

        target: exactly as many bytes as `length` returned. They must not overlap `record`. After an error
        their contents are undefined.
        """
        self._open(record, target)
        self._records += 1

    def cut(self) -> DamagedMessage:
        """The error of a stream that ended inside a record."""
        return self._end("the stream ended inside it, so the other end died or the connection was cut")

    def _open(self, message: memoryview, target: memoryview) -> None:
        if self._damage is not None:
            raise self._damage.copy()
        key, nonce = self._cipher.next()
        try:
            key.decrypt_into(nonce, message, None, target)
        except InvalidTag:
            raise self._end("it was changed, lost, repeated or moved on the way") from None

    def _end(self, reason: str) -> DamagedMessage:
        """The error from now on."""
        self._damage = DamagedMessage(f"encrypted record {self._records + 1} is damaged: {reason}")
        return self._damage
