"""Makes a chat of Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.server import requests as chat
from moesaic.server.anthropic.body import (
    CUSTOM,
    Block,
    CountRequest,
    MessagesRequest,
    TextPart,
    Tool,
    Turn,
)
from moesaic.server.tools import require_shallow

NAMES = (
    ("response_format", "output_config.format"),
    ("thinking_token_budget", "thinking.budget_tokens"),
)
"""Fields of a chat, and their names here."""

_REQUIRED_FIELDS = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
_ROLES = {"tool_use": "assistant", "tool_result": "user", "thinking": "assistant"}
_PARTS = "text", "tool_use", "thinking"
_ERROR_PREFIX = "Error: "


def make_chat(body: CountRequest, reasons: bool) -> chat.ChatRequest:
    """The chat that `body` describes. Raises RequestError, naming the field.

    reasons: the model's reasoning is told apart. Otherwise a budget for it asks for nothing.
    """
    messages = _messages(body)
    is_continued = messages[-1].role == "assistant"
    if is_continued:
        _require_text(messages[-1])
    return chat.ChatRequest(
        model=body.model,
        messages=messages,
        stream=True,
        stream_options=chat.StreamOptions(include_usage=True),
        tools=_list_functions(body) or None,
        continue_final_message=is_continued,
        add_generation_prompt=not is_continued,
        **_sampling(body),
        **_choice(body),
        **_thinking(body),
        thinking_token_budget=_budget(body) if reasons else None,
        **_form(body),
    )


def _sampling(body: CountRequest) -> dict[str, Any]:
    """How the answer is sampled, and where it ends."""
    if not isinstance(body, MessagesRequest):
        return {}
    names = ("max_tokens", "temperature", "top_p", "top_k", "cache_salt")
    return {"stop": body.stop_sequences} | {name: getattr(body, name) for name in names}


def _messages(body: CountRequest) -> list[chat.Message]:
    messages = (
        [chat.Message(role="system", content=_text(body.system)).set_path("system")] if body.system else []
    )
    for number, turn in enumerate(body.messages):
        path = f"messages[{number}]"
        messages += [message.set_path(path) for message in _turn(turn, path)]
    if not messages:
        raise RequestError("messages: they have no content", "messages")
    return messages


def _turn(turn: Turn, path: str) -> Iterator[chat.Message]:
    """The messages of one turn: results of tools have messages of their own."""
    if isinstance(turn.content, str):
        yield chat.Message(role=turn.role, content=turn.content)
        return
    for number, block in enumerate(turn.content):
        _require_fields(block, turn.role, f"{path}.content[{number}]")
    if turn.role == "assistant":
        if any(block.type in _PARTS for block in turn.content):
            yield _assistant(turn.content)
        return
    for results, blocks in groupby(turn.content, lambda block: block.type == "tool_result"):
        if results:
            yield from map(_result, blocks)
        else:
            parts = [
                chat.TextPart(type="text", text=block.text or "") for block in blocks if block.type == "text"
            ]
            if parts:
                yield chat.Message(role=turn.role, content=parts)


def _assistant(blocks: Sequence[Block]) -> chat.Message:
    texts = [block.text or "" for block in blocks if block.type == "text"]
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    thinking = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    return chat.Message(
        role="assistant",
        content=[chat.TextPart(type="text", text=text) for text in texts] or None,
        reasoning_content=thinking or None,
        tool_calls=calls or None,
    )


def _call(block: Block) -> chat.ToolCall:
    require_shallow(block.input, "messages: the input of a tool_use", "messages")
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = chat.CalledFunction(name=block.name or "", arguments=arguments)
    return chat.ToolCall(id=block.id, type="function", function=function, index=None)


def _result(block: Block) -> chat.Message:
    text = _text(block.content or "")
    return chat.Message(
        role="tool",
        tool_call_id=block.tool_use_id,
        content=f"{_ERROR_PREFIX}{text}" if block.is_error else text,
    )


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _require_fields(block: Block, role: str, path: str) -> None:
    """Raise RequestError where a block lacks a field of its type, or stands in the wrong turn."""
    for name in _REQUIRED_FIELDS[block.type]:
        if getattr(block, name) is None:
            raise RequestError(f"{path}.{name}: missing; a {block.type} block has one", "messages")
    required_role = _ROLES.get(block.type, role)
    if role != required_role:
        raise RequestError(
            f"{path}.type: got {block.type!r}; allowed only with the role {required_role!r}", "messages"
        )


def _require_text(last: chat.Message) -> None:
    """Raise RequestError for a last message of the assistant that cannot be continued."""
    if last.tool_calls:
        raise RequestError("messages: a tool_use of the last message needs a tool_result", "messages")
    if not last.content:
        raise RequestError("messages: the last message is the assistant's and has no text", "messages")


def list_names(body: CountRequest) -> list[tuple[str, str]]:
    """Fields of the chat of `body`, as patterns, and their names here."""
    own_numbers = [number for number, tool in enumerate(body.tools or ()) if _is_run_by_client(tool)]
    pairs = list(NAMES)
    for chat_number, number in enumerate(own_numbers):
        function = rf"tools\[{chat_number}\]\.function"
        pairs += [
            (rf"{function}\.parameters", f"tools[{number}].input_schema"),
            (function, f"tools[{number}]"),
        ]
    return pairs


def _list_functions(body: CountRequest) -> list[chat.Tool]:
    tools = enumerate(body.tools or ())
    return [_tool(tool, number) for number, tool in tools if _is_run_by_client(tool)]


def list_left_out(body: CountRequest) -> list[str]:
    """The types of the tools that only Anthropic's servers run."""
    return [f"tools.{tool.type}" for tool in body.tools or () if not _is_run_by_client(tool)]


def _is_run_by_client(tool: Tool) -> bool:
    """Whether the client runs the tool."""
    return tool.type in (None, CUSTOM)


def _tool(tool: Tool, number: int) -> chat.Tool:
    if tool.input_schema is None:
        raise RequestError(f"tools[{number}].input_schema: missing; a tool has one", "tools")
    function = chat.Function.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return chat.Tool(type="function", function=function)


def _choice(body: CountRequest) -> dict[str, Any]:
    """Which tools the answer may or has to call."""
    choice = body.tool_choice
    if choice is None:
        return {}
    tool_choice: str | chat.ToolChoice
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name: missing; the type 'tool' has one", "tool_choice")
        tool_choice = chat.ToolChoice(
            type="function", function=chat.ChosenFunction.model_construct(name=choice.name)
        )
    else:
        tool_choice = "required" if choice.type == "any" else choice.type
    fields: dict[str, Any] = {"tool_choice": tool_choice}
    return fields | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


def _thinking(body: CountRequest) -> dict[str, Any]:
    """How hard the model reasons, as variables of the chat template. Absent: as the template likes."""
    effort = None if body.output_config is None else body.output_config.effort
    if body.thinking is None:
        return {"reasoning_effort": effort}
    if body.thinking.type == "disabled":
        return {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": False}}
    return {
        "reasoning_effort": effort,
        "chat_template_kwargs": {
            "enable_thinking": True,
            "thinking": True,
            "thinking_mode": body.thinking.type,
        },
        "include_reasoning": body.thinking.display != "omitted",
    }


def _budget(body: CountRequest) -> int | None:
    """Maximum number of tokens of the reasoning. Raises RequestError beside another type."""
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if body.thinking is None or budget is None:
        return None
    field, kind = "thinking.budget_tokens", body.thinking.type
    if kind != "enabled":
        raise RequestError(
            f"{field}: got {budget}; allowed with the type 'enabled', not {kind!r}", "thinking"
        )
    return budget


def _form(body: CountRequest) -> dict[str, Any]:
    forms = {
        "output_config.format": None if body.output_config is None else body.output_config.format,
        "output_format": body.output_format,
    }
    given_forms = {name: form for name, form in forms.items() if form is not None}
    if len(given_forms) > 1:
        raise RequestError("output_format: allowed: without output_config.format", "output_format")
    for form in given_forms.values():
        schema = chat.JsonSchemaFormat(schema=form.schema_, strict=None)
        return {"response_format": chat.ResponseFormat(type="json_schema", json_schema=schema, schema=None)}
    return {}
