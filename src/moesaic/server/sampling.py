"""Turns the bodies of requests into SamplingParams."""

from __future__ import annotations

from typing import Any

from moesaic.core.errors import RequestError
from moesaic.core.request import SamplingParams
from moesaic.server.answer_form import structured_outputs
from moesaic.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from moesaic.server.service import Service

COMPLETION_TOKENS = 16
"""OpenAI's default length of a completion."""

_SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids"),
    *("bad_words", "prompt_logprobs", "return_routed_experts", "cache_salt", "logprob_token_ids"),
)


def completion_params(body: CompletionRequest, prompt_tokens: int, service: Service) -> SamplingParams:
    """The parameters of a completion for a prompt of `prompt_tokens` tokens.

    The default length is reduced to what the context leaves; an explicit one is not. max_tokens 0 with echo
    scores the prompt: one token is generated and dropped.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of: got {body.best_of}; allowed: the value of n", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens: got 0; allowed: at least 1, or 0 with echo", "max_tokens")
    limit = body.max_tokens
    if limit is None:
        room = service.engine.require_serving().max_model_len - prompt_tokens
        limit = max(1, min(COMPLETION_TOKENS, room))
    # With echo `logprobs` scores the prompt too, so the larger of both numbers is computed.
    scores = [
        count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None
    ]
    logprob_counts = {"prompt_logprobs": max(scores, default=None), "logprobs": body.logprobs}
    return _params(body, service, max_tokens=max(1, limit), **logprob_counts)


def chat_params(body: ChatRequest, service: Service) -> SamplingParams:
    """The parameters of a chat. Without a limit the answer may fill the context."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: allowed only with logprobs true", "top_logprobs")
    limit = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, service, max_tokens=limit, logprobs=logprobs)


def _params(body: GenerationRequest, service: Service, **overrides: Any) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: allowed only with stream true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: allowed only with stream false", "prompt_logprobs")
    if body.priority:
        message = (
            f"got {body.priority}; allowed: 0, since requests are scheduled in the order of their arrival"
        )
        raise RequestError(f"priority: {message}", "priority")
    fields = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    return SamplingParams(
        **{**service.default_sampling, **fields, **overrides},
        stop=stop,
        logit_bias=bias,
        structured_outputs=structured_outputs(body),
    )
