"""A drafter that knows the answers and errs on purpose, so that a test chooses how much is accepted."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from moesaic.core.tokens import IntArray


class Oracle:
    """A Drafter that proposes the tokens of known answers, each of which is right with a probability."""

    def __init__(
        self, answers: Iterable[tuple[Sequence[int], Sequence[int]]], right: float, seed: int = 0
    ) -> None:
        """answers: (prompt, tokens of its answer). right: the probability of each token. Equal tokens give
        equal proposals, as `Drafter` wants it."""
        self._known: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for prompt, tokens in answers:
            self.learn(prompt, tokens)
        self._right = right
        self._seed = seed

    def learn(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """One more answer."""
        self._known.setdefault(tuple(prompt), set()).add(tuple(tokens))

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        """See `Drafter`. Nothing for tokens that belong to no known answer."""
        said = tuple(tokens.tolist())
        noise = random.Random(hash((said, self._seed)))
        for prompt, answers in self._known.items():
            if said[: len(prompt)] != prompt:
                continue
            for answer in sorted(answers):
                behind = len(said) - len(prompt)
                if answer[:behind] == said[len(prompt) :]:
                    follow = answer[behind : behind + max_tokens]
                    return [token if noise.random() < self._right else token ^ 1 for token in follow]
        return []
