"""Estimates the lengths of a batch file's requests before any of them runs. A plan is made for these
lengths."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesaic.core.errors import MoesaicError
from moesaic.jobs.batch.lines import Job as Line
from moesaic.jobs.batch.lines import Key, read
from moesaic.planning import Job
from moesaic.server.prompts import plain_messages
from moesaic.server.requests import ChatRequest
from moesaic.server.tools import make_variables
from moesaic.text.parsers.table import detect_formats
from moesaic.text.tokenizer import Tokenizer

SAMPLE_LINES = 2000
"""Number of lines whose tokens are counted for the mean. The other lines are assumed to be alike."""
LONGEST_LINES = 16
"""Number of further lines, those that look longest, that are counted for the maximum."""
UNLIMITED_TOKENS = 256
"""Tokens that a request without a limit is assumed to generate. It may generate up to --max-model-len."""
COMPLETION = 16
"""The API's default limit of a completion."""
_IN_PROMPT = ("messages", "tools", "reasoning_effort", "chat_template_kwargs")
"""Fields of a chat on which its prompt depends."""

REFUSED_JOB = Job(requests=1, prompt=1, generate=1, longest=2)
"""The job of a file whose lines will all be refused. A worker has to run to refuse them."""


def survey(
    path: Path, tokenizer: Tokenizer, limit: int, answered_keys: Collection[Key] = (), pad: bool = False
) -> Job | None:
    """The lengths of a file's requests; None if all of them are done. Lines that will be refused do not
    count.

    limit: maximum tokens of a request, prompt and answer. answered_keys: lines that have results. pad: each
    prompt is padded to the longest, and any request may have the longest answer.
    """
    token_counts: list[tuple[int, int]] = []
    long: list[tuple[int, int, Line]] = []
    requests, has_missing = 0, False
    for line in read(path):
        if line.key in answered_keys:
            continue
        has_missing = True
        if not isinstance(line, Line):
            continue
        if len(token_counts) < SAMPLE_LINES:
            line_counts = _lengths(line, tokenizer, limit)
            token_counts += line_counts
            requests += len(line_counts) * _count_answers(line.body)
            continue
        requests += len(_prompts(line.body.get("prompt"))) * _count_answers(line.body)
        # A heap keeps the longest lines, so that a file of any size needs little memory.
        if len(long) < LONGEST_LINES:
            heapq.heappush(long, (_estimate_length(line.body), line.line, line))
        else:
            heapq.heappushpop(long, (_estimate_length(line.body), line.line, line))
    if not token_counts:
        return REFUSED_JOB if has_missing else None
    longest_counts = token_counts + [pair for _, _, line in long for pair in _lengths(line, tokenizer, limit)]
    prompts, answers = zip(*token_counts, strict=True)
    job = Job(requests, _mean(prompts), _mean(answers), max(map(sum, longest_counts)))
    return _add_padding(job, longest_counts) if pad else job


def _add_padding(job: Job, token_counts: Sequence[tuple[int, int]]) -> Job:
    prompt, answer = (max(column) for column in zip(*token_counts, strict=True))
    return replace(job, padded_length=prompt, longest=prompt + answer)


def _lengths(line: Line, tokenizer: Tokenizer, limit: int) -> list[tuple[int, int]]:
    """(prompt tokens, maximum generated tokens) of each prompt in a line; empty if it will be refused."""
    body = line.body
    try:
        limit_value = _read_limit(body)
        max_tokens = None if limit_value is None else int(limit_value)
        if "messages" in body:
            default, prompt_tokens = UNLIMITED_TOKENS, [_count_chat_tokens(body, tokenizer)]
        else:
            default, prompt_tokens = (
                COMPLETION,
                [_count_tokens(prompt_part, tokenizer) for prompt_part in _prompts(body.get("prompt"))],
            )
    except (MoesaicError, TypeError, ValueError, OverflowError):
        return []
    if max_tokens is None:  # a default is reduced to what the limit leaves; a requested length is not
        return [(prompt, min(default, limit - prompt)) for prompt in prompt_tokens if 0 < prompt < limit]
    return [
        (prompt, max_tokens)
        for prompt in prompt_tokens
        if prompt > 0 and max_tokens > 0 and prompt + max_tokens <= limit
    ]


def _count_chat_tokens(body: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """The prompt tokens of a chat. Raises ValueError, TypeError or RequestError if it will be refused."""
    chat = ChatRequest.model_validate({name: body[name] for name in _IN_PROMPT if name in body})
    formats = detect_formats(tokenizer.chat_template)
    messages = plain_messages(chat.messages, formats)
    return len(tokenizer.chat(messages, **make_variables(chat, formats)))


def _read_limit(body: Mapping[str, Any]) -> Any:
    """The limit that a body sets; None if it sets none."""
    return body.get("max_completion_tokens") or body.get("max_tokens") or None


def _estimate_length(body: Mapping[str, Any]) -> int:
    """A rough length in characters, to find the longest requests."""
    limit_value = _read_limit(body)
    return len(str(body)) + (4 * limit_value if isinstance(limit_value, int) else 0)


def _mean(counts: Sequence[int]) -> int:
    """The mean, rounded up: a pass with room for the mean of all requests has room for all of them."""
    return math.ceil(sum(counts) / len(counts))


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of a completion as a list. The body has one, text or token ids, or several."""
    is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return list(prompt) if is_list else [prompt]


def _count_tokens(prompt: Any, tokenizer: Tokenizer) -> int:
    if not isinstance(prompt, str | list):
        raise TypeError("a prompt is a text or a list of token ids")
    return len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)


def _count_answers(body: Mapping[str, Any]) -> int:
    """Number of answers to each prompt."""
    count = body.get("n")
    return count if isinstance(count, int) and count > 0 else 1
