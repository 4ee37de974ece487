"""Reading JSON, and answering what is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.server.errors import Problem
from moesaic.server.json_body import parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_what_json_writes_is_read_back(value: object, ascii_only: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        parse(body)
    except (Problem, json.JSONDecodeError):
        pass


@given(st.text(), st.integers(0xD800, 0xDFFF), st.text())
def test_half_a_character_is_refused(before: str, half: int, after: str) -> None:
    body = json.dumps([before]).encode()[:-2] + f"\\u{half:04x} {after}".encode(errors="replace") + b'"]'
    with pytest.raises((Problem, json.JSONDecodeError)):
        parse(body)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json(constant: str) -> None:
    with pytest.raises(Problem, match="not JSON"):
        parse(f'{{"a": [{constant}]}}'.encode())


def test_the_word_is_fine_in_a_text() -> None:
    assert parse(b'{"a": "NaN \\\\ud800"}') == {"a": "NaN \\ud800"}
