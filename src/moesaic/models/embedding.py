"""Finds similar tokens: nearest neighbours in a checkpoint's token embedding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from moesaic.core.profile import TokenArray
from moesaic.core.tokens import FloatRows
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.registry import read_spec

CHUNK = 1 << 24
"""Maximum number of products [rows, known] in memory at a time."""


def nearest_known(
    path: Path, known_tokens: TokenArray, progress: Callable[[int, int], None] | None = None
) -> TokenArray:
    """Returns [V] the nearest token of `known_tokens` [m] for each token of the checkpoint, by cosine.

    known_tokens: at least one token, ascending. Each is its own nearest. Ties go to the lowest token.
    progress: called with tokens done, and total tokens. Raises CheckpointError if the embedding cannot be
    read.
    """
    spec = read_spec(path)
    shape = spec.vocab_size, spec.hidden_size
    name, checkpoint = "model.embed_tokens.weight", Checkpoint(path)
    is_quantized = checkpoint.find_quantized(name, *shape) is not None
    dtype = torch.float32 if is_quantized else checkpoint.dtype(name)
    return nearest(checkpoint.tensor(name, *shape, dtype=dtype), known_tokens, progress)


def nearest(
    embedding: torch.Tensor, known_tokens: TokenArray, progress: Callable[[int, int], None] | None = None
) -> TokenArray:
    """Returns [V] the nearest known token of each row of an embedding [V, h].

    Example: rows (1, 0), (0, 2), (3, 1) with the first two known -> 0, 1, 0.
    """
    targets = _rows(embedding, known_tokens)
    # Only the known rows need unit length: a factor of another row does not change which is nearest to it.
    targets /= np.maximum(np.linalg.norm(targets, axis=1, keepdims=True), 1e-12)
    neighbours = np.arange(len(embedding), dtype=np.int32)
    unknown_tokens = np.setdiff1d(neighbours, known_tokens)
    step = max(1, CHUNK // len(known_tokens))
    for start in range(0, len(unknown_tokens), step):
        chunk = unknown_tokens[start : start + step]
        neighbours[chunk] = known_tokens[(_rows(embedding, chunk) @ targets.T).argmax(axis=1)]
        if progress is not None:
            progress(min(start + step, len(unknown_tokens)), len(unknown_tokens))
    return neighbours


def _rows(embedding: torch.Tensor, tokens: TokenArray) -> FloatRows:
    """Returns the embeddings [n, h] of tokens in float32."""
    rows: FloatRows = embedding[torch.from_numpy(tokens.astype(np.int64))].float().numpy()
    return rows
