"""Makes a chat of the input of a response."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.server import requests as chat
from moesaic.server.errors import show_value
from moesaic.server.openai_responses.body import READ_ITEMS, Item, Part, ResponsesRequest
from moesaic.server.openai_responses.tools import LOCAL_SHELL, Toolbox, join_name, write_input

NAMES = (
    ("messages", "input"),
    ("response_format", "text.format"),
)
"""Fields of a chat, and their names here."""

_REQUIRED_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call": ("action",),
    "local_shell_call_output": ("output",),
    "reasoning": (),
}
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_LOGPROBS = "message.output_text.logprobs"


def make_chat(body: ResponsesRequest, toolbox: Toolbox) -> chat.ChatRequest:
    """The chat that `body` describes. Raises RequestError, naming the field.

    toolbox: the tools of `body`.
    """
    _require_stateless(body)
    effort = None if body.reasoning is None else body.reasoning.effort
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": True,
        "stream_options": chat.StreamOptions(include_usage=True),
        **toolbox.choose(body.tool_choice),
        "verbosity": None if body.text is None else body.text.verbosity,
        "cache_salt": body.cache_salt,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": effort,
        "response_format": _form(body),
        **_logprobs(body),
    }
    return chat.ChatRequest(**fields)


def list_skipped(body: ResponsesRequest) -> list[str]:
    """The types of the items of the input that are not read."""
    items = () if isinstance(body.input, str) else body.input
    return [f"input.{item.type}" for item in items if _is_skipped(item)]


def _is_skipped(item: Item) -> bool:
    return item.type is not None and item.type not in READ_ITEMS


def _require_stateless(body: ResponsesRequest) -> None:
    """Raise RequestError for what needs a server that stores answers."""
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        value = getattr(body, name)
        if value not in (None, False):
            reason = "this server keeps no state, so input has to have the whole conversation"
            raise RequestError(
                f"{name}: got {show_value(value)}; leave it out: {reason}", name, "unsupported_parameter"
            )


def _messages(body: ResponsesRequest) -> list[chat.Message]:
    messages = (
        [chat.Message(role="system", content=body.instructions).set_path("instructions")]
        if body.instructions
        else []
    )
    if isinstance(body.input, str):
        return [*messages, chat.Message(role="user", content=body.input).set_path("input")]
    items = [(number, item) for number, item in enumerate(body.input) if not _is_skipped(item)]
    for number, item in items:
        _require_fields(item, f"input[{number}]")
    position = 0
    for turn in _turns(item for _, item in items):
        turn_messages = _assistant(turn) if _is_assistants(turn[0]) else [_message(item) for item in turn]
        messages += [message.set_path(f"input[{items[position][0]}]") for message in turn_messages]
        position += len(turn)
    if not messages:
        raise RequestError("input: it has no content", "input")
    return messages


def _turns(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Groups of items that make one message. An answer is reasoning, then text and calls in any order."""
    turn: list[Item] = []
    for item in items:
        if turn and not _joins(item, turn):
            yield turn
            turn = []
        turn.append(item)
    if turn:
        yield turn


def _joins(item: Item, turn: Sequence[Item]) -> bool:
    """True if `item` belongs to the same message as `turn` before it."""
    if not _is_assistants(item) or not _is_assistants(turn[-1]):
        return False
    last_kind = _kind(turn[-1])
    return (
        last_kind == "reasoning" if _kind(item) == "reasoning" else not _kind(item) == last_kind == "message"
    )


def _kind(item: Item) -> str:
    return item.type or "message"


def _is_assistants(item: Item) -> bool:
    return _kind(item) in ("reasoning", *_CALLS) or item.role == "assistant"


def _assistant(turn: Sequence[Item]) -> list[chat.Message]:
    """The message of an earlier answer. None if it had only reasoning that is encrypted."""
    texts = [_text(item.content) for item in turn if _kind(item) == "message"]
    reasoning = [_text(item.content) or _text(item.summary) for item in turn if _kind(item) == "reasoning"]
    calls = [_call(item) for item in turn if _kind(item) in _CALLS]
    reasoning_text = "\n".join(text for text in reasoning if text)
    if not (texts or calls or reasoning_text):
        return []
    return [
        chat.Message(
            role="assistant",
            content="\n".join(texts) if texts else None,
            reasoning_content=reasoning_text or None,
            tool_calls=calls or None,
        )
    ]


def _message(item: Item) -> chat.Message:
    if _kind(item).endswith("_output"):
        call_id = item.call_id or item.id
        return chat.Message(role="tool", tool_call_id=call_id or LOCAL_SHELL, content=_text(item.output))
    assert item.role is not None
    return chat.Message(role=item.role, content=_text(item.content))


def _call(item: Item) -> chat.ToolCall:
    name, arguments = join_name(item.namespace, item.name or LOCAL_SHELL), item.arguments or ""
    if item.type == "custom_tool_call":
        arguments = write_input(item.input or "")
    elif item.type == "local_shell_call":
        arguments = json.dumps(item.action, ensure_ascii=False)
    function = chat.CalledFunction(name=name, arguments=arguments)
    return chat.ToolCall(id=item.call_id or item.id, type="function", function=function, index=None)


def _text(content: str | Sequence[Part] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def _require_fields(item: Item, path: str) -> None:
    """Raise RequestError where an item lacks a field of its type."""
    for name in _REQUIRED_FIELDS[_kind(item)]:
        if getattr(item, name) is None:
            raise RequestError(f"{path}.{name}: missing; a {_kind(item)} has one", "input")


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if _LOGPROBS in (body.include or ()) else {}


def _form(body: ResponsesRequest) -> chat.ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return chat.ResponseFormat(type=form.type, schema=None)
    if form.schema_ is None:
        raise RequestError("text.format.schema: missing; the type 'json_schema' has one", "text")
    schema = chat.JsonSchemaFormat(name=form.name, schema=form.schema_, strict=form.strict)
    return chat.ResponseFormat(type="json_schema", json_schema=schema, schema=None)
