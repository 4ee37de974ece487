"""Arranges the instructions of a conversation so that their texts reach the prompt.

A chat template may not know the role `developer`, or take a system message only at the start. An instruction
that would not arrive becomes a system message, joins the first one, or is put before the first user message.

Question: What becomes of a system message that the chat template does not take?
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moesaic.text.templates.probe import INSTRUCTION_ROLES, SYSTEM, Arrivals, Message, Place, list_places

Keeps = Callable[[str, Place], bool]
Arrange = Callable[[Sequence[Message]], list[Message]]
_SEPARATOR = "\n\n"
"""Stands between instructions that are joined, and before a user's text."""


def list_arrangements(arrivals: Arrivals) -> Iterator[Arrange]:
    """Ways to arrange a conversation, the one that changes least first."""
    yield lambda messages: arrange(messages, arrivals.keeps)
    first = arrivals.first_role or SYSTEM
    yield lambda messages: arrange(messages, lambda role, place: (role, place) == (first, Place.FIRST))
    yield lambda messages: arrange(messages, lambda role, place: False)


def arrange(messages: Sequence[Message], keeps: Keeps) -> list[Message]:
    """`messages` with the instructions that are not kept moved. keeps: whether one arrives as it is."""
    arrangement: list[Message] = []
    moved_texts: list[str] = []
    for message, place in zip(messages, list_places(messages), strict=True):
        role = message.get("role")
        if role not in INSTRUCTION_ROLES or keeps(str(role), place):
            arrangement.append(message)
        elif keeps(SYSTEM, place):
            arrangement.append({**message, "role": SYSTEM})
        elif str(message.get("content") or "").strip():
            moved_texts.append(str(message["content"]))
    return _put_first(moved_texts, arrangement, keeps) if moved_texts else arrangement


def _put_first(texts: Sequence[str], messages: list[Message], keeps: Keeps) -> list[Message]:
    """`messages` with `texts` in their first instruction, or before the text of their first user message."""
    if messages and messages[0].get("role") in INSTRUCTION_ROLES:
        return [_join(messages[0], [_content(messages[0]), *texts]), *messages[1:]]
    role = next((role for role in INSTRUCTION_ROLES if keeps(role, Place.FIRST)), None)
    if role is not None:
        return [{"role": role, "content": _SEPARATOR.join(texts)}, *messages]
    user = next((number for number, message in enumerate(messages) if message.get("role") == "user"), None)
    if user is None:
        return [{"role": SYSTEM, "content": _SEPARATOR.join(texts)}, *messages]
    joined_message = _join(messages[user], [*texts, _content(messages[user])])
    return [*messages[:user], joined_message, *messages[user + 1 :]]


def _join(message: Message, texts: Sequence[str]) -> Message:
    return {**message, "content": _SEPARATOR.join(filter(None, texts))}


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def list_missing(messages: Sequence[Message], tools: Sequence[Any], text: str) -> list[str]:
    """The paths of the texts of a request that are not in its prompt `text`.

    Those are contents, names of called functions, and names and descriptions of tools.
    """
    place, missing = 0, list[str]()
    for path, wanted_text in _list_texts(messages, tools):
        start = text.find(wanted_text, place)  # texts mostly arrive in order, so each is looked for once
        start = text.find(wanted_text) if start < 0 else start
        if start >= 0:
            place = start
        elif not any(form in text for form in _list_json_forms(wanted_text)):
            missing.append(path)
    return missing


def _list_texts(messages: Sequence[Message], tools: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Path and text of whatever has to arrive. Templates trim texts."""
    for number, tool in enumerate(tools):
        function = _read_function(tool)
        for name in ("name", "description"):
            if str(function.get(name) or "").strip():
                yield f"tools[{number}].function.{name}", str(function[name]).strip()
    for number, message in enumerate(messages):
        if _content(message).strip():
            yield f"messages[{number}]", _content(message).strip()
        for call_number, call in enumerate(message.get("tool_calls") or ()):
            if name := str(_read_function(call).get("name") or "").strip():
                yield f"messages[{number}].tool_calls[{call_number}]", name


def _read_function(tool: Any) -> Mapping[str, Any]:
    """The function of a tool or of a call, which callers of the library may write without its wrapping."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _list_json_forms(text: str) -> Iterator[str]:
    """`text` as templates write it into JSON."""
    for is_ascii in (False, True):
        yield json.dumps(text, ensure_ascii=is_ascii)[1:-1]


def mark_texts(
    messages: Sequence[Message], tools: Sequence[Any], paths: Sequence[str]
) -> tuple[list[Message], list[Any], dict[str, str]]:
    """Messages and tools with a marker behind the contents and descriptions at `paths`, and these markers.

    A template may change a text, such as the new lines in it. A marker shows whether the text arrives.
    """
    marks = {path: f"zq{number}m7qz" for number, path in enumerate(paths)}
    marked_messages = [
        {**message, "content": f"{_content(message)} {marks[path]}"}
        if (path := f"messages[{number}]") in marks
        else message
        for number, message in enumerate(messages)
    ]
    marked_tools = [
        _mark_tool(tool, marks.get(f"tools[{number}].function.description"))
        for number, tool in enumerate(tools)
    ]
    return marked_messages, marked_tools, marks


def _mark_tool(tool: Any, mark: str | None) -> Any:
    if mark is None:
        return tool
    function = _read_function(tool)
    marked_function = {**function, "description": f"{function['description']} {mark}"}
    return {**tool, "function": marked_function} if "function" in tool else marked_function
