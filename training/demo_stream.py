"""The tokenizer and the training windows. Every batch follows from the seed and its number alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from demo_chat import END, END_OF_TEXT, SPECIAL_TOKENS, START
from demo_skill_list import draw_conversation
from demo_skills import Draw, Example
from demo_texts import Domain

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pieces that no token crosses. Every digit is a piece, so that sums have one token a digit."""
TOKENIZER_CONVERSATIONS = 20_000
PLAIN_SHARE = 0.1
"""The part of single questions that is written without the chat template."""
Chat = tuple[list[int], list[int]]
"""Tokens and targets of one document of skills."""


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_texts(
    domains: Sequence[Domain],
    skills: Mapping[str, Draw],
    seed: int,
    conversations: int,
) -> Iterable[str]:
    """The training documents of all domains and conversations of all skills, without special tokens."""
    for domain in domains:
        yield from (document.text for document in domain.train)
    shares = dict.fromkeys(skills, 1.0)
    rng = random.Random(f"tokenizer:{seed}")
    for _ in range(conversations):
        text = draw_conversation(rng, skills, shares, False).text
        for turn in text.split(START):
            yield turn.replace(END, "")


@dataclass(frozen=True)
class Batch:
    """Training windows of [rows, length] tokens."""

    tokens: Tensor
    targets: Tensor
    """The token after each one, or -1 where nothing is learned."""
    documents: Tensor | None = None
    """The number of the document that each token is in, or -1 for padding. Attention stays within one."""

    @property
    def size(self) -> int:
        """The number of tokens without padding."""
        return self.tokens.numel() if self.documents is None else int((self.documents >= 0).sum())


def join_batches(batches: Sequence[Batch]) -> Batch:
    """All rows of batches of text."""
    return Batch(*(torch.cat(parts) for parts in zip(*((b.tokens, b.targets) for b in batches), strict=True)))


def answer_targets(tokens: Sequence[int], header: Sequence[int], end: int | None) -> list[int]:
    """The next token where it belongs to an assistant's answer or ends it, else -1.

    header: the tokens that open an answer. end: the token that closes it.
    """
    size, is_answer = len(header), False
    targets = [-1] * len(tokens)
    for place in range(len(tokens) - 1):
        if place + 1 >= size and list(tokens[place + 1 - size : place + 1]) == list(header):
            is_answer = True
        if is_answer:
            targets[place] = tokens[place + 1]
            is_answer = tokens[place + 1] != end
    return targets


class TextWindows:
    """Windows of one domain's text, in a new order in every pass."""

    def __init__(self, domain: Domain, tokenizer: Tokenizer, seed: int) -> None:
        self._name = f"{seed}:{domain.name}"
        texts = [document.text + END_OF_TEXT for document in domain.train]
        self._documents = [torch.tensor(code.ids) for code in tokenizer.encode_batch(texts)]
        self.size = sum(map(len, self._documents))
        self._key: tuple[int, int] | None = None
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._starts: list[int] = []

    def take(self, first: int, count: int, length: int) -> Batch:
        """The windows of these numbers: `count` from `first` on, each of `length` tokens."""
        rows = torch.stack([self._window(first + number, length) for number in range(count)])
        return Batch(rows[:, :-1], rows[:, 1:])

    def _window(self, number: int, length: int) -> Tensor:
        windows = (self.size - length - 1) // length
        turn, place = divmod(number, windows)
        if self._key != (turn, length):
            self._key = (turn, length)
            rng = random.Random(f"{self._name}:{turn}:{length}")
            self._tokens = torch.cat(rng.sample(self._documents, len(self._documents)))
            offset = rng.randrange(length)
            self._starts = [offset + at * length for at in range(windows)]
            rng.shuffle(self._starts)
        start = self._starts[place]
        return self._tokens[start : start + length + 1]


class SkillWindows:
    """Windows full of short conversations, of which only the answers are learned."""

    def __init__(self, skills: Mapping[str, Draw], tokenizer: Tokenizer, seed: int) -> None:
        self._skills = skills
        self._tokenizer = tokenizer
        self._seed = seed
        self._header = tokenizer.encode(f"{START}assistant\n").ids
        self._end = tokenizer.token_to_id(END)
        self.shares = dict.fromkeys(skills, 1.0)

    def take(self, number: int, rows: int, length: int) -> Batch:
        """The batch of this number: conversations put into `rows` windows of `length` tokens."""
        rng = random.Random(f"{self._seed}:skills:{number}:{length}")
        chats: list[Chat] = []
        size = 0
        while size < 0.97 * rows * length:
            example = draw_conversation(rng, self._skills, self.shares, False)
            ids, targets = self._encode(example, rng.random() < PLAIN_SHARE)
            if len(ids) <= length:
                chats.append((ids, targets))
                size += len(ids)
        return self._pack(sorted(chats, key=lambda chat: len(chat[0]), reverse=True), rows, length)

    def _encode(self, example: Example, is_plain: bool) -> Chat:
        """The tokens and targets of a chat, or of its texts alone, for prompts without a chat template."""
        if is_plain and not example.tools and len(example.messages) == 2:
            ids = self._tokenizer.encode(f"{example.question}\n{example.answer}{END_OF_TEXT}").ids
            return ids, [*ids[1:], -1]
        ids = self._tokenizer.encode(example.text).ids
        return ids, answer_targets(ids, self._header, self._end)

    def _pack(self, chats: list[Chat], rows: int, length: int) -> Batch:
        """Puts each conversation into the first row with room; the last ones may find none."""
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        targets = torch.full((rows, length), -1)
        documents = torch.full((rows, length), -1)
        ends = [0] * rows
        for number, (ids, wanted) in enumerate(chats):
            row = next((row for row in range(rows) if ends[row] + len(ids) <= length), None)
            if row is None:
                continue
            room = slice(ends[row], ends[row] + len(ids))
            tokens[row, room] = torch.tensor(ids)
            targets[row, room] = torch.tensor(wanted)
            documents[row, room] = number
            ends[row] = room.stop
        return Batch(tokens, targets, documents)
