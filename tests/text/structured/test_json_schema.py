"""What answers keep to of JSON Schemas that tools really send, and how the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from moesaic.core.errors import RequestError
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.text.structured import refused_part
from moesaic.text.structured.grammar import check, make_grammar
from moesaic.text.structured.json_schema import prepare_schema
from moesaic.text.structured.refused_part import describe_refusal
from moesaic.text.structured.vocabulary import Vocabulary

OBJECT = {"type": "object"}
BOOLEANS = {**OBJECT, "additionalProperties": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**BOOLEANS, "propertyNames": {"type": "string"}}, {"x": True}, {"x": 1}),
        ({**BOOLEANS, "propertyNames": {"type": "string", "format": "uuid"}}, {"x": True}, {"x": 1}),
        ({**BOOLEANS, "propertyNames": {"enum": ["a", "b"]}}, {"b": True}, {"c": True}),
        ({**BOOLEANS, "propertyNames": {"const": "a"}}, {"a": False}, {"b": False}),
        (
            {
                **BOOLEANS,
                "propertyNames": {"$ref": "#/$defs/key"},
                "$defs": {"key": {"type": "string", "enum": ["a"]}},
            },
            {"a": True},
            {"b": True},
        ),
        ({**BOOLEANS, "propertyNames": {"pattern": "^a+$"}}, {"aa": True}, {"b": True}),
        ({**BOOLEANS, "propertyNames": {"minLength": 2, "maxLength": 3}}, {"abc": True}, {"a": True}),
        (
            {**OBJECT, "properties": {"a": {"type": "int"}}, "unevaluatedProperties": False},
            {"a": 1},
            {"b": 1},
        ),
        ({"type": "list", "items": {"type": "float"}}, [1.5], ["x"]),
        ({"type": "dict", "properties": {"a": {"type": "bool"}}, "required": ["a"]}, {"a": True}, {"a": 1}),
        ({**OBJECT, "properties": {"a": {"type": "any"}}, "required": ["a"]}, {"a": [1]}, {}),
        ({**OBJECT, "properties": {"a": {}}, "additionalProperties": {"not": {}}}, {"a": 1}, {"b": 1}),
        ({**OBJECT, "properties": {"a": {}}, "required": ["a"], "minProperties": 1}, {"a": 1}, {}),
        ({"type": "array", "items": {}, "maxItems": 1, "uniqueItems": True}, [1], [1, 2]),
        (
            {**OBJECT, "properties": {"format": {"type": "string"}, "type": {"const": "x"}}},
            {"type": "x"},
            {"type": 1},
        ),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {**OBJECT, "properties": {"n": {"$ref": "#/$defs/n"}}}}},
            {"n": {"n": {}}},
            {"n": 1},
        ),
    ],
)
def test_what_is_kept_to(accepts: Any, schema: Any, good: Any, bad: Any) -> None:
    assert accepts(schema, good) and not accepts(schema, bad)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**BOOLEANS, "propertyNames": {"anyOf": [{"pattern": "a"}, {"const": "b"}]}}, "propertyNames"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties.a.uniqueItems"),
        ({"properties": {"not": {"not": {"type": "string"}}}}, "properties.not.not"),
        ({"anyOf": [{}, {"if": {}, "then": {}}]}, "anyOf[1].if"),
        ({"$defs": {"a": {"dependentRequired": {"a": ["b"]}}}}, "$defs.a.dependentRequired"),
        ({"items": {"type": "text"}}, "items.type"),
        ({"properties": {"a": {"pattern": "(?!x)y"}}}, "properties.a.pattern"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}}, "$ref"),
        ({"$ref": "#"}, "$ref"),
        ({"items": {"$ref": "#/$defs/a"}}, "items.$ref"),
        ({"items": {"$ref": "https://example.org/a"}}, "items.$ref"),
        ({"properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}}, "properties.a.oneOf"),
        (
            {"anyOf": [{"type": "null"}, {"type": "array", "items": {"oneOf": [{"minimum": 1}, {}]}}]},
            "anyOf[1].items.oneOf",
        ),
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}},
            "$defs.a.oneOf",
        ),
        ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
        (
            {"properties": {"a": {"patternProperties": {"^a": {}, "b$": {}}}}},
            "properties.a.patternProperties",
        ),
        ({"properties": {"a": {"multipleOf": 0.0}, "b": {}}}, "properties.a"),
        ({"properties": {"a": {"enum": []}}}, "properties.a.enum"),
        ({"properties": {"a": {"minimum": 1e30}}}, "properties.a.minimum"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"n": {"$ref": "#/$defs/a", "minimum": 1}}}}},
            "$defs.a.properties.n.$ref",
        ),
    ],
)
def test_what_is_not_kept_to_is_refused_by_its_place(schema: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(StructuredOutputsParams(json=json.dumps(schema)), {})
    assert str(caught.value).startswith(f"structured_outputs.json: at {place}: ")
    assert "%json" not in str(caught.value)


def test_properties_with_the_names_of_keywords_are_properties() -> None:
    schema = {"properties": {"format": {"type": "string"}, "enum": {"type": "int"}, "not": {}}}
    assert prepare_schema(schema) == {
        "properties": {"format": {"type": "string"}, "enum": {"type": "integer"}, "not": {}}
    }


def test_twenty_thousand_choices(accepts: Any) -> None:
    params = StructuredOutputsParams(choice=tuple(f"option {number}" for number in range(20_000)))
    check(params, {})
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b"</s>"], frozenset([256]))
    matcher = LLMatcher(vocabulary.build_tokenizer(257, (256,)), make_grammar(params, {}), log_level=0)
    tokens = list(b"option 12345")
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    assert not matcher.is_error()


def test_the_place_is_found_among_thousands_of_parts_with_few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    properties: dict[str, Any] = {f"p{number}": {"type": "string"} for number in range(3000)}
    properties["p2718"] = {"type": "object", "properties": {"q": {"pattern": "("}}}
    checks: list[Any] = []

    def is_refused(schema: Any) -> bool:
        checks.append(schema)
        return '"("' in json.dumps(schema)

    path, reason = describe_refusal("regex parse error", {"properties": properties}, is_refused)
    assert path == ".properties.p2718.properties.q.pattern" and "regular expression" in reason
    assert len(checks) < 20
    monkeypatch.setattr(refused_part, "MOST_CHECKS", 5)
    checks.clear()
    path, _ = describe_refusal("regex parse error", {"properties": properties}, is_refused)
    assert path == ".properties.p2718" and len(checks) < 20
