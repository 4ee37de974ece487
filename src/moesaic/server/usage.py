"""Counts the tokens of one call."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.request import RequestOutput
from moesaic.server.responses import CompletionTokensDetails, PromptTokensDetails, Usage


class Tally:
    """Counts the tokens of a call. prompt_lengths: tokens of each prompt."""

    def __init__(self, prompt_lengths: Sequence[int]) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._cached_tokens = [0] * len(prompt_lengths)
        self._completion_tokens = 0
        self.reasoning_tokens: int | None = None
        """Generated tokens of reasoning; None if it is not told apart."""

    def add(self, number: int, output: RequestOutput) -> None:
        """Count one output of prompt `number`."""
        self._completion_tokens += len(output.token_ids)
        # The n completions of a prompt share its cached tokens, so they count once.
        self._cached_tokens[number] = max(self._cached_tokens[number], output.num_cached_tokens)

    def usage(self) -> Usage:
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens)),
        )
        if self.reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens)
        return usage
