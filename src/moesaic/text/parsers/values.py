"""Arguments that a model writes as plain text, turned into JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

Tools = tuple[Mapping[str, Any], ...]
"""The `tools` of a request: {"type": "function", "function": {"name", "description", "parameters"}}."""
_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; empty if the tool or its schema is unknown."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            return _mapping(function.get("parameters"))
    return {}


def types_of(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that the schema allows for argument `key`. Empty if it does not say."""
    left = [_mapping(parameters.get("properties")).get(key)]
    found, followed = set[str](), set[str]()
    while left:
        schema = _mapping(left.pop())
        own = _own_types(schema)
        found |= own
        if not own:
            left += [each for name in ("anyOf", "oneOf", "allOf") for each in _list(schema.get(name))]
        path = schema.get("$ref")
        if isinstance(path, str) and path not in followed:
            followed.add(path)
            left.append(_referred(path, parameters))
    return frozenset(found)


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of an argument that was written as `text`: JSON of one of the types, else a string.

    Examples: "42" of type integer -> 42; "42" of type string -> "42"; "yes" of type boolean -> "yes", which
    the caller of the tool may refuse; "True" of type boolean -> true.
    """
    stripped = text.strip()
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if stripped in ("True", "False", "None") and types & {"boolean", "null"}:
        stripped = {"True": "true", "False": "false", "None": "null"}[stripped]
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not types.intersection(_TYPES[type(value)]):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names itself, or that its values have."""
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return {_TYPES[type(value)][0] for value in values if type(value) in _TYPES}


def _referred(path: str, root: Mapping[str, Any]) -> object:
    """What `#/$defs/name` leads to in the schema; None if there is nothing."""
    if not path.startswith("#/"):
        return None
    found: object = root
    for step in path[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
