"""Examples of skills: conversations with the one right answer, made from a seed.

A question is either for training or held out. The hash of the whole prompt decides, so no
seed and no number of examples brings a held-out prompt into training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demo_chat import Message, render

HELD_OUT_OF_256 = 24
"""How many of 256 hash values make a prompt a held-out one."""


@dataclass(frozen=True)
class Example:
    """A conversation whose last message is the right answer of the assistant."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    is_common: bool = False
    """The prompt is so common that it is always trained and never held out."""

    @property
    def prompt(self) -> str:
        """The rendered text up to where the answer begins."""
        return render(self.messages[:-1], self.tools, ask=True)

    @property
    def text(self) -> str:
        """The rendered text with the answer and its end token."""
        return render(self.messages, self.tools)

    @property
    def question(self) -> str:
        """The text of the last message before the answer."""
        return str(self.messages[-2]["content"])

    @property
    def answer(self) -> str:
        """The text that the model must write before its end token."""
        return self.text[len(self.prompt) :].removesuffix("<|im_end|>\n")

    @property
    def is_held_out(self) -> bool:
        """Whether this prompt is only for tests."""
        key = json.dumps([self.messages[:-1], self.tools], sort_keys=True)
        return not self.is_common and hashlib.sha256(key.encode()).digest()[0] < HELD_OUT_OF_256


Draw = Callable[[random.Random], Example]
"""Draws one example. The same state of the random numbers gives the same example."""


def ask(question: str, answer: str, is_common: bool = False) -> Example:
    """An example of one question without tools."""
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Example(messages, is_common=is_common)


def draw_one(draw: Draw, rng: random.Random, is_held_out: bool) -> Example:
    """Draws until an example is of the wanted side of the split."""
    for _ in range(10_000):
        example = draw(rng)
        if example.is_held_out == is_held_out:
            return example
    raise ValueError("a skill has too few prompts: 10,000 draws gave none of the wanted side")


def held_out_examples(draw: Draw, name: str, count: int, seed: int = 0) -> list[Example]:
    """`count` different held-out examples of one skill; fewer where it has no more."""
    rng = random.Random(f"held-out:{seed}:{name}")
    examples: dict[str, Example] = {}
    for _ in range(20 * count):
        example = draw_one(draw, rng, True)
        examples.setdefault(example.prompt, example)
        if len(examples) == count:
            break
    return list(examples.values())


def join_words(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
