"""Turns the texts of `bad_words` into sequences of tokens that a request must not generate, as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.errors import RequestError
from moesaic.text.tokenizer import Tokenizer


class BadWords:
    """The token sequences of texts. It remembers the last texts, which all prompts of a call share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: tuple[str, ...] = ()
        self._sequences: tuple[tuple[int, ...], ...] = ()

    def sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """One or two sequences for each text: as it stands at the beginning of an answer and after a space.

        The second one counts only if it has another first token and as many tokens. Raises RequestError for a
        text without tokens.
        """
        if tuple(words) != self._words:
            found = [sequence for word in words for sequence in self._of(word)]
            self._words, self._sequences = tuple(words), tuple(dict.fromkeys(found))
        return self._sequences

    def _of(self, word: str) -> list[tuple[int, ...]]:
        text = word.lstrip()
        plain = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if not plain:
            raise RequestError(f"bad_words: got {word!r}; allowed: texts of at least one token", "bad_words")
        spaced = tuple(self._tokenizer.encode(" " + text, add_special_tokens=False))
        return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]


def check_some_token_is_left(
    sequences: Sequence[Sequence[int]], allowed: Sequence[int] | None, vocab_size: int
) -> None:
    """Raises RequestError if the sequences of one token forbid every allowed token."""
    banned = {sequence[0] for sequence in sequences if len(sequence) == 1}
    if banned and (banned.issuperset(allowed) if allowed is not None else len(banned) >= vocab_size):
        what = "every token" if allowed is None else "every token of allowed_token_ids"
        raise RequestError(f"bad_words: got words that forbid {what}; allowed: fewer", "bad_words")
