"""The constraints of a worker's requests: grammars are compiled, and masks computed, beside its steps.

Question: How do the masks of a structured output reach the sampler?
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from moesaic.core.request import Request
from moesaic.core.tokens import IntArray
from moesaic.text.structured.grammar import limits
from moesaic.text.structured.reasoning import BudgetFilter
from moesaic.text.structured.token_filter import GrammarFilter, Masks, TokenFilter
from moesaic.text.structured.vocabulary import Vocabulary
from moesaic.trace.logs import of_request

LOG = logging.getLogger(__name__)
GRAMMARS = 64
"""Compiled grammars that are kept for later requests."""

MaskTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""The operation `mask_tokens` of `kernels.table`."""


class Constraint:
    """What one request in the batch may generate: by its structured output, or its reasoning's budget."""

    def __init__(self, request_id: int, token_filter: TokenFilter, name: str = "") -> None:
        """name: the request's name in log lines."""
        self.request_id = request_id
        self.name = name
        self.filter = token_filter
        self.next: tuple[Future[list[Masks]], int] | None = None
        """The masks of a step, which a thread computes, and which of them has that of the next token: [1,
        words]. None: every token is allowed."""

    def accept(self, token: int) -> bool:
        """Go on behind a sampled token. False if it is not allowed."""
        return self.filter.accept([token])

    @property
    def reason(self) -> tuple[int, str]:
        """The request, and why no token is allowed."""
        return self.request_id, self.filter.error or "min_tokens or another parameter forbids all of them"


class Constraints:
    """Compiles the grammars of requests and masks logits.

    vocabulary: reads the tokenizer; it is called in a thread at the first request that needs it. width:
    number of logits. mask_tokens: the operation that changes logits. One thread compiles and one computes
    masks, so a large grammar delays only the requests that wait for it.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], width: int, mask_tokens: MaskTokens) -> None:
        self._vocabulary = vocabulary
        self._width = width
        self._mask_tokens = mask_tokens
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._masker = ThreadPoolExecutor(1, "mask")
        self._read: Future[Vocabulary] | None = None
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._matchers: OrderedDict[tuple[str, tuple[int, ...]], Future[LLMatcher]] = OrderedDict()

    def compile(self, request: Request) -> Future[Any] | None:
        """What a request waits for: its compiled grammar, or the vocabulary for a budget. None: nothing."""
        if request.grammar:
            return self._matcher(request)
        return None if request.params.reasoning is None else self._bytes()

    def _bytes(self) -> Future[Vocabulary]:
        """The vocabulary, which is read once."""
        if self._read is None:
            self._read = self._compiler.submit(self._vocabulary)
        return self._read

    def _matcher(self, request: Request) -> Future[LLMatcher]:
        """The compiled grammar of a request, which may still be under way."""
        key = request.grammar, request.eos_token_ids
        if key not in self._matchers:
            self._matchers[key] = self._compiler.submit(self._compile, self._bytes(), *key)
            while len(self._matchers) > GRAMMARS:
                self._matchers.popitem(last=False)  # the one that was used longest ago
        self._matchers.move_to_end(key)
        return self._matchers[key]

    def constrain(self, request: Request, generated_token_ids: Sequence[int]) -> Constraint | None:
        """The constraint of a request behind its generated tokens. None if it has none.

        Waits if the grammar is not compiled yet.
        """
        token_filter: TokenFilter | None = None
        if request.grammar:
            # A copy: the filter changes its matcher, and later requests use the compiled one.
            token_filter = GrammarFilter(self._matcher(request).result().deep_copy(), self._width)
        if request.params.reasoning is not None:
            tokens = self._bytes().result().tokens
            token_filter = BudgetFilter(request.params.reasoning, tokens, self._width, token_filter)
        if token_filter is None:
            return None
        constraint = Constraint(request.request_id, token_filter, request.name)
        if generated_token_ids:
            constraint.filter.accept(generated_token_ids)
        self._prepare([constraint])
        return constraint

    def apply(self, logits: torch.Tensor, lines: Sequence[int], constraints: Sequence[Constraint]) -> None:
        """Set the logits of tokens that are not allowed to -infinity, in place.

        logits: [*, width] float32; row lines[i] is that of constraints[i].
        """
        bound_lines = [
            (line, *constraint.next)
            for line, constraint in zip(lines, constraints, strict=True)
            if constraint.next
        ]
        if bound_lines:
            masks = np.concatenate([job.result()[place] for _, job, place in bound_lines])
            self._mask_tokens(
                logits, torch.tensor([line for line, _, _ in bound_lines]), torch.from_numpy(masks)
            )

    def accept(
        self, constraints: Mapping[int, Constraint], tokens: IntArray, logits: torch.Tensor
    ) -> list[int]:
        """Go on behind the sampled tokens, and begin to compute the next masks.

        constraints: by row of `tokens` and of the logits, which `apply` changed. Returns the rows that have
        no allowed token: the best logit is -infinity.
        """
        lines = list(constraints)
        best = logits[torch.tensor(lines), torch.from_numpy(tokens[lines])]
        empty_lines = {
            line for line, is_empty in zip(lines, torch.isneginf(best).tolist(), strict=True) if is_empty
        }
        refused_lines = [
            line for line in lines if line in empty_lines or not constraints[line].accept(int(tokens[line]))
        ]
        for line in refused_lines:
            constraint = constraints[line]
            LOG.warning(
                "request %d ended: no token is allowed: %s",
                *constraint.reason,
                extra=of_request(constraint.name),
            )
        self._prepare(constraint for line, constraint in constraints.items() if line not in refused_lines)
        return refused_lines

    def _prepare(self, constraints: Iterable[Constraint]) -> None:
        """Begin to compute the next masks. One job has all of a step: each job costs a change of threads."""
        constraint_list = list(constraints)
        bound = [constraint for constraint in constraint_list if constraint.filter.restricts]
        job = (
            self._masker.submit(_compute_masks, [constraint.filter for constraint in bound])
            if bound
            else None
        )
        places = {id(constraint): place for place, constraint in enumerate(bound)}
        for constraint in constraint_list:
            constraint.next = (
                (job, places[id(constraint)]) if job is not None and id(constraint) in places else None
            )

    def _compile(
        self, vocabulary: Future[Vocabulary], grammar: str, eos_token_ids: tuple[int, ...]
    ) -> LLMatcher:
        """vocabulary: read before, in this thread."""
        if eos_token_ids not in self._tokenizers:
            self._tokenizers[eos_token_ids] = vocabulary.result().build_tokenizer(self._width, eos_token_ids)
        tokenizer = self._tokenizers[eos_token_ids]
        return LLMatcher(tokenizer, grammar, log_level=0, limits=limits())


def _compute_masks(filters: Sequence[TokenFilter]) -> list[Masks]:
    """The masks of the next tokens, each [1, words]."""
    return [token_filter.masks() for token_filter in filters]
