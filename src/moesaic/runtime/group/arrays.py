"""Arrays that leave a rank: rows that its transport sends, and a step as bytes.

The first rank announces each step to the others as

    sizes: rows, sequences, blocks of a table, wanted logits, sequences with states     5 int64
    token ids, positions [n], query starts [s + 1], context lengths [s], block tables [s, b], logit rows [m],
    states [s or 0, 4]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import STATE_FIELDS, TokenBatch
from moesaic.kernels.moving import move_array

_SIZES = 5


def to_host(rows: torch.Tensor) -> npt.NDArray[Any]:
    """Rows in the CPU's memory, once a GPU has computed them. On a CPU nothing is copied."""
    array: npt.NDArray[Any] = rows.cpu().numpy()
    return array


def to_device(rows: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Rows in the memory of `device`, without waiting for it. On a CPU nothing is copied."""
    return move_array(rows, device)


def pack(batch: TokenBatch) -> bytes:
    """The inverse of `unpack`."""
    sequences, width = batch.block_tables.shape
    sizes = (batch.num_rows, sequences, width, len(batch.logit_rows), len(batch.states))
    arrays = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens)
    parts = [*arrays, batch.block_tables.reshape(-1), batch.logit_rows, batch.states.reshape(-1)]
    return np.concatenate([np.array(sizes), *parts]).astype(np.int64).tobytes()


def unpack(message: bytes) -> TokenBatch:
    """Raises ConnectionLost for bytes that `pack` did not write."""
    if len(message) % 8 or len(message) < 8 * _SIZES:
        raise ConnectionLost(f"a step of {len(message)} bytes")
    numbers = np.frombuffer(bytearray(message), dtype=np.int64)  # torch wants writable memory
    rows, sequences, blocks, wanted, stateful = numbers[:_SIZES].tolist()
    counts = [rows, rows, sequences + 1, sequences, sequences * blocks, wanted, STATE_FIELDS * stateful]
    if min(counts) < 0 or sum(counts) != len(numbers) - _SIZES:
        raise ConnectionLost(f"a step of {len(message)} bytes claims {rows} rows of {sequences} sequences")
    arrays = np.split(numbers[_SIZES:], np.cumsum(counts[:-1]))
    ids, positions, starts, lengths, tables, logit_rows, states = arrays
    tables, states = tables.reshape(sequences, blocks), states.reshape(stateful, STATE_FIELDS)
    return TokenBatch(ids, positions, starts, lengths, tables, logit_rows, states)
