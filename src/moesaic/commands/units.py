"""Formats numbers for people."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """A size in bytes as text. Example: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def in_words(count: float) -> str:
    """A large number as text. Example: 30_500_000_000 -> "30.5 billion"."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"
