"""The messages between this process and a renderer: a kind, a length and a body.

A request's body is JSON: {"most": characters, "variables": {...}}. All other bodies are text.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct(">cQ")
"""Kind, and length of the body in bytes."""

STARTED = b"s"
"""A renderer has imported Jinja and waits for the template."""
SOURCE = b"c"
"""Asks a renderer to compile this template."""
RENDER = b"r"
"""Asks a renderer to render the template with these variables."""
DONE = b"d"
"""A renderer sends the rendered text, or nothing after it has compiled a template."""
REFUSED = b"x"
"""A renderer sends a line on the error that the template or Jinja raised."""
TOO_LONG = b"l"
"""A renderer says that the text became too long."""
NO_MEMORY = b"m"
"""A renderer says that it reached the limit of memory."""

CODING = ("utf-8", "surrogatepass")
"""Coding and error handler of texts. A message may contain lone surrogates, which the tokenizer refuses."""


def pack(kind: bytes, body: bytes = b"") -> bytes:
    """The bytes of a message."""
    return HEADER.pack(kind, len(body)) + body
