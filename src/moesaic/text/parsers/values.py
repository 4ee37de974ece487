"""Arguments that a model writes as plain text, turned into JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from moesaic.core.schema_types import TYPE_ALIASES

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

_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\\.|\b(?:True|False|None)\b""", re.DOTALL)
"""Strings and constants as Python writes them, and escapes outside of them, for linear time."""
_UNUSUAL_NUMBER = re.compile(r"(?P<sign>[+-]?)0*(?P<rest>\d.*)")
"""A number with a plus sign or zeros before it, which JSON forbids."""
_PYTHON_SIGNS = re.compile(r'\\.|"', re.DOTALL)


def find_parameters(tools: Tools, name: str) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; empty if the tool or its schema is unknown."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            return _mapping(function.get("parameters"))
    return {}


def find_types(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that the schema allows for argument `key`. Empty if it does not say."""
    return ValueSchema.read(parameters).child(key).types


@dataclass(frozen=True)
class ValueSchema:
    """What a schema says about one value."""

    parts: tuple[Mapping[str, Any], ...]
    """It and its alternatives."""
    root: Mapping[str, Any]
    """The schema that references point into."""

    @classmethod
    def read(cls, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> ValueSchema:
        """root: None for the schema itself."""
        root = schema if root is None else root
        schemas: list[object] = [schema]
        parts = dict[int, Mapping[str, Any]]()
        while schemas:
            part = _mapping(schemas.pop())
            if not part or id(part) in parts:  # a schema may refer to itself
                continue
            parts[id(part)] = part
            if not _own_types(part):
                schemas += [choice for name in _ALTERNATIVES for choice in _list(part.get(name))]
            if isinstance(part.get("$ref"), str):
                schemas.append(resolve_reference(part["$ref"], root))
        return cls(tuple(parts.values()), root)

    @cached_property
    def types(self) -> frozenset[str]:
        """The JSON types that it allows. Empty if it does not say."""
        return frozenset(name for part in self.parts for name in _own_types(part))

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys that it names."""
        return frozenset(key for part in self.parts for key in _mapping(part.get("properties")))

    def child(self, key: str, number: int = 0) -> ValueSchema:
        """The schema of a member, or of an item with this number."""
        schemas: list[object] = []
        for part in self.parts:
            properties, items = _mapping(part.get("properties")), _list(part.get("prefixItems"))
            schemas.append(properties[key] if key in properties else part.get("additionalProperties"))
            schemas.append(items[number] if number < len(items) else part.get("items"))
        return ValueSchema.read({"anyOf": schemas}, self.root)


def write_json(text: str, types: frozenset[str]) -> str:
    """The JSON of an argument that was written as `text`: JSON of one of the types, else a string.

    Examples: "42" of type integer -> 42; "42" of type string -> "42"; "yes" of type boolean -> "yes", which
    the caller of the tool may refuse; "True" of type boolean -> true; "{'a': None}" of type object ->
    {"a": null}.
    """
    stripped_text = text.strip()
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if stripped_text in _CONSTANTS and types & {"boolean", "null"}:
        stripped_text = _CONSTANTS[stripped_text]
    candidates = [stripped_text]
    number = _UNUSUAL_NUMBER.fullmatch(stripped_text)
    if number is not None and types & {"integer", "number"} and "string" not in types:
        candidates.append(number["sign"].replace("+", "") + number["rest"])
    if types & {"array", "object"} and stripped_text[:1] in ("[", "{"):
        candidates.append(_PYTHON_TOKENS.sub(_translate_token, stripped_text))
    for candidate in candidates:
        try:
            value = json.loads(candidate, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        if not types or types.intersection(_TYPES[type(value)]):
            return candidate
    return json.dumps(text, ensure_ascii=False)


def _translate_token(match: re.Match[str]) -> str:
    """A string or a constant of Python as JSON writes it. A string of JSON is one of Python too."""
    token = match[0]
    if token[0] == "\\":
        return token
    return _CONSTANTS.get(token) or f'"{_PYTHON_SIGNS.sub(_translate_sign, token[1:-1])}"'


def _translate_sign(match: re.Match[str]) -> str:
    """An escape of Python, or a quotation mark, inside of a string of JSON."""
    return {'"': '\\"', "\\'": "'", "\\x": "\\u00"}.get(match[0], match[0])


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names itself, or that its values have."""
    type_field = schema.get("type")
    names = [type_field] if isinstance(type_field, str) else _list(type_field)
    types = {TYPE_ALIASES.get(name, name) for name in names if isinstance(name, str)}
    if types:
        return set() if None in types else {name for name in types if name is not None}
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return {_TYPES[type(value)][0] for value in values if type(value) in _TYPES}


def resolve_reference(path: str, root: Mapping[str, Any]) -> object:
    """What `#/$defs/name` or `#` leads to in the schema; None if there is nothing."""
    start, *steps = path.split("/")
    node: object = root if start == "#" else None
    for step in steps:
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
