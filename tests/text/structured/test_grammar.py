"""From the form of an answer to a grammar: what is taken, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from moesaic.core.errors import RequestError
from moesaic.core.structured_outputs import MOST_CHARACTERS, StructuredOutputsParams
from moesaic.text.structured.grammar import check, literal, make_grammar
from moesaic.text.structured.token_filter import GrammarFilter
from moesaic.text.structured.vocabulary import Vocabulary

SPECIAL = {"<end>": 256, "<call>": 257}
WIDTH = 300
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>", b"<call>"], frozenset({256, 257}))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
SPECIAL_TAG = {
    "structures": [{"begin": "<call>add ", "schema": {"type": "integer"}, "end": "!"}],
    "triggers": ["<call>"],
}


def ids(text: str) -> list[int]:
    """One token for each byte, and one for each special token."""
    found: list[int] = []
    while text:
        token = next((token for token in SPECIAL if text.startswith(token)), None)
        found += [SPECIAL[token]] if token else text[0].encode()
        text = text[len(token or text[0]) :]
    return found


def accepts(text: str, **form: Any) -> bool:
    """Whether an answer of the form can be `text` and nothing else."""
    params = StructuredOutputsParams(**form)
    check(params, SPECIAL)
    matcher = LLMatcher(VOCABULARY.build_tokenizer(WIDTH, (256,)), make_grammar(params, SPECIAL))
    found = GrammarFilter(matcher, WIDTH)
    return found.valid(ids(text)) == len(ids(text)) and found.accept(ids(text)) and found.valid([256]) == 1


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json": PERSON}, ['{"name":"Bo","age":4}', '{\n  "name": "B", "age": 4\n}'], ["{}", "[]", "4"]),
        ({"json": '{"type": "array"}'}, ["[]", '[1, "a"]'], ["{}", "[1,]"]),
        ({"json_object": True}, ["{}", '{"a": [1, {}]}'], ["[]", "4", ""]),
        ({"regex": "[a-c]+x?"}, ["a", "abcx"], ["x", "ax ", "d"]),
        ({"choice": ["yes", 'n"o\n']}, ["yes", 'n"o\n'], ["ye", "no", "yesyes"]),
        ({"grammar": 'start: "a" b\nb: /[0-9]/'}, ["a1"], ["a", "1"]),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, ["ab", "ac"], ["a", "bc"]),
        ({"structural_tag": TAG}, ["free <f text", "x <f=add>12</f> y"], ["<f=add>x</f>", "<f=sub>1</f>"]),
        ({"structural_tag": SPECIAL_TAG}, ["add 1", "x<call>add 7!y"], ["<call>x", "<call>add x!"]),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"","age":1}'], ['{"name": "","age":1}']),
        ({"json": PERSON, "whitespace_pattern": "_?"}, ['{_"name":"","age":1_}'], ['{ "name":"","age":1}']),
        (
            {"json": {"properties": {"a": {}}, "type": "object"}, "disable_additional_properties": True},
            ['{"a": 1}', "{}"],
            ['{"b": 1}'],
        ),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_form_accepts_and_refuses(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(text, **form)] == []
    assert [text for text in bad if accepts(text, **form)] == []


def test_formats_that_are_not_known_are_remarks() -> None:
    schema = {"type": "object", "properties": {"format": {"type": "integer", "format": "int32"}}}
    assert accepts('{"format": 4}', json=schema) and not accepts('{"format": "x"}', json=schema)
    assert accepts('"2024-02-28T10:00:00Z"', json={"type": "string", "format": "date-time"})
    assert not accepts('"today"', json={"type": "string", "format": "date-time"})
    assert accepts('{"format":"int32"}', json={"const": {"format": "int32"}})


def test_white_space_has_an_end() -> None:
    assert accepts("{\n" + 20 * " " + "}", json={"type": "object"})
    assert not accepts("{\n" + 21 * " " + "}", json={"type": "object"})
    assert not accepts("{\n\n}", json={"type": "object"})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {},
            "structured_outputs: got none of them; allowed: one of json, regex, choice, grammar, json_object",
        ),
        ({"json_object": False}, "structured_outputs: got none of them"),
        ({"json": "{}", "regex": "a"}, "structured_outputs: got json, regex; allowed: one of json, regex"),
        ({"json": 4}, "structured_outputs.json: got 4; allowed: a JSON Schema"),
        ({"json": "{"}, "structured_outputs.json: not JSON: "),
        ({"json": "4"}, "structured_outputs.json: got neither an object nor a boolean"),
        ({"json": {"type": "person"}}, "structured_outputs.json: at type: got 'person'; allowed: "),
        ({"json": {"uniqueItems": True}}, "structured_outputs.json: at uniqueItems: an answer cannot"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json: got a mapping that is not JSON"),
        ({"json": 400 * '{"items":' + "{}" + 400 * "}"}, "structured_outputs.json: "),
        ({"json": 9000 * '{"items":' + "{}" + 9000 * "}"}, "structured_outputs.json: not JSON: "),
        ({"json": {"x-guidance": 3}}, "structured_outputs.json: invalid type: integer"),
        ({"regex": "(a"}, "structured_outputs.regex: at 1(8): invalid regex"),
        ({"regex": 4}, "structured_outputs.regex: got 4; allowed: a text"),
        ({"regex": "a" * (MOST_CHARACTERS + 1)}, "structured_outputs.regex: got 1048577 characters"),
        ({"choice": []}, "structured_outputs.choice: got []; allowed: a list of texts"),
        ({"choice": "ab"}, "structured_outputs.choice: got ab; allowed: a list of texts"),
        ({"choice": ["a", ""]}, "structured_outputs.choice: got ['a', '']; allowed"),
        ({"grammar": "start: b"}, 'structured_outputs.grammar: at 1(8): unknown name: "b"'),
        ({"grammar": "start: <|call|>"}, "structured_outputs.grammar: at 1(8): unknown special token"),
        ({"structural_tag": {}}, "structured_outputs.structural_tag: no 'structures'; allowed: an object"),
        ({"structural_tag": TAG | {"triggers": ["x"]}}, "structured_outputs.structural_tag: got one that"),
        (
            {"structural_tag": TAG | {"structures": []}},
            "structured_outputs.structural_tag: got {",
        ),
        ({"regex": "a", "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace: got 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_form_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(StructuredOutputsParams(**form), SPECIAL)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert caught.value.field == message.split(":")[0]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(RequestError, match="structured_outputs: got 'jsn'; allowed: json, regex"):
        StructuredOutputsParams.from_mapping({"jsn": {}})


def test_special_tokens_are_tokens_in_a_literal() -> None:
    assert literal("", SPECIAL) == ""
    assert literal('a"<call>b<end>', SPECIAL) == '"a\\"" <[257]> "b" <[256]>'
