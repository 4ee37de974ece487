"""Finds the part of a JSON Schema that the grammar library refuses, since its errors name none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moesaic.text.structured.json_schema import follow_reference, list_parts

MOST_CHECKS = 100
"""Maximum number of parts that are given to the library."""
_DEFINITIONS = ("$defs", "definitions")
_REASONS = (
    (
        "oneOf",
        "oneOf",
        "its alternatives may overlap, and an answer cannot be made to match exactly one; allowed: anyOf",
    ),
    ("circular references", "$ref", "it leads to itself, so no other keyword may stand beside it"),
    ("not disjoint", "patternProperties", "two of its patterns may match the same name"),
    ("look-around", "pattern", "look-ahead and look-behind are not supported"),
    ("regex parse error", "pattern", "it is not a regular expression of the supported kind"),
    ("range", "minimum", "no number is allowed by it and the other bounds"),
    ("Unsatisfiable", "", "no value is allowed by it"),
    ("too big", "", "it is too large to keep to"),
    ("too large", "", "it is too large to keep to"),
)
"""A text in the library's error, the keyword that it is about, and what the error means."""


def describe_refusal(error: str, schema: Any, is_refused: Callable[[Any], bool]) -> tuple[str, str]:
    """The path of the part of `schema` that is refused, such as ".properties.a.oneOf", and the reason.

    error: the library's. is_refused: says whether the library refuses a schema.
    """
    path, part = _find_part(schema, is_refused)
    for text, keyword, reason in _REASONS:
        if text in error:
            known_keyword = next((name for name in (keyword, f"{keyword}Properties") if name in part), "")
            return f"{path}.{known_keyword}" if known_keyword else path, reason
    return path, error


def _find_part(schema: Any, is_refused: Callable[[Any], bool]) -> tuple[str, Mapping[str, Any]]:
    """The innermost part that is refused by itself, with its path."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    num_checks, seen_parts = 0, {id(schema)}

    def has_refused_part(parts: Sequence[tuple[str, Any]]) -> bool:
        nonlocal num_checks
        num_checks += 1
        properties = {str(number): part for number, (_, part) in enumerate(parts)}
        return is_refused(
            {"type": "object", "properties": properties, "additionalProperties": False, **definitions}
        )

    path, part = "", schema
    while num_checks < MOST_CHECKS:
        parts = [child for child in _list_children(schema, part, path) if id(child[1]) not in seen_parts]
        if not parts or not has_refused_part(parts):
            break
        while len(parts) > 1:
            half = parts[: len(parts) // 2]
            parts = half if has_refused_part(half) else parts[len(parts) // 2 :]
        [(path, part)] = parts
        seen_parts.add(id(part))
    return path, part


def _list_children(root: Any, node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas inside of a schema, and the one to which its reference leads."""
    for child_path, child in list_parts(node, path):
        if not any(child_path.startswith(f"{path}.{name}.") for name in _DEFINITIONS):
            yield child_path, child
    if isinstance(node.get("$ref"), str):
        target = follow_reference(root, node["$ref"])
        if isinstance(target, dict):
            yield "." + node["$ref"].removeprefix("#/").replace("/", "."), target
