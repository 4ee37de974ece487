"""What a rank of a group counts, beside the bytes that its transport counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GroupCounts:
    """So far; see GroupStats."""

    pairs: int = 0
    local_pairs: int = 0
    shuffled_rows: int = 0
    kept_rows: int = 0
