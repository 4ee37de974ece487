"""Logit bias, penalties, min_tokens and bans of a whole batch, in vLLM's order.

A request changes the logits of few tokens: those that it names, and those that it has seen. Flat arrays have
these (row, token) pairs of all requests, so one gather and one scatter change all of them. Each pair is
computed by itself, so the logits of a row do not depend on the other rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from moesaic.core.request import Request, SamplingParams
from moesaic.core.tokens import IntArray
from moesaic.kernels.moving import move_array
from moesaic.runtime.sampling.bans import WordBans, forbid

Pairs = tuple[torch.Tensor, torch.Tensor]
"""Rows [m] and tokens [m] of m logits. No pair occurs twice."""


class TokenCounts:
    """The distinct tokens that a request has seen, and how often it generated each.

    >>> counts = TokenCounts(seen_tokens=[7, 8], generated_tokens=[8, 9])
    >>> counts.append(9)
    >>> counts.tokens.tolist(), counts.frequencies.tolist()
    ([7, 8, 9], [0, 1, 2])
    """

    def __init__(self, seen_tokens: Iterable[int], generated_tokens: Iterable[int]) -> None:
        self._index: dict[int, int] = {}
        self._tokens, self._frequencies = array("q"), array("q")
        for token in seen_tokens:
            self._index_of(token)
        for token in generated_tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Record one more generated token."""
        self._frequencies[self._index_of(token)] += 1

    def _index_of(self, token: int) -> int:
        index = self._index.setdefault(token, len(self._tokens))
        if index == len(self._tokens):
            self._tokens.append(token)
            self._frequencies.append(0)
        return index

    @property
    def tokens(self) -> IntArray:
        return np.array(self._tokens, dtype=np.int64)

    @property
    def frequencies(self) -> IntArray:
        return np.array(self._frequencies, dtype=np.int64)


class Adjustment:
    """How one request changes its logits."""

    def __init__(self, request: Request, generated_tokens: list[int]) -> None:
        params = request.params
        self.params = params
        self.biased_tokens = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = list(params.logit_bias.values())
        self.counts: TokenCounts | None = None
        """The tokens of a request with penalties. They include the prompt if it has a repetition penalty."""
        if params.penalised:
            seen_tokens = request.prompt_token_ids if params.repetition_penalty != 1.0 else []
            self.counts = TokenCounts(seen_tokens, generated_tokens)
        self.allowed_tokens: IntArray | None = None
        """The only tokens that may come, ascending. None allows all."""
        if params.allowed_token_ids is not None:
            self.allowed_tokens = np.unique(np.array(params.allowed_token_ids, dtype=np.int64))
        self._words = WordBans(params.bad_word_ids, generated_tokens) if params.bad_word_ids else None
        self._stops = np.array(sorted(request.stop_ids), dtype=np.int64)
        self._num_generated = len(generated_tokens)

    @staticmethod
    def is_needed(params: SamplingParams) -> bool:
        """Whether a request changes any logit."""
        bans = params.allowed_token_ids is not None or bool(params.bad_word_ids)
        return params.penalised or bool(params.logit_bias) or params.min_tokens > 0 or bans

    @property
    def has_bans(self) -> bool:
        """Whether allowed_token_ids or bad_words change logits."""
        return self.allowed_tokens is not None or self._words is not None

    @property
    def forbidden_tokens(self) -> IntArray:
        """Tokens that must not come next: ends of bad words, and before min_tokens ends of the answer."""
        stops = self._stops if self._num_generated < self.params.min_tokens else self._stops[:0]
        words = [] if self._words is None else self._words.next()
        return np.concatenate([stops, np.array(words, dtype=np.int64)]) if words else stops

    def append(self, token: int) -> None:
        """Record one more generated token."""
        self._num_generated += 1
        if self.counts is not None:
            self.counts.append(token)
        if self._words is not None:
            self._words.append(token)


def adjust(logits: torch.Tensor, rows: Sequence[int], adjustments: Sequence[Adjustment]) -> None:
    """Change row rows[i] of logits [p, vocab] float32 by adjustments[i], in place."""
    biased_pairs = _pairs(rows, [adjustment.biased_tokens for adjustment in adjustments], logits.device)
    bias = [value for adjustment in adjustments for value in adjustment.bias]
    logits[biased_pairs] += move_array(np.array(bias, dtype=np.float32), logits.device)
    _penalise(logits, rows, adjustments)
    no_tokens = np.array([], dtype=np.int64)
    # A request with bans may forbid all tokens, so `forbid` looks at its row alone.
    stops = [no_tokens if adjustment.has_bans else adjustment.forbidden_tokens for adjustment in adjustments]
    logits[_pairs(rows, stops, logits.device)] = -torch.inf
    for row, adjustment in zip(rows, adjustments, strict=True):
        if adjustment.has_bans:
            forbid(logits, row, adjustment.allowed_tokens, adjustment.forbidden_tokens)


def _penalise(logits: torch.Tensor, rows: Sequence[int], adjustments: Sequence[Adjustment]) -> None:
    """Apply the repetition penalty and then the frequency and presence penalties, in place."""
    penalised_rows = [
        (row, adjustment.params, adjustment.counts)
        for row, adjustment in zip(rows, adjustments, strict=True)
        if adjustment.counts is not None
    ]
    if not penalised_rows:
        return
    tokens = [counts.tokens for _, _, counts in penalised_rows]
    lengths = [len(part) for part in tokens]
    frequencies = move_array(
        np.concatenate([counts.frequencies for _, _, counts in penalised_rows], dtype=np.float32),
        logits.device,
    )

    def repeat_values(value: Callable[[SamplingParams], float]) -> torch.Tensor:
        """[m] the value of its request for each pair."""
        numbers = np.array([value(params) for _, params, _ in penalised_rows], dtype=np.float32)
        return move_array(numbers.repeat(lengths), logits.device)

    pairs = _pairs([row for row, _, _ in penalised_rows], tokens, logits.device)
    values, scale = logits[pairs], repeat_values(lambda params: params.repetition_penalty)
    values = torch.where(values > 0, values / scale, values * scale)
    frequency, presence = (
        repeat_values(lambda params: params.frequency_penalty),
        repeat_values(lambda p: p.presence_penalty),
    )
    logits[pairs] = values - (frequency * frequencies + presence * (frequencies > 0))


def _pairs(rows: Sequence[int], tokens: Sequence[IntArray], device: torch.device) -> Pairs:
    """The pairs of rows[i] with each of tokens[i]."""
    lines = np.repeat(np.array(rows, dtype=np.int64), [len(part) for part in tokens])
    return move_array(lines, device), move_array(np.concatenate(tokens), device)
