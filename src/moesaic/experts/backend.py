"""What an expert server computes with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moesaic.core.tokens import FloatRows, IntArray


@dataclass(frozen=True)
class CallPairs:
    """Pairs of one call. The arrays are read and written where they lie, such as the client's memory."""

    hidden: FloatRows
    """[m, h]"""
    rows: IntArray
    """[p] row of each pair."""
    experts: IntArray
    """[p]"""
    out: FloatRows
    """[q, h]"""
    lines: IntArray
    """[p] line of `out` that each pair's answer goes to."""


class ExpertBackend(Protocol):
    """The experts of a server: weights and the kernel that reads them."""

    @property
    def name(self) -> str:
        """For people: what was picked."""
        ...

    @property
    def held(self) -> dict[int, list[int]]:
        """Layer -> the experts that are here."""
        ...

    def take(self, wanted: Mapping[int, Iterable[int]]) -> None:
        """Hold these experts too, layer -> ids."""
        ...

    def keep(self, wanted: Mapping[int, Iterable[int]]) -> None:
        """Drop every other one."""
        ...

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        """All pairs of all parts as one batch, unweighted.

        Raises KeyError for an expert that is not held; nothing is written then.
        """
        ...
