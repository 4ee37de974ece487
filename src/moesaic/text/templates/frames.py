"""The messages between this process and a renderer: a kind, a length and a body.

A request's body is JSON: {"most": characters, "variables": {...}}. All other bodies are text.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct(">cQ")
"""Kind, and length of the body in bytes."""

STARTED = b"s"
"""From a renderer: it has imported Jinja and waits for the template."""
SOURCE = b"c"
"""To a renderer: compile this template."""
RENDER = b"r"
"""To a renderer: render the template with these variables."""
DONE = b"d"
"""From a renderer: the rendered text, or nothing after a template was compiled."""
REFUSED = b"x"
"""From a renderer: one line on the error that the template or Jinja raised."""
TOO_LONG = b"l"
"""From a renderer: the text became too long."""
NO_MEMORY = b"m"
"""From a renderer: the limit of memory was reached."""

CODING = ("utf-8", "surrogatepass")
"""Coding and error handler of texts. A message may contain lone surrogates, which the tokenizer refuses."""


def pack(kind: bytes, body: bytes = b"") -> bytes:
    """One message as bytes."""
    return HEADER.pack(kind, len(body)) + body
