"""The tools of a chat: which ones its answer may call, and the calls and results of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.parsers.table import Formats
from moesaic.parsers.values import Tools
from moesaic.server.requests import ChatRequest, Message, TemplateOptions, Tool, ToolCall


def callable_tools(body: ChatRequest, formats: Formats) -> Tools | None:
    """The tools that the answer may call. None: calls are not looked for.

    Raises RequestError if the model does not take tools, or if it is unknown how it calls them.
    """
    choice = body.tool_choice
    if body.tools is None:
        if choice not in (None, "none"):
            raise RequestError("tool_choice: allowed only with tools", "tool_choice")
        return None
    if not formats.takes_tools:
        what = "the chat template of this model takes none"
        raise RequestError(f"tools: {what}; leave them out, or use --chat-template", "tools")
    if choice == "none":
        return None
    if formats.calls is None:
        what = "it is not known how this model writes calls"
        allowed = "a server with --tool-call-parser NAME, or tool_choice 'none'"
        raise RequestError(f"tools: {what}; allowed: {allowed}", "tools")
    if choice not in (None, "auto"):
        shown = choice if isinstance(choice, str) else choice.model_dump(mode="json")
        raise RequestError(f"tool_choice: got {shown!r}; allowed: 'auto', 'none'", "tool_choice")
    return dumped(body.tools)


def dumped(tools: Sequence[Tool]) -> Tools:
    """The tools as chat templates expect them."""
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


def variables_of(options: TemplateOptions) -> dict[str, Any]:
    """The variables of the chat template that a request sets. chat_template_kwargs take precedence."""
    found: dict[str, Any] = {} if options.tools is None else {"tools": list(dumped(options.tools))}
    if options.reasoning_effort is not None:
        found["reasoning_effort"] = options.reasoning_effort
        found |= {"enable_thinking": False} if options.reasoning_effort == "none" else {}
    return found | (options.chat_template_kwargs or {})


def require_roles(messages: Sequence[Message]) -> None:
    """Raise RequestError where a message has a field that belongs to another role."""
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role != "assistant":
            for name in ("tool_calls", "reasoning", "reasoning_content"):
                if getattr(message, name) is not None:
                    what = f"{where}.{name}: allowed only with the role 'assistant'"
                    raise RequestError(what, "messages")
        if message.role == "tool" and message.tool_call_id is None:
            raise RequestError(f"{where}.tool_call_id: missing; a tool's message has one", "messages")
        if message.role != "tool" and message.tool_call_id is not None:
            raise RequestError(f"{where}.tool_call_id: allowed only with the role 'tool'", "messages")


def further_fields(message: Message, formats: Formats) -> dict[str, Any]:
    """The fields of a message beside role, content and name, as chat templates expect them."""
    found: dict[str, Any] = {}
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        found["tool_calls"] = [_call(call, formats) for call in message.tool_calls]
        if reasoning and not message.content:
            found["thinking"] = reasoning  # the name in gpt-oss's template, which allows no content beside it
    return found


def _call(call: ToolCall, formats: Formats) -> dict[str, Any]:
    text = call.function.arguments
    arguments = text if formats.text_arguments else _object(text)
    called = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return called if call.id is None else {"id": call.id, **called}


def _object(text: str) -> str | Mapping[str, Any]:
    """The object that `text` is the JSON of. `text` itself if it is none: the model had made a mistake."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
