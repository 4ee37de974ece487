"""Decodes token ids into text while they are generated.

Question: Which special tokens stay in an answer's text?
Question: How are an answer's tokens turned into text while they stream?
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moesaic.text.tokenizer import REPLACEMENT, Tokenizer


class IncrementalDecoder:
    """Decodes a growing list of token ids into pieces of text. It never splits a character.

    A token's text depends on its neighbours: it may lose a leading space, or be a part of a character. So
    each push decodes a short window of tokens again, and returns only text that further tokens cannot change.
    The window begins with tokens whose text was returned earlier. At first these are the last tokens of
    `prompt_token_ids`, the prompt that the answer continues.
    kept_special_tokens: special tokens, as texts, that are part of the text even where others are skipped.
    """

    _LONGEST = 32
    """Maximum number of new tokens in the window. A longer window holds bytes that are not text.

    Its text is returned as it is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        kept_special_tokens: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped_ids: frozenset[int] = frozenset()
        """The tokens that are skipped, where others of the special ones are kept."""
        if self._skip and any(text in kept_special_tokens for text in tokenizer.special_tokens):
            special = tokenizer.special_tokens.items()
            self._skipped_ids = frozenset(token for text, token in special if text not in kept_special_tokens)
            self._skip = False
        self._window = self._end_of(prompt_token_ids)
        text = self._decode(self._window)
        self._num_returned = len(text.rstrip(REPLACEMENT))
        """Number of characters of the window's text that were returned already."""
        self._old_tokens = len(self._window) if self._num_returned == len(text) else 0
        """Number of tokens at the start of the window whose text an earlier push returned completely."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the new text that further tokens cannot change."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        # An unfinished character decodes to U+FFFD. Some decoders also replace all bytes before it.
        certain = len(text.rstrip(REPLACEMENT))
        is_final = certain == len(text)
        is_full = len(self._window) - self._old_tokens > self._LONGEST
        if is_full:
            certain, is_final = len(text), True
        piece = text[self._num_returned : certain]
        self._num_returned = max(self._num_returned, certain)
        # `full`: special tokens have no text, and the window must not grow without a limit.
        if is_final and (piece or is_full):
            self._window = self._window[self._old_tokens :]
            self._old_tokens = len(self._window)
            self._num_returned = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """The remaining text. An incomplete character becomes U+FFFD."""
        text = self._decode(self._window)
        piece = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        shown_ids = (
            [token for token in tokens if token not in self._skipped_ids] if self._skipped_ids else tokens
        )
        return self._tokenizer.decode(shown_ids, self._skip)

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """The last token that has a text of its own, and all tokens after it."""
        for start in range(len(tokens) - 1, max(len(tokens) - 1 - self._LONGEST, -1), -1):
            text = self._decode([tokens[start]])
            if text and REPLACEMENT not in text:
                return list(tokens[start:])
        return []
