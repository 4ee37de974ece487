"""JSON Schemas as the grammar library takes them.

What it does not know is written in other keywords, or refused by its place.

Question: Which keywords of a JSON Schema does an answer keep to?
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from moesaic.core.schema_types import TYPE_ALIASES

FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""Formats of JSON Schema that an answer keeps to. To JSON Schema all others are remarks."""
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_VALUES = ("const", "default", "enum", "examples", "example")
"""Keywords whose contents are values and not schemas."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose contents are schemas by a name of the author's choice."""
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
REFUSED_KEYWORDS = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    *("unevaluatedProperties", "unevaluatedItems", "propertyNames", "extends", "disallow"),
    *("formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum"),
)
"""Keywords that constrain and cannot be kept to."""
_OTHER_NAMES = {"divisibleBy": "multipleOf", "$dynamicAnchor": "$anchor"}
"""Keywords of other drafts -> keywords with the same meaning."""
_DRAFT = "json-schema.org/draft"
_ANY_NAME = ("", ".*", "^.*$", "^.*", ".*$")
"""Patterns that every name matches."""
_LARGEST = 9e18
"""The library writes bounds of numbers up to this size. Larger numbers are then not generated."""
_EMPTY_SCHEMAS: tuple[dict[str, Any], ...] = ({"not": {}}, {"not": True})
"""Schemas that accept no value, as some libraries write them."""


_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


class SchemaError(Exception):
    """A schema cannot be kept to. path: where, such as ".properties.a". The text is the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def prepare_schema(schema: Any, is_closed: bool = False) -> Any:
    """The schema in the library's keywords. Raises SchemaError.

    is_closed: objects have no properties that the schema does not name.
    """
    _check_references(schema)
    return _Adaptor(schema, is_closed).adapt(schema, "")


class _Adaptor:
    def __init__(self, root: Any, is_closed: bool) -> None:
        self._root = root
        self._is_closed = is_closed

    def adapt(self, node: Any, path: str) -> Any:
        """A schema and all inside it."""
        if not isinstance(node, dict):
            return node
        if node in _EMPTY_SCHEMAS and path:
            return False
        node = {_OTHER_NAMES.get(name, name): part for name, part in node.items()}
        node = self._write_names(self._write_unevaluated(_lift_required(node)), path)
        _drop_idle_keywords(node)
        for keyword in REFUSED_KEYWORDS:
            if keyword in node:
                raise SchemaError(f"{path}.{keyword}", "an answer cannot be made to keep to this keyword")
        self._write_type(node, path)
        _check_counts(node, path)
        _limit_numbers(node, path)
        if node.get("enum") == []:
            raise SchemaError(f"{path}.enum", "it is empty, so nothing is allowed")
        if isinstance(node.get("pattern"), str) and _LOOK_AROUND.search(node["pattern"]):
            raise SchemaError(f"{path}.pattern", "look-ahead and look-behind are not supported")
        if isinstance(node.get("$ref"), str):
            node["$ref"] = quote(unquote(node["$ref"]), safe="#/:?&=;,@!$'()*+~")
        if self._is_closed and isinstance(node.get("properties"), dict):
            node.setdefault("additionalProperties", False)
        return {name: self._adapt_part(name, part, f"{path}.{name}") for name, part in node.items()}

    def _adapt_part(self, name: str, part: Any, path: str) -> Any:
        if _is_remark(name):
            return part
        if name in _BY_NAME and isinstance(part, dict):
            return {key: self.adapt(inner, f"{path}.{key}") for key, inner in part.items()}
        if isinstance(part, list):
            return [self.adapt(inner, f"{path}[{number}]") for number, inner in enumerate(part)]
        return self.adapt(part, path)

    def _write_type(self, node: dict[str, Any], path: str) -> None:
        """Give types the names of JSON Schema."""
        if "type" not in node:
            return
        names = node["type"] if isinstance(node["type"], list) else [node["type"]]
        types = [TYPE_ALIASES.get(name, name) if isinstance(name, str) else name for name in names]
        if None in types:
            del node["type"]
            return
        unknown_type = next((name for name in types if name not in TYPES), None)
        if unknown_type is not None:
            raise SchemaError(f"{path}.type", f"got {unknown_type!r}; allowed: {', '.join(TYPES)}")
        node["type"] = types if isinstance(node["type"], list) else types[0]

    def _write_unevaluated(self, node: dict[str, Any]) -> dict[str, Any]:
        """Where no other keyword evaluates properties or items, the rest of them is the additional ones."""
        for keyword, plain_keyword in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if keyword not in node:
                continue
            if node[keyword] in (True, {}):
                del node[keyword]
            elif plain_keyword not in node and not any(name in node for name in (*_ALTERNATIVES, "$ref")):
                node[plain_keyword] = node.pop(keyword)
        return node

    def _write_names(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        """Write propertyNames as properties or as patternProperties."""
        if "propertyNames" not in node:
            return node
        names = self._resolve(node["propertyNames"])
        if names is True or (isinstance(names, dict) and _accepts_every_name(names)):
            return {name: part for name, part in node.items() if name != "propertyNames"}
        if not isinstance(names, dict):
            return node  # no name is allowed: refused below
        listed_names = [names["const"]] if "const" in names else names.get("enum")
        node = _merge_any_name(node)
        other_values = node.get("additionalProperties", True)
        other_keywords = {name: part for name, part in node.items() if name != "propertyNames"}
        if isinstance(listed_names, list) and "patternProperties" not in node:
            properties = dict.fromkeys(filter(_is_text, listed_names), other_values)
            own_properties = {
                name: part for name, part in (node.get("properties") or {}).items() if name in properties
            }
            return {
                **other_keywords,
                "properties": {**properties, **own_properties},
                "additionalProperties": False,
            }
        pattern = _write_pattern(names)
        if pattern is None or node.get("properties") or "patternProperties" in node:
            return node
        return {**other_keywords, "patternProperties": {pattern: other_values}, "additionalProperties": False}

    def _resolve(self, node: Any) -> Any:
        """What a chain of local references leads to."""
        while isinstance(node, dict) and isinstance(node.get("$ref"), str):
            node = follow_reference(self._root, node["$ref"])
        return node


def _lift_required(node: dict[str, Any]) -> dict[str, Any]:
    """Write `required: true` of a property, as in draft 3, into the list of its object."""
    properties = node.get("properties")
    if not isinstance(properties, dict):
        return node
    own_flags = {
        name: part["required"]
        for name, part in properties.items()
        if isinstance(part, dict) and isinstance(part.get("required"), bool)
    }
    if not own_flags:
        return node
    own_names = node.get("required")
    required_names = own_names if isinstance(own_names, list) else []
    lifted_names = [name for name, flag in own_flags.items() if flag and name not in required_names]
    plain_properties = {
        name: {key: value for key, value in part.items() if key != "required"} if name in own_flags else part
        for name, part in properties.items()
    }
    return {**node, "properties": plain_properties, "required": [*required_names, *lifted_names]}


def _merge_any_name(node: dict[str, Any]) -> dict[str, Any]:
    """Write patternProperties of a single pattern that every name matches as additionalProperties."""
    patterns = node.get("patternProperties")
    if not isinstance(patterns, dict) or len(patterns) != 1 or node.get("properties"):
        return node
    [(pattern, values)] = patterns.items()
    if pattern not in _ANY_NAME:
        return node
    other_keywords = {name: part for name, part in node.items() if name != "patternProperties"}
    return {**other_keywords, "additionalProperties": values}


def _drop_idle_keywords(node: dict[str, Any]) -> None:
    """Leave out keywords that say nothing where they stand."""
    if node.get("uniqueItems") is False or node.get("maxItems") in (0, 1):
        node.pop("uniqueItems", None)
    if "if" not in node or not ("then" in node or "else" in node):
        idle_keywords = ["if", "then", "else"]
    else:
        idle_keywords = []
    if node.get("minContains") == 0 and "maxContains" not in node:
        node.pop("contains", None)
    if "contains" not in node:
        idle_keywords += ["minContains", "maxContains"]
    if node.get("not") is False:
        idle_keywords.append("not")
    idle_keywords.append("$recursiveAnchor")  # only a $recursiveRef reads it, which is refused
    if isinstance(node.get("$schema"), str) and _DRAFT not in node["$schema"]:
        idle_keywords.append("$schema")
    if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
        idle_keywords.append("format")
    for keyword in idle_keywords:
        node.pop(keyword, None)


def _limit_numbers(node: dict[str, Any], path: str) -> None:
    """Write bounds of numbers that are too large for the library as the largest that it takes."""
    for keyword, sign in (
        *(("minimum", -1), ("exclusiveMinimum", -1)),
        *(("maximum", 1), ("exclusiveMaximum", 1)),
    ):
        bound = node.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool) or abs(bound) <= _LARGEST:
            continue
        if bound * sign < 0:
            raise SchemaError(f"{path}.{keyword}", f"got {bound}; allowed: -9e18 to 9e18")
        node[keyword] = int(_LARGEST) * sign


def _check_counts(node: dict[str, Any], path: str) -> None:
    """Leave out a count of properties that holds anyway. Raise SchemaError for one that cannot be kept to."""
    properties, required_names = node.get("properties") or {}, node.get("required") or []
    if isinstance(node.get("minProperties"), int) and node["minProperties"] <= len(required_names):
        del node["minProperties"]
    for keyword in ("minProperties", "maxProperties"):
        if keyword in node and any(name not in required_names for name in properties):
            raise SchemaError(f"{path}.{keyword}", "this is kept to only where every property is required")


def _is_remark(keyword: str) -> bool:
    """Whether a keyword's contents are no schema."""
    return keyword in _VALUES or keyword.startswith("x-")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _accepts_every_name(names: Mapping[str, Any]) -> bool:
    """Whether a schema accepts every name: a format is a remark."""
    remarks = ("type", "format", "title", "description", "$comment", "default", "examples")
    return all(keyword in remarks for keyword in names) and names.get("type", "string") == "string"


def _write_pattern(names: Mapping[str, Any]) -> str | None:
    """The pattern of the names that a schema accepts. None: it is not a pattern or a length alone."""
    constraints = {name for name in names if not _accepts_every_name({name: names[name]})} - {"type"}
    if constraints == {"pattern"}:
        return str(names["pattern"])
    if constraints and constraints <= {"minLength", "maxLength"}:
        return f"^(?:.|\\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _check_references(root: Any) -> None:
    """Raise SchemaError for a $ref that leads nowhere, or to itself without a property or an item between."""
    for path, node in _walk(root, ""):
        if isinstance(node.get("$ref"), str):
            _check_reference(root, node, path)


def _check_reference(root: Any, node: Mapping[str, Any], path: str) -> None:
    pending, seen_references, num_steps = [node], set[str](), 0
    start = node["$ref"]
    while pending:
        current = pending.pop()
        reference = current.get("$ref")
        if isinstance(reference, str):
            if reference == start and num_steps:
                raise SchemaError(f"{path}.$ref", f"{start!r} leads to itself without a property or an item")
            if not reference.startswith("#"):
                raise SchemaError(f"{path}.$ref", f"got {reference!r}; allowed: a place in this schema")
            if reference not in seen_references:
                seen_references.add(reference)
                target = follow_reference(root, reference)
                if target is None:
                    raise SchemaError(f"{path}.$ref", f"{reference!r} leads nowhere")
                pending += [target] if isinstance(target, dict) else []
        num_steps += 1
        for name in _ALTERNATIVES:
            parts = current.get(name)
            pending += [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _walk(node: Any, path: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Every object that is a schema, with its path."""
    if isinstance(node, dict):
        yield path, node
        for part_path, part in list_parts(node, path):
            yield from _walk(part, part_path)


def list_parts(node: Mapping[str, Any], path: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """The objects directly inside of a schema that are schemas, with their paths."""
    for name, part in node.items():
        if _is_remark(name):
            continue
        parts: Iterable[tuple[str, Any]] = [(f"{path}.{name}", part)]
        if name in _BY_NAME and isinstance(part, dict):
            parts = [(f"{path}.{name}.{key}", inner) for key, inner in part.items()]
        elif isinstance(part, list):
            parts = [(f"{path}.{name}[{number}]", inner) for number, inner in enumerate(part)]
        yield from ((part_path, inner) for part_path, inner in parts if isinstance(inner, dict))


def follow_reference(root: Any, reference: str) -> Any:
    """What `#/$defs/name` leads to; None if that is nothing. An anchor is found by the library."""
    if reference.startswith("#") and not reference.startswith("#/"):
        return root if reference == "#" else {}
    node = root
    for step in unquote(reference[2:]).split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        else:
            node = node.get(step) if isinstance(node, dict) else None
    return node
