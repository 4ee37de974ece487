"""Exact answers by teacher forcing, and the experts that each skill uses.

Greedy decoding writes the right answer if and only if the right answer's every token is the
most likely one after the right tokens before it. One forward pass thus tells for a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_chat import END
from demo_skills import Example

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes tokens of [rows, positions] padded at the end, and a mask of what is no padding.

It returns logits and the picked experts, [layers, rows, positions, top-k].
"""
ROWS = 16


@dataclass(frozen=True)
class SkillFigures:
    """What a model does with the held-out questions of one skill."""

    questions: int
    exact: int
    loads: Tensor
    """[layers, experts], how often the answers' tokens picked each expert."""
    wrong: tuple[tuple[str, str], ...] = ()
    """Some questions that were missed, each with the right answer."""

    @property
    def share(self) -> float:
        """The share of exact answers."""
        return self.exact / max(self.questions, 1)


def encode_example(tokenizer: Tokenizer, example: Example) -> tuple[list[int], int]:
    """The tokens of prompt, answer and end, and how many of them the prompt has."""
    prompt = tokenizer.encode(example.prompt).ids
    return prompt + tokenizer.encode(example.answer + END).ids, len(prompt)


@torch.no_grad()
def measure_skill(
    forward: Forward, tokenizer: Tokenizer, examples: Sequence[Example], experts: int
) -> SkillFigures:
    """Counts the exact answers to the examples and the experts that they use."""
    rows = sorted((*encode_example(tokenizer, example), number) for number, example in enumerate(examples))
    rows.sort(key=lambda row: len(row[0]))
    exact, loads, wrong = 0, None, []
    for first in range(0, len(rows), ROWS):
        batch = rows[first : first + ROWS]
        width = max(len(ids) for ids, _, _ in batch)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _, _ in batch])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _, _ in batch])
        logits, picks = forward(tokens, mask)
        best = logits.argmax(dim=-1)
        for row, (ids, start, number) in enumerate(batch):
            is_exact = best[row, start - 1 : len(ids) - 1].tolist() == ids[start:]
            exact += is_exact
            if not is_exact:
                wrong.append((examples[number].question, examples[number].answer))
            used = picks[:, row, start - 1 : len(ids) - 1].flatten(1)
            counts = torch.stack([torch.bincount(layer, minlength=experts) for layer in used])
            loads = counts if loads is None else loads + counts
    return SkillFigures(len(rows), exact, torch.empty(0) if loads is None else loads, tuple(wrong[:5]))


def measure_skills(
    forward: Forward, tokenizer: Tokenizer, held_out: Mapping[str, Sequence[Example]], experts: int
) -> dict[str, SkillFigures]:
    """The figures of every skill."""
    return {name: measure_skill(forward, tokenizer, rows, experts) for name, rows in held_out.items()}
