"""What answers keep to of JSON Schemas that tools really send, and how the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from moesaic.core.errors import RequestError
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.testing import byte_tokenizer
from moesaic.text.structured.grammar import check, make_grammar
from moesaic.text.structured.json_schema import prepare_schema
from moesaic.text.structured.vocabulary import Vocabulary

OBJECT = {"type": "object"}
BOOLEANS = {**OBJECT, "additionalProperties": {"type": "boolean"}}


@pytest.fixture(scope="module")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that says whether a schema's grammar accepts a JSON text."""
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bytes"), ["</s>"])
    del tokenizer
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b"</s>"], frozenset([256]))
    library_tokenizer = vocabulary.build_tokenizer(257, (256,))

    def accept(schema: Any, value: Any) -> bool:
        grammar = make_grammar(StructuredOutputsParams(json=json.dumps(schema)), {})
        matcher = LLMatcher(library_tokenizer, grammar, log_level=0)
        tokens = list(json.dumps(value).encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accept


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
