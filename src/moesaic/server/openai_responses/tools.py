"""The tools of a response as functions of a chat, and the calls of these functions as items.

Question: What becomes of tools of /v1/responses that are no functions?
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.server import requests as chat
from moesaic.server.openai_responses.body import Tool

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
LOCAL_SHELL = "local_shell"
_SEPARATOR = "__"
"""Stands between a namespace and the name of its function."""
INPUT = "input"
"""The one argument of the function that stands for a custom tool."""


@dataclass(frozen=True)
class OfferedTool:
    """A function or a custom tool that the model may call."""

    tool: Tool
    path: str
    namespace: str | None = None

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return join_name(self.namespace, self.tool.name or "")

    @property
    def is_custom(self) -> bool:
        return self.tool.type == CUSTOM


class Toolbox:
    """The tools of a request. Those that only OpenAI's servers run are left out."""

    def __init__(self, tools: Sequence[Tool] | None) -> None:
        """Raises RequestError for a tool without what its type needs."""
        self._tools = list(_list_tools(tools or (), "tools"))
        self._tools_by_name = {tool.name: tool for tool in self._tools}
        self.left_out = [
            f"tools.{tool.type}" for tool in tools or () if tool.type not in (FUNCTION, CUSTOM, NAMESPACE)
        ]
        """The types of the tools that nobody here can run."""

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The place of each function in the chat, as a pattern, and in the request."""
        return [(rf"tools\[{number}\]\.function", tool.path) for number, tool in enumerate(self._tools)]

    def find(self, name: str) -> OfferedTool | None:
        """The tool that the model calls by this name. None: it made the name up."""
        return self._tools_by_name.get(name)

    def list_functions(self) -> list[chat.Tool]:
        """The tools as functions of a chat."""
        return [
            chat.Tool(
                type="function",
                function=chat.Function.model_construct(
                    name=tool.name,
                    description=_describe(tool.tool),
                    parameters=_write_parameters(tool.tool),
                    strict=tool.tool.strict,
                ),
            )
            for tool in self._tools
        ]

    def choose(self, choice: Any) -> dict[str, Any]:
        """The chat's fields `tools` and `tool_choice`. Raises RequestError for a tool that is not there."""
        functions = self.list_functions() or None
        if choice is None or isinstance(choice, str):
            return {"tools": functions, "tool_choice": None if choice == "auto" and not functions else choice}
        if choice.type == "allowed_tools":
            names = {
                self._find_chosen(tool, f"tool_choice.tools[{number}]").name
                for number, tool in enumerate(choice.tools or ())
            }
            allowed_tools = [tool for tool in functions or () if tool.function.name in names]
            return {"tools": allowed_tools or None, "tool_choice": choice.mode or "auto"}
        tool = self._find_chosen(choice.model_dump(), "tool_choice")
        if tool.is_custom and tool.tool.format is not None and tool.tool.format.syntax == "lark":
            reason = f"a call of {tool.name!r} cannot be forced, since its grammar is Lark"
            raise RequestError(f"tool_choice: {reason}; allowed: 'auto', or a regex", "tool_choice")
        function = chat.ChosenFunction.model_construct(name=tool.name)
        return {"tools": functions, "tool_choice": chat.ToolChoice(type="function", function=function)}

    def _find_chosen(self, choice: dict[str, Any], path: str) -> OfferedTool:
        name = join_name(choice.get("namespace"), str(choice.get("name")))
        tool = self._tools_by_name.get(name) if choice.get("type") in (FUNCTION, CUSTOM) else None
        if tool is None:
            names = ", ".join(map(repr, self._tools_by_name)) or "'none'"
            choice_name = choice.get("name") or choice.get("type")
            raise RequestError(f"{path}: got {choice_name!r}; allowed: {names}", "tool_choice")
        return tool


def join_name(namespace: str | None, name: str) -> str:
    """The name by which a model knows a tool of a namespace."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith(_SEPARATOR) else _SEPARATOR) + name


def write_input(text: str) -> str:
    """The arguments of the function that stands for a custom tool, as JSON."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def read_input(arguments: str) -> str:
    """The input of a custom tool. Arguments that are no JSON object with it are the input themselves."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _list_tools(tools: Sequence[Tool], path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
    for number, tool in enumerate(tools):
        tool_path = f"{path}[{number}]"
        if tool.type in (FUNCTION, CUSTOM, NAMESPACE) and tool.name is None:
            raise RequestError(f"{tool_path}.name: missing; a {tool.type} tool has one", "tools")
        if tool.type == NAMESPACE:
            yield from _list_tools(
                tool.tools or (), f"{tool_path}.tools", join_name(namespace, tool.name or "")
            )
        elif tool.type in (FUNCTION, CUSTOM):
            yield OfferedTool(tool, tool_path, namespace)


def _describe(tool: Tool) -> str | None:
    """The description of a tool, with the grammar of a custom tool's input."""
    if tool.type != CUSTOM or tool.format is None or tool.format.definition is None:
        return tool.description
    grammar = f"The input keeps to this {tool.format.syntax} grammar:\n{tool.format.definition}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


def _write_parameters(tool: Tool) -> dict[str, Any] | None:
    if tool.type != CUSTOM:
        return tool.parameters
    text: dict[str, Any] = {"type": "string"}
    if tool.format is not None and tool.format.syntax == "regex" and tool.format.definition is not None:
        text["pattern"] = f"^(?:{tool.format.definition})$"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
