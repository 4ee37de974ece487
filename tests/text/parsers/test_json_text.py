"""JSON that is read strictly, in pieces: what `json` reads is read, and what is passed on is JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moesaic.text.parsers.events import Event, MalformedText
from moesaic.text.parsers.json_text import read_arguments, read_json
from moesaic.text.parsers.reader import Reader, is_at_end, skip_blank

PARTS = st.sampled_from(
    [
        *'{}[]",: \n',
        '"a"',
        '"a": ',
        ', "b": ',
        "-",
        "0",
        "12",
        ".5",
        "e+3",
        "true",
        "null",
        "\\",
        "\\n",
        "\\u00e9",
    ]
)


def read(text: str, pieces: list[str] | None = None, is_cut: bool = False) -> tuple[str, str] | None:
    """What is passed on of a JSON value, and the brackets that it lacks. None: it is malformed."""
    reader, passed_texts = Reader(), list[str]()

    def pass_on(piece: str) -> list[Event]:
        passed_texts.append(piece)
        return []

    def steps() -> Any:
        closings = yield from read_json(reader, pass_on)
        yield from skip_blank(reader)
        if not (yield from is_at_end(reader)):
            raise MalformedText
        return closings

    running = steps()
    try:
        for piece in pieces or [text]:
            reader.add(piece)
            assert next(running) is None
        reader.end(is_cut)
        next(running)
    except StopIteration as ending:
        return "".join(passed_texts), ending.value
    except MalformedText:
        return None
    raise AssertionError("it waits for more text")


def load(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse, strict=False)


@given(parts=st.lists(PARTS, min_size=1, max_size=12))
@example(['{"a": [1, 2.5e-3, {"b": null}], "c": "\\u00e9\\n"}'])
@example(["[", "[]", ",", "{}", "]"])
def test_what_json_reads_is_read_and_what_is_read_is_json(parts: list[str]) -> None:
    text = "".join(parts)
    result = read(text)
    try:
        value = load(text)
    except ValueError:
        assert result is None or result[1] or "\\" in text, text
    else:
        assert result is not None and result[1] == "" and load(result[0]) == value, text
    if result is not None:
        passed_text, closings = result
        json.loads(passed_text + closings)
        assert read(text, list(text)) == result


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    share=st.floats(0, 1),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
)
def test_any_value_is_read_and_no_beginning_of_one_is_complete(
    value: Any, share: float, indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert read(text) == (text, "")
    if isinstance(value, list | dict):
        assert read(text[: int(share * len(text))], is_cut=True) is None
        assert read(text[: int(share * len(text))]) != (text, "") or share == 1


@pytest.mark.parametrize(
    ("text", "passed_text", "closings"),
    [
        ('{"a": 1', '{"a": 1', "}"),
        ('{"a": [{"b": "c"', '{"a": [{"b": "c"', "}]}"),
        ('{"a": [ ', '{"a": [', "]}"),
        ("{", "{", "}"),
        ('{"a": True, "b": [None, False]}', '{"a": true, "b": [null, false]}', ""),
        ('["a\nb\tc\x00"]', '["a\\nb\\tc\\u0000"]', ""),
        (r'["\d \. \$ \users \u12 \\"]', r'["\\d \\. \\$ \\users \\u12 \\"]', ""),
        ('["a\\\nb"]', '["a\\\\\\nb"]', ""),
    ],
)
def test_what_can_only_mean_one_thing_is_mended(text: str, passed_text: str, closings: str) -> None:
    assert read(text) == read(text, list(text)) == (passed_text, closings)
    json.loads(passed_text + closings)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "b',
        '{"a"',
        '{"a":',
        '{"a": 1,',
        "[1,]",
        "['a']",
        r'["\'"]',
        "[+1]",
        "[.5]",
        "[1 2]",
        "[" + "1" * 2000,
    ],
)
def test_what_may_mean_several_things_is_malformed(text: str) -> None:
    assert read(text) is None and read(text, list(text)) is None


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (' {"a": 1} ', '{"a": 1}'),
        ("null", "{}"),
        ("None", "{}"),
        (" ", ""),
        ('""', "{}"),
        (r'"{\"a\": \"\\\"\"}"', r'{"a": "\""}'),
        (r'"\"{}\""', "{}"),
        (r'"{\"a\": [1"', '{"a": [1]}'),
    ],
)
def test_arguments_are_an_object(text: str, arguments: str) -> None:
    reader, passed_texts = Reader(), list[str]()
    reader.add(text)
    reader.end()

    def pass_on(piece: str) -> list[Event]:
        passed_texts.append(piece)
        return []

    for event in read_arguments(reader, pass_on):
        assert event is None
    assert "".join(passed_texts) == arguments
