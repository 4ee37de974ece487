"""Which tokens must not come next: those outside of allowed_token_ids, and the last tokens of bad words.

Question: Which tokens must a request not generate (`allowed_token_ids`, `bad_words`)?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from moesaic.core.tokens import IntArray
from moesaic.kernels.moving import move_array


class WordBans:
    """The tokens that would complete a forbidden sequence, after what was generated so far.

    >>> bans = WordBans([[7], [1, 2, 3], [2, 4]], generated_tokens=[1, 2])
    >>> bans.next()
    [7, 4, 3]
    """

    def __init__(self, sequences: Iterable[Sequence[int]], generated_tokens: Sequence[int]) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """The beginning of a sequence -> the tokens that complete it."""
        for sequence in sequences:
            self._ends.setdefault(tuple(sequence[:-1]), []).append(sequence[-1])
        self._lengths = sorted({len(beginning) for beginning in self._ends})
        longest = max(self._lengths, default=0)
        self._tail = list(generated_tokens[-longest:]) if longest else []
        self._longest = longest

    def append(self, token: int) -> None:
        """Record one more generated token."""
        if self._longest:
            self._tail = [*self._tail, token][-self._longest :]

    def next(self) -> list[int]:
        """The tokens that must not come next."""
        tokens: list[int] = []
        for length in self._lengths:
            if length <= len(self._tail):
                tokens += self._ends.get(tuple(self._tail[len(self._tail) - length :]), ())
        return tokens


def forbid(
    logits: torch.Tensor, row: int, allowed_tokens: IntArray | None, forbidden_tokens: IntArray
) -> None:
    """Set the logits of tokens that must not come next to minus infinity, in one row of [p, vocab], in place.

    allowed_tokens: the only tokens that may come, ascending, each once; None allows all. forbidden_tokens:
    tokens that must not come. They are ignored if no other token is allowed: one has to come.
    """
    if len(forbidden_tokens):
        hit = np.unique(forbidden_tokens)
        if allowed_tokens is not None:
            hit = hit[
                allowed_tokens[np.searchsorted(allowed_tokens, hit).clip(max=len(allowed_tokens) - 1)] == hit
            ]
        if len(hit) < (logits.shape[1] if allowed_tokens is None else len(allowed_tokens)):
            logits[row, move_array(forbidden_tokens, logits.device)] = -torch.inf
    if allowed_tokens is not None:
        allowed_ids = move_array(allowed_tokens, logits.device)
        allowed_logits = logits[row, allowed_ids]
        logits[row] = -torch.inf
        logits[row, allowed_ids] = allowed_logits
