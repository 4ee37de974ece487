"""The bytes of a tokenizer's tokens, in the library's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from moesaic.text.tokenizer import Tokenizer

LONGEST = 1024
"""Maximum number of bytes of a token that a grammar allows. The library panics at longer ones."""


@dataclass(frozen=True)
class Vocabulary:
    """What each token stands for."""

    tokens: Sequence[bytes]
    """The bytes of each token, by id. A token without bytes is never allowed."""
    special: frozenset[int]
    """Ids of tokens that no text matches."""
    encode: Callable[[str], list[int]] = lambda text: []
    """The model's own tokens for a text. Where a grammar forces a text, it is written in these."""

    def build_tokenizer(self, width: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """The vocabulary for compiling grammars.

        width: number of logits, which may be more or less than the tokens. eos_token_ids: at least one.
        """
        token_bytes = [token if len(token) <= LONGEST else b"" for token in self.tokens[:width]]
        tokens = [*token_bytes, *[b""] * (width - len(token_bytes))]
        special = sorted(number for number in self.special | set(eos_token_ids) if number < width)
        library_tokens = _Tokens(tokens, special, eos_token_ids[0], self.encode)
        return LLTokenizer(TokenizerWrapper(library_tokens), n_vocab=width, eos_token=list(eos_token_ids))


def read(path: Path) -> Vocabulary:
    """The vocabulary of the checkpoint at `path`."""
    tokenizer = Tokenizer(path, with_template=False)
    special = frozenset(tokenizer.special_tokens.values())
    return Vocabulary(tokenizer.all_bytes(), special, tokenizer.encode_inside)


class _Tokens:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special: list[int], eos_token_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id
        self._encode = encode
        texts = set(range(len(tokens))) - set(special)
        # Of several tokens with the same bytes the one with the lowest id counts, since it comes last.
        self._ids = {tokens[number]: number for number in sorted(texts, reverse=True) if tokens[number]}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text that a grammar forces.

        Some tokenizers add a space to a text's beginning. Then the longest tokens are taken, from left to
        right. A byte that no token stands for ends the list.
        """
        ids = self._encode(text.decode(errors="replace"))
        size = len(self.tokens)
        if ids and b"".join(self.tokens[token_id] for token_id in ids if token_id < size) == text:
            return ids
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids
