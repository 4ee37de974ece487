"""Text that becomes JSON by a tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.text.parsers.values import ValueSchema, find_parameters, find_types, write_json

from .answers import TOOLS


def schema(one: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": one}, **more}


@pytest.mark.parametrize(
    ("one", "text", "found"),
    [
        ({"type": "string"}, "42", '"42"'),
        ({"type": "string"}, ' "a"\n', '" \\"a\\"\\n"'),
        ({"type": "integer"}, " 42\n", "42"),
        ({"type": "integer"}, "4e", '"4e"'),
        ({"type": "integer"}, "9" * 30, "9" * 30),
        ({"type": "integer"}, "0180", "180"),
        ({"type": "integer"}, "-00", "-0"),
        ({"type": "number"}, "+01.50", "1.50"),
        ({"type": ["number", "string"]}, "0180", '"0180"'),
        ({}, "0180", '"0180"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"type": "array"}, '[1, "€"]', '[1, "€"]'),
        ({"type": "float"}, "1.50", "1.50"),
        ({"type": "double"}, "2", "2"),
        ({"type": "int"}, "2", "2"),
        ({"type": "bool"}, "True", "true"),
        ({"type": "dict"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "list"}, "[1]", "[1]"),
        ({"type": "str"}, "1", '"1"'),
        ({"type": "any"}, "1", "1"),
        ({"type": "array"}, "{}", '"{}"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 3}, "3", "3"),
        ({"$ref": "#/$defs/n"}, "3", "3"),
        ({"$ref": "#/$defs/lost"}, "3", "3"),
        ({}, "plain", '"plain"'),
        ({}, '{"a": 1}', '{"a": 1}'),
        (True, "[1", '"[1"'),
        ({"type": "array"}, "[{'x': None, 'y': True}, 1.5]", '[{"x": null, "y": true}, 1.5]'),
        (
            {"type": "object"},
            """{'a': 'it\\'s', "b": 'say "x" \\x41', 'c': "True"}""",
            r"""{"a": "it's", "b": "say \"x\" \u0041", "c": "True"}""",
        ),
        ({"type": ["object", "string"]}, "{'a': False}", '{"a": false}'),
        ({"type": "string"}, "{'a': False}", "\"{'a': False}\""),
        ({}, "['a']", "\"['a']\""),
        ({"type": "array"}, "['a', b]", "\"['a', b]\""),
        ({"type": "array"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": "integer"}, "None", '"None"'),
    ],
)
def test_a_value_has_a_type_of_its_schema(one: Any, text: str, found: str) -> None:
    types = find_types(schema(one, **{"$defs": {"n": {"type": "integer"}}}), "x")
    assert write_json(text, types) == found
    json.loads(found)


def test_what_no_tool_says_has_no_type() -> None:
    assert find_types(find_parameters(TOOLS, "get_weather"), "city") == {"string"}
    assert find_types(find_parameters(TOOLS, "get_weather"), "other") == set()
    assert find_parameters(TOOLS, "other") == {} == find_parameters(TOOLS, "now")
    assert find_types({"properties": 5}, "x") == find_types({"properties": {"x": [1]}}, "x") == set()


def test_a_schema_that_refers_to_itself_is_looked_at_once() -> None:
    own = {"anyOf": [{"$ref": "#/properties/x"}] * 50 + [{"type": "integer"}]}
    assert find_types(schema(own), "x") == {"integer"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("a'\"\\\\\n\t{é", max_size=5),
        lambda part: (
            st.lists(part, max_size=3) | st.dictionaries(st.text("a'\"", max_size=3), part, max_size=3)
        ),
    )
)
def test_what_python_writes_is_read(value: Any) -> None:
    assert json.loads(write_json(repr([value]), frozenset({"array"}))) == [value]


def test_damaged_text_takes_linear_time() -> None:
    text = "{'" + "\\'" * 100_000
    assert json.loads(write_json(text, frozenset({"object"}))) == text


def test_schemas_that_contain_themselves_are_followed_in_linear_time() -> None:
    itself = {"$ref": "#"}
    tree = {
        "type": "object",
        "properties": {"a": itself},
        "additionalProperties": {"anyOf": [itself, itself]},
        "items": itself,
    }
    value = ValueSchema.read(tree)
    for number in range(200):
        value = value.child("a" if number % 2 else "b", number)
        assert len(value.parts) <= 6 and value.types == {"object"}
