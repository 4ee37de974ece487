"""Arrays that leave a rank: rows that its transport sends, and a step as bytes.

The first rank announces each step to the others as

    sizes: rows, sequences, blocks of a table, wanted logits     4 int64
    token ids, positions [n], query starts [s + 1], context lengths [s], block tables [s, b], logit rows [m]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import TokenBatch

_SIZES = 4


def to_host(rows: torch.Tensor) -> npt.NDArray[Any]:
    """Rows in the CPU's memory, once a GPU has computed them. On a CPU nothing is copied."""
    array: npt.NDArray[Any] = rows.cpu().numpy()
    return array


def to_device(rows: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Rows in the memory of `device`. On a CPU nothing is copied."""
    return torch.from_numpy(rows).to(device)


def pack(batch: TokenBatch) -> bytes:
    """The inverse of `unpack`."""
    sizes = (batch.num_rows, batch.num_sequences, batch.block_tables.shape[1], len(batch.logit_rows))
    arrays = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens)
    parts = [*arrays, batch.block_tables.reshape(-1), batch.logit_rows]
    return np.concatenate([np.array(sizes), *parts]).astype(np.int64).tobytes()


def unpack(message: bytes) -> TokenBatch:
    """Raises ConnectionLost for bytes that `pack` did not write."""
    if len(message) % 8 or len(message) < 8 * _SIZES:
        raise ConnectionLost(f"a step of {len(message)} bytes")
    numbers = np.frombuffer(bytearray(message), dtype=np.int64)  # torch wants writable memory
    rows, sequences, blocks, wanted = numbers[:_SIZES].tolist()
    counts = [rows, rows, sequences + 1, sequences, sequences * blocks, wanted]
    if min(counts) < 0 or sum(counts) != len(numbers) - _SIZES:
        raise ConnectionLost(f"a step of {len(message)} bytes claims {rows} rows of {sequences} sequences")
    ids, positions, starts, lengths, tables, logit_rows = np.split(numbers[_SIZES:], np.cumsum(counts[:-1]))
    return TokenBatch(ids, positions, starts, lengths, tables.reshape(sequences, blocks), logit_rows)
