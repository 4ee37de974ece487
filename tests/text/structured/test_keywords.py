"""Each keyword of JSON Schema is kept to, refused by its place, or says nothing about values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from moesaic.core.errors import RequestError
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.text.structured.grammar import check
from moesaic.text.structured.json_schema import REFUSED_KEYWORDS

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
NUMBER, TEXT, LIST, OBJECT = ({"type": name} for name in ("integer", "string", "array", "object"))
TAGGED = [
    {**OBJECT, "properties": {"kind": {"const": kind}}, "required": ["kind"], "additionalProperties": False}
    for kind in ("cat", "dog")
]
KEPT: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("type", {"type": ["integer", "null"]}, None, "x"),
    ("enum", {"enum": ["a", 1, None]}, 1, "b"),
    ("enum", {"type": "string", "enum": ["a", 1]}, "a", 1),
    ("const", {"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    ("properties", {**OBJECT, "properties": {"a": NUMBER, "b": False}}, {"a": 1}, {"b": 1}),
    ("required", {**OBJECT, "required": ["a"]}, {"a": 1}, {}),
    ("required", {**OBJECT, "properties": {"a": {**NUMBER, "required": True}}}, {"a": 1}, {}),
    ("required", {**OBJECT, "properties": {"a": {**NUMBER, "required": False}}}, {}, {"a": "x"}),
    ("additionalProperties", {**OBJECT, "additionalProperties": NUMBER}, {"b": 1}, {"b": "x"}),
    ("patternProperties", {**OBJECT, "patternProperties": {"^x": NUMBER}}, {"xa": 1}, {"xa": "s"}),
    ("propertyNames", {**OBJECT, "propertyNames": {"enum": ["a"]}}, {"a": 1}, {"b": 1}),
    (
        "propertyNames",
        {**OBJECT, "propertyNames": {"pattern": "^[0-9]+$"}, "patternProperties": {".*": NUMBER}},
        {"1": 1},
        {"a": 1},
    ),
    (
        "propertyNames",
        {**OBJECT, "propertyNames": {"pattern": "^1$"}, "patternProperties": {"": NUMBER}},
        {"1": 1},
        {"1": "x"},
    ),
    ("minProperties", {**OBJECT, "minProperties": 1}, {"a": 1}, {}),
    ("maxProperties", {**OBJECT, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    (
        "unevaluatedProperties",
        {**OBJECT, "properties": {"a": {}}, "unevaluatedProperties": False},
        {"a": 1},
        {"b": 1},
    ),
    ("items", {**LIST, "items": NUMBER}, [1], ["a"]),
    ("items", {"$schema": DRAFT_7, **LIST, "items": [NUMBER, TEXT], "minItems": 2}, [1, "a"], ["a", 1]),
    (
        "prefixItems",
        {**LIST, "prefixItems": [NUMBER, TEXT], "items": False, "minItems": 2},
        [1, "a"],
        ["a", 1],
    ),
    ("additionalItems", {**LIST, "items": [NUMBER], "additionalItems": TEXT}, [1, "a"], [1, 2]),
    ("unevaluatedItems", {**LIST, "prefixItems": [NUMBER], "unevaluatedItems": False}, [1], [1, 2]),
    ("minItems", {**LIST, "minItems": 1}, [1], []),
    ("maxItems", {**LIST, "maxItems": 1}, [1], [1, 2]),
    ("minLength", {**TEXT, "minLength": 2}, "ab", "a"),
    ("maxLength", {**TEXT, "maxLength": 2, "pattern": "^a+$"}, "aa", "aaa"),
    ("pattern", {**TEXT, "pattern": "a+"}, "xaay", "b"),
    ("format", {**TEXT, "format": "date"}, "2020-01-02", "x"),
    ("minimum", {"type": "number", "minimum": 2}, 2, 1.5),
    ("minimum", {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, 1.5, "x"),
    ("maximum", {**NUMBER, "maximum": 2}, 2, 3),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 2}, 2.5, 2),
    ("exclusiveMinimum", {"$schema": DRAFT_4, **NUMBER, "minimum": 2, "exclusiveMinimum": True}, 3, 2),
    ("exclusiveMaximum", {**NUMBER, "exclusiveMaximum": 2}, 1, 2),
    ("multipleOf", {**NUMBER, "multipleOf": 5}, 10, 11),
    ("divisibleBy", {**NUMBER, "divisibleBy": 5}, 10, 11),
    ("anyOf", {"anyOf": [NUMBER, {"type": "null"}]}, None, "a"),
    ("oneOf", {"oneOf": TAGGED}, {"kind": "cat"}, {"kind": "cow"}),
    (
        "allOf",
        {"allOf": [{**OBJECT, "required": ["a"]}, {"properties": {"a": NUMBER}}]},
        {"a": 1},
        {"a": "x"},
    ),
    ("$ref", {"$ref": "#/$defs/a b", "$defs": {"a b": NUMBER}}, 1, "a"),
    ("$ref", {"$ref": "#/$defs/a%3Cb%3E", "$defs": {"a<b>": NUMBER}}, 1, "a"),
    ("$ref", {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": NUMBER}}, 3, 2),
    ("definitions", {"$ref": "#/definitions/a", "definitions": {"a": NUMBER}}, 1, "a"),
    ("$anchor", {"$ref": "#x", "$defs": {"a": {"$anchor": "x", **NUMBER}}}, 1, "a"),
    ("$dynamicAnchor", {"$ref": "#x", "$defs": {"a": {"$dynamicAnchor": "x", **NUMBER}}}, 1, "a"),
    ("$id", {"$id": "http://example.org/s", **NUMBER}, 1, "a"),
    ("id", {"$schema": DRAFT_4, "id": "http://example.org/s", **NUMBER}, 1, "a"),
    ("$schema", {"$schema": "http://example.org/own", **NUMBER}, 1, "a"),
    ("if", {**NUMBER, "if": {"const": 1}}, 1, "a"),
    ("then", {**NUMBER, "then": {"const": 1}}, 2, "a"),
    ("not", {**NUMBER, "not": False}, 1, "a"),
    ("contains", {**LIST, "contains": NUMBER, "minContains": 0}, ["a"], 1),
    ("uniqueItems", {**LIST, "items": NUMBER, "uniqueItems": False}, [1, 1], ["a"]),
    (
        "discriminator",
        {"oneOf": TAGGED, "discriminator": {"propertyName": "kind"}},
        {"kind": "dog"},
        {"kind": 1},
    ),
]
"""Keyword, a schema with it, a value that it accepts, and one that it does not."""
REFUSED: dict[str, dict[str, Any]] = {
    "oneOf": {"oneOf": [{"minimum": 1}, {"maximum": 5}]},
    "not": {"not": {"type": "string"}},
    "if": {"if": NUMBER, "then": {"minimum": 1}},
    "contains": {**LIST, "contains": NUMBER},
    "uniqueItems": {**LIST, "items": TEXT, "uniqueItems": True},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {**OBJECT, "dependencies": {"a": ["b"]}},
    "propertyNames": {**OBJECT, "propertyNames": {"not": {"enum": ["a"]}}},
    "unevaluatedProperties": {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
    "unevaluatedItems": {"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "extends": {"extends": NUMBER},
    "disallow": {"disallow": "integer"},
    "formatMinimum": {**TEXT, "format": "date", "formatMinimum": "2020-01-01"},
    "minProperties": {**OBJECT, "properties": {"a": {}}, "minProperties": 1},
    "pattern": {**TEXT, "pattern": "^(?!a)"},
    "patternProperties": {**OBJECT, "patternProperties": {"^a": {}, "b$": {}}},
    "$ref": {"$ref": "https://example.org/s"},
}
"""Keyword -> a schema in which no answer can be made to keep to it."""
REMARKS: dict[str, Any] = {
    "title": "t",
    "description": "d",
    "default": {"uniqueItems": True},
    "examples": [{"not": {}}],
    "example": 1,
    "deprecated": True,
    "readOnly": True,
    "writeOnly": True,
    "nullable": True,
    "optional": True,
    "$comment": "c",
    "$vocabulary": {"https://example.org/v": True},
    "$recursiveAnchor": True,
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {"type": "object"},
    "markdownDescription": "m",
    "enumDescriptions": ["e"],
    "x-own": {"uniqueItems": 1},
    "else": {"const": 1},
    "minContains": 1,
    "maxContains": 1,
    "format": "emoji",
}
"""Keyword -> a value with which it says nothing about values."""


@pytest.mark.parametrize(("keyword", "schema", "good", "bad"), KEPT)
def test_a_keyword_is_kept_to(
    accepts: Callable[[Any, Any], bool], keyword: str, schema: dict[str, Any], good: Any, bad: Any
) -> None:
    inner = {name: part for name, part in schema.items() if name not in ("$defs", "definitions", "$schema")}
    outer = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    nested = {**OBJECT, "properties": {"deep": inner}, "required": ["deep"], **outer}
    assert f'"{keyword}"' in json.dumps(schema)
    for whole, wrap in ((schema, lambda value: value), (nested, lambda value: {"deep": value})):
        check(StructuredOutputsParams(json=json.dumps(whole)), {})
        assert accepts(whole, wrap(good)) and not accepts(whole, wrap(bad))


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_kept_to_is_refused_by_its_place(keyword: str) -> None:
    for schema, place in (
        (REFUSED[keyword], keyword),
        (
            {**OBJECT, "properties": {"deep": {**LIST, "items": REFUSED[keyword]}}},
            f"properties.deep.items.{keyword}",
        ),
    ):
        with pytest.raises(RequestError) as caught:
            check(StructuredOutputsParams(json=json.dumps(schema)), {})
        assert str(caught.value).startswith(f"structured_outputs.json: at {place}: ")


@pytest.mark.parametrize("keyword", REMARKS)
def test_a_remark_changes_nothing(accepts: Callable[[Any, Any], bool], keyword: str) -> None:
    schema = {**TEXT, keyword: REMARKS[keyword]}
    check(StructuredOutputsParams(json=json.dumps(schema)), {})
    assert accepts(schema, "anything") and not accepts(schema, 1)


def test_every_refused_keyword_of_the_package_is_tested() -> None:
    tested = {*REFUSED, *REMARKS, "then"}
    assert {name for name in REFUSED_KEYWORDS if not name.startswith("format")} <= tested
