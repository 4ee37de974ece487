"""Token ids, as they come, into text."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.tokenizer import REPLACEMENT, Tokenizer


class IncrementalDecoder:
    """Turns a growing list of token ids into text pieces, never splitting a character.

    A token's text depends on its neighbours (leading spaces, bytes of one character), so a short
    window of tokens is decoded again and again, and only what further tokens cannot change is
    handed out. The window always begins with tokens whose text was handed out before, at first with the
    last ones of `before`, whose text the answer goes on with.
    """

    _LONGEST = 32
    """Tokens. A window that never settles holds bytes that are no text: hand it out as it is."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = self._end_of(before)
        text = tokenizer.decode(self._window, self._skip)
        self._given = len(text.rstrip(REPLACEMENT))
        """Characters of the window's text that were handed out."""
        self._old_tokens = len(self._window) if self._given == len(text) else 0
        """Tokens at the start of the window that were settled by an earlier push."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window, self._skip)
        # An unfinished character shows as U+FFFD, with some decoders all bytes before it too.
        certain = len(text.rstrip(REPLACEMENT))
        settled = certain == len(text)
        full = len(self._window) - self._old_tokens > self._LONGEST
        if full:
            certain, settled = len(text), True
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        if settled and (piece or full):  # a run of special tokens has no text, and must not grow for ever
            self._window = self._window[self._old_tokens :]
            self._old_tokens = len(self._window)
            self._given = len(self._tokenizer.decode(self._window, self._skip))
        return piece

    def finish(self) -> str:
        """What is left: an incomplete character comes out as U+FFFD."""
        text = self._tokenizer.decode(self._window, self._skip)
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """The last token that is text by itself, and what follows it."""
        for start in range(len(tokens) - 1, max(len(tokens) - 1 - self._LONGEST, -1), -1):
            text = self._tokenizer.decode([tokens[start]], self._skip)
            if text and REPLACEMENT not in text:
                return list(tokens[start:])
        return []
