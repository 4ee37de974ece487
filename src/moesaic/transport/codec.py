"""Encodes messages: one byte for the type, then MessagePack. It uses no pickle, so no received code runs."""

from __future__ import annotations

import typing

import msgspec

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.messages import Message

_TYPES: tuple[type[Message], ...] = typing.get_args(messages.Message)
_CODE = {kind: bytes([index]) for index, kind in enumerate(_TYPES)}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _TYPES]


def encode(message: Message) -> bytes:
    """The payload of the frame that carries `message`."""
    return _CODE[type(message)] + _ENCODER.encode(message)


def decode(payload: bytes | memoryview) -> Message:
    """The message in a payload.

    Raises ConnectionLost when it is no valid message: the peer is not moesaic.
    """
    code = payload[0] if len(payload) else len(_TYPES)
    if code >= len(_TYPES):
        raise ConnectionLost(f"the peer sent an unknown message type {code}")
    try:
        return _DECODERS[code].decode(payload[1:])
    except (msgspec.MsgspecError, MoesaicError, ValueError) as error:
        name = _TYPES[code].__name__
        raise ConnectionLost(f"the peer sent a damaged {name} message: {error}") from error
