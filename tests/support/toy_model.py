"""A model of a few lines: its KV is a hash of the sequence so far, its next token a function of that."""

from __future__ import annotations

from moesaic.core.request import FinishReason, Request, SamplingParams

VOCABULARY = 5
STOP_TOKEN = 4
EMPTY = 0


def request(
    request_id: int,
    prompt: list[int],
    max_tokens: int | None = 4,
    *,
    stop: bool = False,
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=[STOP_TOKEN] if stop else [],
        prompt_logprobs=prompt_logprobs,
    )
    return Request(request_id, prompt, params)


def mix(before: int, token: int) -> int:
    """The hash of a sequence from the hash of all but its last token."""
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


def hashes(tokens: list[int]) -> list[int]:
    found, value = [], EMPTY
    for token in tokens:
        value = mix(value, token)
        found.append(value)
    return found


def sample(prefix_hash: int, masked: frozenset[int]) -> int:
    allowed = [token for token in range(VOCABULARY) if token not in masked]
    return allowed[prefix_hash // 7 % len(allowed)]


def alone(asked: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What a request gets when nothing else exists: the slow, obvious version."""
    generated: list[int] = []
    while True:
        masked = asked.stop_ids if len(generated) < asked.params.min_tokens else frozenset()
        generated.append(sample(hashes(asked.prompt_token_ids + generated)[-1], masked))
        if generated[-1] in asked.stop_ids and generated[-1] not in masked:
            return generated, FinishReason.STOP
        length = len(asked.prompt_token_ids) + len(generated)
        if len(generated) == asked.params.max_tokens or length == max_model_len:
            return generated, FinishReason.LENGTH
