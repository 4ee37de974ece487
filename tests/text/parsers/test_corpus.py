"""The corpus of answers: each one as a whole, by character, in random pieces, and cut everywhere."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from moesaic.text.parsers.events import Event
from moesaic.text.parsers.table import CALLS, Formats

from .test_generated import join
from .write_corpus import FOLDER, write_text
from .writers import TOOLS, WRITERS

Read = tuple[list[tuple[str, str, bool]], str, str]


@cache
def corpus(syntax: str) -> list[dict[str, Any]]:
    lines = (FOLDER / f"{syntax}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read(syntax: str, answer: dict[str, Any], pieces: list[str], is_cut: bool = False) -> Read:
    parser = Formats(syntax, answer["reasoning_parser"]).parser(TOOLS, answer["in_reasoning"])
    assert parser is not None
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)]
    return join(events + parser.finish(is_cut))


def test_the_corpus_is_large_and_as_it_was_written() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(WRITERS)
    assert {CALLS[syntax] for syntax in WRITERS} == set(CALLS.values())
    assert all(len(corpus(syntax)) >= 30 for syntax in WRITERS)
    assert sum(len(corpus(syntax)) for syntax in WRITERS) >= 400
    for syntax in WRITERS:
        assert (FOLDER / f"{syntax}.jsonl").read_text(encoding="utf-8") == write_text(syntax)


@pytest.mark.parametrize("syntax", WRITERS)
def test_every_answer_is_read(syntax: str) -> None:
    pieces = random.Random(0)
    for answer in corpus(syntax):
        text = answer["text"]
        calls, reasoning, content = read(syntax, answer, [text])
        found = [[name, json.loads(arguments)] for name, arguments, _ in calls]
        wanted = (answer["calls"], answer["reasoning"], answer["content"])
        assert (found, reasoning, content.strip()) == wanted, answer["name"]
        assert all(is_complete for *_, is_complete in calls), answer["name"]
        assert read(syntax, answer, list(text)) == (calls, reasoning, content), answer["name"]
        for _ in range(3):
            places = sorted(pieces.sample(range(len(text) + 1), 4))
            parts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
            assert read(syntax, answer, parts) == (calls, reasoning, content), answer["name"]


@pytest.mark.slow
@pytest.mark.parametrize("syntax", WRITERS)
def test_an_answer_that_is_cut_anywhere_claims_no_more_than_it_has(syntax: str) -> None:
    for answer in corpus(syntax):
        text = answer["text"]
        for place in range(len(text)):
            calls, reasoning, content = read(syntax, answer, [text[:place]], is_cut=True)
            for found, wanted_text in ((reasoning, answer["reasoning"]), (content, answer["content"])):
                size = min(len(found.strip()), len(wanted_text))
                # The beginning of a tag may be text.
                assert found.strip()[:size] == wanted_text[:size] or found.strip() in text
            if not answer["calls"]:  # before its damage a call may have begun
                assert not any(is_complete for *_, is_complete in calls), (answer["name"], place)
                continue
            assert [name for name, *_ in calls] == [name for name, _ in answer["calls"][: len(calls)]]
            for (_, arguments, is_complete), (_, wanted) in zip(calls, answer["calls"], strict=False):
                assert not is_complete or json.loads(arguments) == wanted, (answer["name"], place)
