"""Reading JSON, and answering what is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.server import json_body
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


@pytest.mark.parametrize(
    ("piece", "most", "says"),
    [
        ("[0],", 1000, "got 1002 lists and objects; allowed: at most 1000"),
        ('{"a":0},', 1000, "got 1002 lists and objects; allowed: at most 1000"),
        ("0,", 4000, "got 4001 items; allowed: at most 4000"),
        ('"",', 2000, "got 4002 quotation marks; allowed: at most 4000"),
    ],
)
def test_a_body_of_many_items_is_refused_before_it_is_parsed(
    piece: str, most: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the event loop for seconds: 6 s for 32 MiB of lists."""
    monkeypatch.setattr(json_body, "MOST_CONTAINERS", 1000)
    monkeypatch.setattr(json_body, "MOST_ITEMS", 4000)
    with pytest.raises(Problem, match=f"the body: {says}"):
        parse(f"[{piece * (most + 1)}0]".encode())
    parse(f"[{piece * (most - 1)}0]".encode())


def test_what_is_in_a_text_is_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MOST_CONTAINERS", 2)
    monkeypatch.setattr(json_body, "MOST_ITEMS", 20)
    text = '[[[{{{,,,"\\' * 9
    assert parse(json.dumps({"a": text[:80]}).encode()) == {"a": text[:80]}
    with pytest.raises(json.JSONDecodeError):
        parse(json.dumps({"a": text[:80]}).encode()[:-2])
    with pytest.raises(Problem, match="got 21 quotation marks; allowed: at most 20"):
        parse(b'"' * 21)
