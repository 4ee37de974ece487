"""Turns the prompts and messages of a client into token ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moesaic.core.errors import RequestError
from moesaic.parsers.table import Formats
from moesaic.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    TemplateOptions,
)
from moesaic.server.service import Service, Tokenizer
from moesaic.server.tools import further_fields, require_roles, variables_of

T = TypeVar("T")

MAX_PROMPTS = 2048
"""Maximum number of prompts in one call, whatever the length of the queue."""

MOST_ENTRIES = 1 << 18
"""Maximum number of entries of logit_bias, and of stop_token_ids, of all completions of a call together. Each
completion has its own copy, which is validated here and sent to the worker."""
MOST_CHARACTERS = 4 << 20
"""Maximum number of characters of a text where the context is short. Each may need 200 bytes of memory."""
_LONG_TOKEN = 8
"""Characters of a text for each token of a long context. In real texts a token has about four."""

_TAIL = 16
"""Number of tokens at the end of a prompt in which a tag is looked for."""
_AT_ONCE = 1 << 14
"""Maximum number of characters or tokens that are processed in the event loop. More is done in a thread."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: the token ids for the engine, and the text for `echo`."""

    token_ids: list[int]
    text: str | None
    """The text that the client sent; None if it sent token ids."""


async def completion_prompts(body: CompletionRequest, service: Service) -> list[Prompt]:
    """Every prompt of the call, in order. Refuses what can never be served before it tokenizes anything."""
    sent = body.prompt
    if not sent:
        raise RequestError("prompt: it is empty; at least one token is needed", "prompt")
    many: Sequence[Any] = [sent] if isinstance(sent, str) or isinstance(sent[0], int) else sent
    if len(many) > MAX_PROMPTS:
        raise RequestError(f"prompt: got {len(many)} prompts; allowed: at most {MAX_PROMPTS}", "prompt")
    service.engine.require_room_ever(len(many), len(many) * (body.n or 1))
    require_few_entries(body, len(many) * (body.n or 1))
    texts = [len(one) for one in many if isinstance(one, str)]
    _require_short(max(texts, default=0), service, "prompt")
    special, tokenizer = body.add_special_tokens is not False, service.tokenizer
    return await off_loop(sum(texts), lambda: [_prompt(one, special, tokenizer) for one in many], service)


async def chat_prompt(
    messages: Sequence[Message], options: TemplateOptions, service: Service, any_length: bool = False
) -> list[int]:
    """The token ids of a conversation, formatted by the checkpoint's chat template.

    any_length: accept more than the context holds, since no answer will be generated.
    """
    tokenizer = service.tokenizer
    variables = variables_of(options)
    taken = inspect.signature(type(tokenizer).chat).parameters
    for name in variables:
        if name in taken:
            raise RequestError(f"chat_template_kwargs: {name!r} cannot be set here", "chat_template_kwargs")
    require_roles(messages)
    size = sum(len(_plain(message)["content"]) for message in messages)
    most = (
        require_length(size, service, "messages") if any_length else _require_short(size, service, "messages")
    )

    def render() -> list[int]:
        service.engine.require_serving()  # this conversation may have waited for its turn
        return tokenizer.chat(
            plain_messages(messages, service.formats),
            add_generation_prompt=options.add_generation_prompt is not False,
            continue_final_message=bool(options.continue_final_message),
            most_characters=most,
            **variables,
        )

    return await service.chat_threads.run(render)


def require_few_entries(body: GenerationRequest, completions: int) -> None:
    """Raise RequestError if logit_bias and stop_token_ids are too large for so many completions."""
    for name, entries in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        if completions * len(entries or ()) > MOST_ENTRIES:
            what = f"{len(entries or ())} entries for each of {completions} completions"
            raise RequestError(f"{name}: got {what}; allowed: at most {MOST_ENTRIES} in all", name)


def plain_messages(messages: Sequence[Message], formats: Formats) -> list[dict[str, Any]]:
    """The messages as chat templates expect them, with earlier calls and their results."""
    return [_plain(message) | further_fields(message, formats) for message in messages]


def opens_reasoning(prompt: Sequence[int], body: ChatRequest, service: Service) -> bool:
    """True if the answer to a chat begins inside of its reasoning: the prompt has opened it."""
    tags = service.formats.tags
    if tags is None:
        return False
    if body.continue_final_message:
        text = str(_plain(body.messages[-1])["content"])
        return text.rfind(tags.open) > text.rfind(tags.close)
    return service.tokenizer.decode(prompt[-_TAIL:], False).rstrip().endswith(tags.open)


async def off_loop(size: int, work: Callable[[], T], service: Service) -> T:
    """Run `work` and return its result. An input of large `size` runs in a thread, not to delay others.

    Raises OverloadedError if no thread was free for too long.
    """
    return work() if size <= _AT_ONCE else await service.text_threads.run(work)


def require_length(characters: int, service: Service, field: str) -> int:
    """The maximum length of a text in characters. Raises RequestError for a longer one."""
    allowed = max(MOST_CHARACTERS, _LONG_TOKEN * service.engine.require_serving().max_model_len)
    if characters > allowed:
        error = f"{field}: got {characters} characters; allowed: at most {allowed}"
        raise RequestError(error, field, "string_above_max_length")
    return allowed


def _prompt(sent: str | list[int], special: bool, tokenizer: Tokenizer) -> Prompt:
    if isinstance(sent, str):
        return Prompt(tokenizer.encode(sent, special), sent)
    return Prompt(sent, None)


def _require_short(characters: int, service: Service, field: str) -> int:
    """The length in characters above which a text surely has more tokens than the context.

    Raises RequestError for a longer text. To tokenize it would take seconds.
    """
    longest = service.tokenizer.longest_token
    allowed = service.engine.require_serving().max_model_len * longest
    if characters > allowed:
        what = f"at most {allowed}, which is the context length times the longest token, {longest}"
        error = f"{field}: got {characters} characters; allowed: {what}"
        raise RequestError(error, field, "context_length_exceeded")
    return min(allowed, require_length(characters, service, field))


def _plain(message: Message) -> dict[str, Any]:
    """The message as chat templates expect it. Joins parts of text by newlines."""
    content = message.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": text, **name}
