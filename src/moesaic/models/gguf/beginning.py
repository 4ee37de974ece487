"""Reads the beginning of a GGUF file that is somewhere else, as far as its header goes.

A header has the vocabulary in it and takes megabytes, and nothing at its beginning says how many.
"""

from __future__ import annotations

from collections.abc import Callable

from moesaic.models.gguf import header

FIRST = 1 << 20
"""Bytes of the first range."""
LARGEST = 4 << 20
"""Most bytes of a range, unless a list in the header is longer. So few bytes of weights come with it."""
MOST = 256 << 20
"""Longest header that is read. Those of models with 200,000 tokens have about 10 MB."""

Fetch = Callable[[int, int], tuple[bytes, int]]
"""Bytes [begin, end) of a file, or those that it has of them, and the bytes of the whole file."""


def read(fetch: Fetch) -> tuple[bytes, int]:
    """The header of a file and the bytes of the whole file. Ranges grow until the header is whole.

    Raises ValueError for a header that is damaged or longer than MOST, and if the file changes meanwhile.
    """
    data, size = fetch(0, FIRST)
    if not size:
        raise ValueError("not a GGUF file (it is empty)")
    while (least := header.length(data, size)) > len(data):
        if least > MOST:
            raise ValueError(f"its header has {least} bytes or more; allowed: at most {MOST}")
        end = min(max(least, len(data) + min(len(data), LARGEST)), size, MOST)
        more, now = fetch(len(data), end)
        if now != size:
            raise ValueError(f"it had {size} bytes and then {now}: it changed while its header was read")
        data += more
    return data[:least], size
