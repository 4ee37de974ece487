"""Log-probabilities in OpenAI's two formats, of completions and of chats."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from moesaic.core.request import TokenLogprob
from moesaic.server.prompts import Prompt
from moesaic.server.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from moesaic.server.service import Tokenizer

LOWEST = -9999.0
"""Sent in place of minus infinity, which JSON cannot express."""


class CompletionLogprobsWriter:
    """Writes the format of completions piece by piece. It keeps the current offset in the text.

    num_top: number of candidates to show. skip_special: special tokens are not part of the text. as_ids: name
    tokens by their ids.
    echoed_prompt: the prompt, if the text begins with it; SentencePiece's decoders drop a space at its start.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_top: int,
        skip_special: bool,
        echoed_prompt: Prompt | None = None,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._num_top = num_top
        self._skip_special = skip_special
        self._at_start = echoed_prompt is not None
        self._echoed_text = None if echoed_prompt is None else echoed_prompt.text
        self._of_prompt = 0 if echoed_prompt is None else len(echoed_prompt.token_ids)
        """Number of echoed prompt tokens that are not written yet."""
        self._offset = 0
        # A character may be spread over several tokens, so bytes are decoded as they come.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """Write the next tokens. An entry is None for a token without a score: the first one of a prompt."""
        offsets = [self._advance(token) for token in token_ids]
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
            tokens=[self._name(token) for token in token_ids],
            top_logprobs=[None if entry is None else self._candidates(entry) for entry in entries],
        )

    def _advance(self, token: int) -> int:
        """The offset at which `token` begins in the text, in characters. Moves on to the token's end."""
        start, raw = self._offset, self._tokenizer.token_bytes(token)
        echoed_text = self._echoed_text if self._of_prompt else None
        self._of_prompt -= self._of_prompt > 0
        special = not self._tokenizer.decode([token], True) and raw.strip()
        if special and not self._is_shown(raw, echoed_text):
            return start
        own_text = self._tokenizer.decode([token], False).encode()
        if self._at_start and raw == b" " + own_text:
            raw = own_text
        if echoed_text is not None and raw.startswith(b" ") and not echoed_text.startswith(" ", start):
            raw = raw[1:]  # the space that SentencePiece puts before a word
        self._at_start = False
        self._offset += len(self._characters.decode(raw))
        return start

    def _is_shown(self, special: bytes, echoed_text: str | None) -> bool:
        """True if the text contains this special token.

        The echoed text is what the client sent: it has the client's special tokens, but not those that the
        tokenizer added.
        """
        if echoed_text is None:
            return not self._skip_special
        return echoed_text.startswith(special.decode(errors="replace"), self._offset)

    def _candidates(self, entry: TokenLogprob) -> dict[str, float]:
        """Name -> log-probability of the best candidates, best first, and of the chosen token."""
        candidates: dict[str, float] = {}
        for token, logprob in [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]:
            candidates.setdefault(self._name(token), _finite(logprob))
        return candidates

    def _name(self, token: int) -> str:
        """The token's text, or for a part of a character its bytes: `bytes:\\xe2\\x82`."""
        if self._as_ids:
            return name_by_id(token)
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def name_by_id(token: int) -> str:
    """The name of a token with return_tokens_as_token_ids, as in vLLM."""
    return f"token_id:{token}"


def chat_logprobs(
    entries: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer, as_ids: bool = False
) -> ChatLogprobs:
    """The log-probabilities in the format of chats. num_top: number of candidates to show. as_ids: name
    tokens by their ids."""
    content = []
    for entry in entries:
        chosen_token = _candidate(entry.token_id, entry.logprob, tokenizer, as_ids)
        top = [_candidate(token, logprob, tokenizer, as_ids) for token, logprob in entry.top[:num_top]]
        content.append(
            ChatLogprob(
                token=chosen_token.token,
                logprob=chosen_token.logprob,
                bytes=chosen_token.bytes,
                top_logprobs=top,
            )
        )
    return ChatLogprobs(content=content, refusal=None)


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """The log-probabilities of a prompt's tokens in vLLM's format. num_top: number of candidates to show."""
    return [None if entry is None else _rank_candidates(entry, num_top, tokenizer) for entry in entries]


def _rank_candidates(entry: TokenLogprob, num_top: int, tokenizer: Tokenizer) -> dict[int, PromptLogprob]:
    """The candidates of one position by token id, the prompt's own token first."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top[:num_top], 1)}
    return {
        token: PromptLogprob(
            logprob=_finite(logprob), rank=ranks.get(token), decoded_token=tokenizer.token(token)
        )
        for token, logprob in dict([(entry.token_id, entry.logprob), *entry.top[:num_top]]).items()
    }


def _candidate(token: int, logprob: float, tokenizer: Tokenizer, as_ids: bool) -> TopLogprob:
    raw = list(tokenizer.token_bytes(token))
    name = name_by_id(token) if as_ids else tokenizer.token(token)
    return TopLogprob(token=name, logprob=_finite(logprob), bytes=raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
