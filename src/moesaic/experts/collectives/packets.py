"""The packets of an all-to-all-v: the rows for one rank, and what that rank needs to know about them.

    rows, width of the metadata, width of a row     3 int64
    row numbers at the sender                       int32 [m]
    logical experts, and their gate weights         int32 [m, k], float32 [m, k]
    activations, from the next multiple of 64       float32 [m, h]

A row is sent to a rank once, however many of its experts are there (Speculative MoE, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

NO_EXPERT = -1
"""Stands for an expert that is not at the receiver."""
_HEADER, _ALIGN = 24, 64


@dataclass(frozen=True)
class Outgoing:
    """Some rows of a batch for one rank. They are copied directly into the transport's memory."""

    hidden: FloatArray
    """[n, h] the whole batch."""
    rows: IntArray
    """[m] the rows that are sent."""
    experts: Int32Array
    """[m, k] logical ids; NO_EXPERT for experts that are elsewhere."""
    weights: FloatArray
    """[m, k] weights of the gate."""


@dataclass(frozen=True)
class Packet:
    """Rows that arrived from one rank."""

    hidden: FloatArray
    """[m, h]"""
    rows: Int32Array
    """[m] row numbers in the sender's batch."""
    experts: Int32Array
    """[m, k]"""
    weights: FloatArray
    """[m, k]"""

    @property
    def pairs(self) -> tuple[IntArray, Int32Array]:
        """[p] row of `hidden` and [p] expert of each (row, expert) pair that is here, row by row."""
        row, slot = np.nonzero(self.experts != NO_EXPERT)
        return row, self.experts[row, slot]


def local_packet(outgoing: Outgoing) -> Packet:
    """The packet that a rank sends to itself."""
    rows = outgoing.rows
    return Packet(outgoing.hidden[rows], rows.astype(np.int32), outgoing.experts, outgoing.weights)


def metadata_bytes(rows: int, top_k: int) -> int:
    """Bytes of a packet without the activations."""
    return -(-(_HEADER + 4 * rows + 8 * rows * top_k) // _ALIGN) * _ALIGN


def packet_bytes(outgoing: Outgoing) -> int:
    """Bytes of the whole packet."""
    rows, top_k = outgoing.experts.shape
    activations: int = 4 * rows * outgoing.hidden.shape[1]
    return metadata_bytes(rows, top_k) + activations


def write_packet(outgoing: Outgoing, memory: memoryview) -> None:
    """Writes the packet. `memory` has `packet_bytes` bytes."""
    rows, top_k = outgoing.experts.shape
    width = outgoing.hidden.shape[1]
    np.frombuffer(memory, np.int64, 3)[:] = rows, top_k, width
    parts = _parts(memory, rows, top_k, width)
    parts.rows[:] = outgoing.rows
    parts.experts[:] = outgoing.experts
    parts.weights[:] = outgoing.weights
    # With mode="raise" numpy would fill a buffer first. The indices are known to be in range.
    np.take(outgoing.hidden, outgoing.rows, axis=0, out=parts.hidden, mode="clip")


def read_packet(message: memoryview) -> Packet:
    """Returns views of a received packet. Raises ConnectionLost if it is not a packet."""
    if len(message) < _HEADER:
        raise ConnectionLost(f"a rank sent {len(message)} bytes, which is no packet")
    rows, top_k, width = np.frombuffer(message, np.int64, 3).tolist()
    # Two negative numbers could multiply to the right size.
    fits = min(rows, top_k, width) >= 0
    if not fits or len(message) != metadata_bytes(rows, top_k) + 4 * rows * width:
        raise ConnectionLost(f"a rank sent {len(message)} bytes for {rows} rows of {width} numbers")
    return _parts(message, rows, top_k, width)


def _parts(memory: memoryview, rows: int, top_k: int, width: int) -> Packet:
    pairs, offset = rows * top_k, _HEADER
    numbers = np.frombuffer(memory, np.int32, rows, offset)
    experts = np.frombuffer(memory, np.int32, pairs, offset + 4 * rows).reshape(rows, top_k)
    weights = np.frombuffer(memory, np.float32, pairs, offset + 4 * rows + 4 * pairs).reshape(rows, top_k)
    start = metadata_bytes(rows, top_k)
    hidden = np.frombuffer(memory[start:], np.float32, rows * width).reshape(rows, width)
    return Packet(hidden, numbers, experts, weights)
