"""Turns the prompts and messages of a client into token ids."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from moesaic.core.errors import ContextLengthError, RequestError
from moesaic.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    TemplateOptions,
)
from moesaic.server.service import Service, Tokenizer
from moesaic.server.tools import further_fields, make_variables, require_roles
from moesaic.text.parsers.table import Formats

T = TypeVar("T")

MAX_PROMPTS = 2048
"""Maximum number of prompts in one call, whatever the length of the queue."""

MOST_ENTRIES = 1 << 18
"""Maximum number of entries of logit_bias, of stop_token_ids, of allowed_token_ids and of bad_words, of all
completions of a call together. Each completion has its own copy, which is sent to the worker."""
MOST_SCORES = 1 << 22
"""Maximum number of log-probabilities of prompts in one answer. Each needs some hundred bytes."""
MOST_CHARACTERS = 4 << 20
"""Maximum number of characters of a text where the context is short. Each may need 200 bytes of memory."""
_LONG_TOKEN = 8
"""Characters of a text for each token of a long context. In real texts a token has about four."""

_TAIL = 16
"""Number of tokens at the end of a prompt in which a tag is looked for."""
_MAX_LOOP_SIZE = 1 << 14
"""Maximum number of characters or tokens that are processed in the event loop. More is done in a thread."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: the token ids for the engine, and the text for `echo`."""

    token_ids: list[int]
    text: str | None
    """The text that the client sent; None if it sent token ids, or if the text was cut."""
    was_text: bool = False
    """The client sent a text, so the tokenizer may have added special tokens."""


@dataclass(frozen=True)
class Truncation:
    """What truncate_prompt_tokens leaves of a prompt."""

    tokens: int | None
    """Maximum number of tokens that are kept. None keeps all."""
    keep_first: bool
    """Keep the first tokens, not the last ones."""

    @classmethod
    def from_body(cls, body: GenerationRequest, max_tokens: int | None, service: Service) -> Truncation:
        """The cut that `body` asks for. Raises RequestError if it leaves nothing, or more than fits."""
        name, num_tokens = "truncate_prompt_tokens", body.truncate_prompt_tokens
        room = service.engine.require_serving().max_model_len - (max_tokens or 1)
        if num_tokens is None or room < 1:
            return cls(None, False)  # without room the engine refuses the prompt, and says why
        if num_tokens == 0 or num_tokens > room:
            allowed_range = f"1 to {room}, which the context leaves for the prompt, or -1 for {room}"
            raise RequestError(f"{name}: got {num_tokens}; allowed: {allowed_range}", name)
        return cls(room if num_tokens == -1 else num_tokens, body.truncation_side == "right")

    def apply(self, ids: list[int]) -> list[int]:
        if self.tokens is None or len(ids) <= self.tokens:
            return ids
        return ids[: self.tokens] if self.keep_first else ids[-self.tokens :]


async def completion_prompts(body: CompletionRequest, service: Service) -> list[Prompt]:
    """Every prompt of the call, in order. Refuses what can never be served before it tokenizes anything."""
    prompt_field = body.prompt
    if not prompt_field:
        raise RequestError("prompt: it is empty; at least one token is needed", "prompt")
    prompts: Sequence[Any] = (
        [prompt_field] if isinstance(prompt_field, str) or isinstance(prompt_field[0], int) else prompt_field
    )
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt: got {len(prompts)} prompts; allowed: at most {MAX_PROMPTS}", "prompt")
    # These checks come before the first text is tokenized, which may take seconds.
    service.engine.require_room_ever(len(prompts), len(prompts) * (body.n or 1))
    require_few_entries(body, len(prompts) * (body.n or 1))
    texts = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
    if body.truncate_prompt_tokens is None:
        longest_text = max((prompt for prompt in prompts if isinstance(prompt, str)), key=len, default="")
        _require_short([longest_text], service, "prompt", body.max_tokens)
    else:
        require_length(max(texts, default=0), service, "prompt")
    special, tokenizer = body.add_special_tokens is not False, service.tokenizer
    cut = Truncation.from_body(body, body.max_tokens, service)
    return await off_loop(
        sum(texts), lambda: [_prompt(prompt, special, tokenizer, cut) for prompt in prompts], service
    )


async def chat_prompt(
    messages: Sequence[Message],
    options: TemplateOptions,
    service: Service,
    *,
    any_length: bool = False,
    max_new_tokens: int | None = None,
    special: bool = False,
) -> list[int]:
    """The token ids of a conversation, formatted by the checkpoint's chat template.

    any_length: accept more than the context holds, since no answer will be generated, or the prompt will be
    cut. max_new_tokens: what the request says of the answer's length. special: add the tokenizer's special
    tokens too.
    """
    tokenizer = service.tokenizer
    variables = make_variables(options, service.formats)
    own_parameters = inspect.signature(type(tokenizer).chat).parameters
    for name in variables:
        if name in own_parameters:
            raise RequestError(f"chat_template_kwargs: {name!r} cannot be set here", "chat_template_kwargs")
    require_roles(messages)
    texts = [_plain(message)["content"] for message in messages]
    texts += [tool.model_dump_json(exclude_none=True) for tool in options.tools or ()]
    max_characters = (
        require_length(sum(map(len, texts)), service, "messages")
        if any_length
        else _require_short(texts, service, "messages", max_new_tokens)
    )

    def render() -> list[int]:
        service.engine.require_serving()  # this conversation may have waited for its turn
        with _name_message(messages):
            ids = tokenizer.chat(
                plain_messages(messages, service.formats),
                add_generation_prompt=options.add_generation_prompt is not False,
                continue_final_message=bool(options.continue_final_message),
                most_characters=max_characters,
                **variables,
            )
        return _with_special_tokens(ids, tokenizer) if special else ids

    return await service.chat_threads.run(render)


@contextmanager
def _name_message(messages: Sequence[Message]) -> Generator[None]:
    """Errors about a message name the part of the client's request that it was made of."""
    try:
        yield
    except RequestError as error:
        match = re.match(r"messages\[(\d+)\]", str(error))
        path = None if match is None else messages[int(match[1])].path
        if match is None or path is None:
            raise
        raise RequestError(
            path + str(error)[match.end() :], re.split(r"[\[.]", path)[0], error.code
        ) from error


def require_few_entries(body: GenerationRequest, completions: int) -> None:
    """Raise RequestError if a list of tokens is too large for so many completions."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words"):
        entries = getattr(body, name)
        if completions * len(entries or ()) > MOST_ENTRIES:
            got = f"{len(entries or ())} entries for each of {completions} completions"
            raise RequestError(f"{name}: got {got}; allowed: at most {MOST_ENTRIES} in all", name)


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


def require_few_scores(
    name: str, count: int | None, tokens: int, body: GenerationRequest, qualifier: str = ""
) -> None:
    """Raise RequestError if prompts of `tokens` tokens would have too many log-probabilities in one answer.

    count: the value of field `name`, the candidates for each token; None scores no token.
    """
    num_scores = 0 if count is None else (body.n or 1) * tokens * (count + 1)
    if num_scores > MOST_SCORES:
        got = f"{count}, {qualifier}{num_scores} log-probabilities of prompts in one answer"
        raise RequestError(f"{name}: got {got}; allowed: at most {MOST_SCORES}", name)


async def off_loop(size: int, work: Callable[[], T], service: Service) -> T:
    """Run `work` and return its result. An input of large `size` runs in a thread, not to delay others.

    Raises OverloadedError if no thread was free for too long.
    """
    return work() if size <= _MAX_LOOP_SIZE else await service.text_threads.run(work)


def require_length(characters: int, service: Service, field: str) -> int:
    """The maximum length of a text in characters. Raises RequestError for a longer one."""
    limit = _longest_text(service)
    if characters > limit:
        error = f"{field}: got {characters} characters; allowed: at most {limit}"
        raise RequestError(error, field, "string_above_max_length")
    return limit


def _longest_text(service: Service) -> int:
    """The maximum length of a text in characters."""
    return max(MOST_CHARACTERS, _LONG_TOKEN * service.engine.require_serving().max_model_len)


def _prompt(prompt: str | list[int], special: bool, tokenizer: Tokenizer, cut: Truncation) -> Prompt:
    if not isinstance(prompt, str):
        return Prompt(cut.apply(prompt), None)
    full_ids = tokenizer.encode(prompt, special)
    ids = cut.apply(full_ids)
    return Prompt(ids, prompt if len(ids) == len(full_ids) else None, was_text=True)


def _with_special_tokens(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """`ids` with the special tokens that the tokenizer adds before and after a text."""
    plain_ids, wrapped_ids = tokenizer.encode("a", False), tokenizer.encode("a")
    begin = next(
        start for start in range(len(wrapped_ids)) if wrapped_ids[start : start + len(plain_ids)] == plain_ids
    )
    return [*wrapped_ids[:begin], *ids, *wrapped_ids[begin + len(plain_ids) :]]


def _require_short(texts: Sequence[str], service: Service, field: str, max_new_tokens: int | None) -> int:
    """The length in characters above which texts surely have more tokens than the context.

    Raises ContextLengthError for longer texts. To tokenize them would take seconds, so the number of tokens
    is an upper bound: a token has at least one byte.
    """
    context = service.engine.require_serving().max_model_len
    limit = min(context * service.tokenizer.longest_token, _longest_text(service))
    if sum(map(len, texts)) > limit:
        tokens = sum(len(text.encode(errors="replace")) for text in texts)
        raise ContextLengthError(tokens, max_new_tokens or 1, context, field, is_bound=True)
    return limit


def _plain(message: Message) -> dict[str, Any]:
    """The message as chat templates expect it. Joins parts of text by newlines."""
    content = message.content or message.refusal or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": text, **name}
