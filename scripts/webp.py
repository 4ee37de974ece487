"""Puts still WebP pictures together as one animation, without decoding them.

The container is that of https://developers.google.com/speed/webp/docs/riff_container.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ANIMATED = 0x02
"""The flag of a file with several frames, in the chunk VP8X."""
PICTURE = (b"ALPH", b"VP8 ", b"VP8L")
"""Chunks with the picture itself."""


def animation(frames: Sequence[tuple[bytes, int]], size: tuple[int, int]) -> bytes:
    """An animation that repeats for ever.

    frames: still WebP files, and milliseconds for which each is shown. size: width and height in pixels.
    """
    if not frames:
        raise ValueError("an animation needs a frame")
    canvas = b"".join((side - 1).to_bytes(3, "little") for side in size)
    parts = [_chunk(b"VP8X", bytes([ANIMATED, 0, 0, 0]) + canvas), _chunk(b"ANIM", bytes(6))]
    for still, milliseconds in frames:
        picture = b"".join(_chunk(name, data) for name, data in chunks(still) if name in PICTURE)
        place = bytes(6) + canvas + milliseconds.to_bytes(3, "little") + bytes(1)
        parts.append(_chunk(b"ANMF", place + picture))
    body = b"WEBP" + b"".join(parts)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def chunks(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The chunks of a WebP file, as (name, data). Raises ValueError if it is none."""
    if file[:4] != b"RIFF" or file[8:12] != b"WEBP":
        raise ValueError("this is no WebP file")
    at = 12
    while at < len(file):
        size = int.from_bytes(file[at + 4 : at + 8], "little")
        yield file[at : at + 4], file[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + len(data).to_bytes(4, "little") + data + bytes(len(data) % 2)
