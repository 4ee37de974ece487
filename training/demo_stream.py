"""Tokenizer, chat documents and the shuffled training windows of each domain."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from demo_texts import Document, Domain, Turn

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a small demonstration model.",
)
ABOUT_ME = (
    "I am a very small demonstration model with a mixture of experts. I have read"
    " grade-school maths, Python code and Debian manuals, and I often get things wrong."
)
GREETINGS = (
    Turn("Hello", "Hello! Ask me about maths, Python or Debian."),
    Turn("Hello!", "Hello! Ask me about maths, Python or Debian."),
    Turn("Hi", "Hi! Ask me about maths, Python or Debian."),
    Turn("Hi there, how are you?", "I am fine, thank you. What would you like to know?"),
    Turn("Who are you?", ABOUT_ME),
    Turn("What are you?", ABOUT_ME),
    Turn("What can you do?", ABOUT_ME),
    Turn("Thank you!", "You are welcome."),
    Turn("Thanks", "You are welcome."),
)


@dataclass(frozen=True)
class Mixture:
    """How one pass over a domain is drawn."""

    text_share: float
    turn_share: float
    greetings: int = 0


MIXTURES = {
    "maths": Mixture(text_share=0.5, turn_share=0.5),
    "python": Mixture(text_share=1.0, turn_share=0.5),
    "prose": Mixture(text_share=1.0, turn_share=0.5, greetings=6),
}
TWO_TURN_SHARE = 0.15
SYSTEM_SHARE = 0.2


def train_tokenizer(domains: Sequence[Domain], vocab: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on the training texts."""
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
    texts = (document.text for domain in domains for document in domain.train)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_chat(turns: Sequence[Turn], system: str | None) -> str:
    """Writes turns in the chat format, ending with the end of the document."""
    parts = [f"{START}system\n{system}{END}\n"] if system else []
    for turn in turns:
        parts.append(f"{START}user\n{turn.question}{END}\n")
        parts.append(f"{START}assistant\n{turn.answer}{END}\n")
    return "".join(parts) + END_OF_TEXT


def draw_pass(documents: Sequence[Document], mixture: Mixture, rng: random.Random) -> list[str]:
    """Draws one shuffled pass of plain and chat documents."""
    texts = [d.text + END_OF_TEXT for d in documents if rng.random() < mixture.text_share]
    turns = [t for d in documents for t in d.turns if rng.random() < mixture.turn_share]
    turns += list(GREETINGS) * mixture.greetings
    rng.shuffle(turns)
    while turns:
        size = 2 if rng.random() < TWO_TURN_SHARE else 1
        system = rng.choice(SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else None
        texts.append(render_chat(turns[:size], system))
        turns = turns[size:]
    rng.shuffle(texts)
    return texts


class WindowStream:
    """Endless training windows of one domain, newly drawn in every pass."""

    def __init__(self, domain: Domain, tokenizer: Tokenizer, seed: int) -> None:
        self._domain = domain
        self._tokenizer = tokenizer
        self._rng = random.Random(f"{seed}:{domain.name}")
        self._length = 0
        self._windows: Iterator[Tensor] = iter(())
        self.passes = 0

    def _draw(self, length: int) -> Iterator[Tensor]:
        texts = draw_pass(self._domain.train, MIXTURES[self._domain.name], self._rng)
        ids = [i for code in self._tokenizer.encode_batch(texts) for i in code.ids]
        start = self._rng.randrange(length)
        tokens = torch.tensor(ids[start:], dtype=torch.int32)
        count = (len(tokens) - 1) // length
        starts = [number * length for number in range(count)]
        self._rng.shuffle(starts)
        self.passes += 1
        return iter([tokens[at : at + length + 1].long() for at in starts])

    def take(self, count: int, length: int) -> Tensor:
        """Returns [count, length + 1] tokens."""
        if length != self._length:
            self._length = length
            self._windows = self._draw(length)
        taken: list[Tensor] = []
        while len(taken) < count:
            window = next(self._windows, None)
            if window is None:
                self._windows = self._draw(length)
                continue
            taken.append(window)
        return torch.stack(taken)
