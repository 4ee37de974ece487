"""What an expert server computes with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from moesaic.experts.wire import FloatRows


class Arithmetic(Protocol):
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

    def run(self, layer: int, hidden: FloatRows, experts: np.ndarray, out: FloatRows) -> None:
        """Row i of hidden [n, h] through expert experts[i] (int64), unweighted, into out [n, h].

        Raises KeyError for an expert that is not held.
        """
        ...
