"""The budget of an answer's reasoning: thinking_token_budget."""

from __future__ import annotations

from dataclasses import replace

from moesaic.core.errors import RequestError
from moesaic.core.reasoning import ReasoningBudget
from moesaic.core.request import SamplingParams
from moesaic.server.answers import Reading
from moesaic.server.requests import ChatRequest
from moesaic.server.service import Service

FIELD = "thinking_token_budget"


def with_budget(
    params: SamplingParams, body: ChatRequest, reading: Reading, service: Service
) -> SamplingParams:
    """`params` with the budget of the reasoning, if the request has one.

    Raises RequestError for a model whose reasoning is not told apart, and for one that may not end it.
    """
    wanted = body.thinking_token_budget
    if wanted is None or wanted < 0:
        return params
    span = reading.formats.span(reading.tools, reading.inside)
    if span is None:
        what = "reasoning is not told apart in the answers of this model"
        allowed = "a server with --reasoning-parser NAME, or -1"
        raise RequestError(f"{FIELD}: got {wanted}, but {what}; allowed: {allowed}", FIELD)
    end = tuple(service.tokenizer.encode(span.endings[0], add_special_tokens=False))
    if params.allowed_token_ids is not None and not set(end) <= set(params.allowed_token_ids):
        what = f"with {FIELD} they need the tokens {list(end)}, which end the reasoning"
        raise RequestError(f"allowed_token_ids: {what}", "allowed_token_ids")
    budget = ReasoningBudget(wanted, span.opening, span.endings, end, span.inside, span.anywhere)
    return replace(params, reasoning=budget)
