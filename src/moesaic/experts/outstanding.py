"""What a client of expert servers keeps while their answers are out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moesaic.core.experts import ServerEntry
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.client import Ticket
from moesaic.transport.calls import Call, Caller


@dataclass(eq=False)
class Submission:
    """Rows whose experts were asked."""

    ticket: Ticket
    layer: int
    hidden: wire.FloatRows
    """[n, h]"""
    experts: IntArray
    """[n * k] the expert of each pair."""
    top_k: int
    memory: wire.FloatRows | None
    """Of the answer and whatever it was large enough for before; None: it belongs to who asked."""
    out: wire.FloatRows
    """[n * k, h] in it"""
    missing: int
    """Pairs that are not there yet, and empty calls that were not answered."""
    unsent: list[IntArray] = field(default_factory=list)
    """Pairs that nobody could take."""
    attempt: int = 0
    released: bool = False
    """Nobody waits for it any more."""


@dataclass(frozen=True)
class Sent:
    """A call under way: which pairs of which submission it asks for."""

    submission: Submission
    pairs: IntArray
    call: Call
    arrived: npt.NDArray[np.bool_]
    """[p] whether each is there."""
    version: int
    """Of the directory that it was routed by."""


@dataclass
class End:
    """A connection to a server and the calls on it."""

    entry: ServerEntry
    caller: Caller
    calls: dict[int, Sent] = field(default_factory=dict)

    @property
    def outstanding(self) -> int:
        return sum(len(sent.pairs) - int(sent.arrived.sum()) for sent in self.calls.values())


class Memory:
    """Keeps the memory of answers for later ones: the system pages fresh memory in anew."""

    def __init__(self) -> None:
        self._free: list[wire.FloatRows] = []

    def take(
        self, rows: int, width: int, wanted: wire.FloatRows | None = None
    ) -> tuple[wire.FloatRows | None, wire.FloatRows]:
        """Memory to be given back one day, and [rows, width] in it. wanted: that, which the asker keeps."""
        if wanted is not None:
            return None, wanted
        numbers = rows * width
        fitting = next((memory for memory in self._free if len(memory) >= numbers), None)
        if fitting is None:
            self._free.clear()
            fitting = np.empty(numbers, dtype=np.float32)
        else:
            self._free = [memory for memory in self._free if memory is not fitting]
        return fitting, fitting[:numbers].reshape(rows, width)

    def give_back(self, memory: wire.FloatRows | None) -> None:
        """Nobody looks at it any more."""
        if memory is not None:
            self._free.append(memory)
