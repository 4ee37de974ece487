"""Random calls in every syntax, sound and damaged: no exception, nothing lost, the same in every cutting."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from moesaic.text.parsers.nested_calls import MiniMaxM3
from moesaic.text.parsers.table import CALLS, Formats
from moesaic.text.parsers.tagged_calls import TaggedCalls

from .writers import DAMAGES, TOOLS, WRITERS, Call, Damage, plain

pytestmark = pytest.mark.slow
WORDS = st.text(st.sampled_from("abé北😀 \\\"{}[]:,\n'&"), max_size=12).map(str.strip)
LITERALS = st.sampled_from(
    ["a </parameter> b", "c </function> d", "e <arg_key> f", "g </tool_call> h", "{", '"}']
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS | LITERALS,
        "days": st.integers(-(10**20), 10**20),
        "where": st.dictionaries(WORDS, st.none() | st.booleans() | WORDS, max_size=3),
        "exact": st.booleans(),
    },
)
CALLS_OF_AN_ANSWER = st.lists(
    st.tuples(st.sampled_from(["get_weather", "now"]), ARGUMENTS), min_size=1, max_size=3
)


def test_every_syntax_has_a_writer() -> None:
    assert {CALLS[name] for name in WRITERS} == set(CALLS.values())


def read(name: str, pieces: list[str], is_cut: bool = False) -> list[Event]:
    parser = Formats(name, "openai_gptoss" if name == "openai" else None).parser(TOOLS, False)
    assert parser is not None
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish(is_cut)


def join(events: list[Event]) -> tuple[list[tuple[str, str, bool]], str, str]:
    """Name, arguments and completeness of each call, the reasoning, and the content."""
    calls = [
        (
            event.name,
            "".join(e.text for e in events if isinstance(e, Arguments) and e.index == event.index),
            CallEnd(event.index) in events,
        )
        for event in events
        if isinstance(event, CallStart)
    ]
    reasoning, content = (
        "".join(event.text for event in events if isinstance(event, kind)) for kind in (Reasoning, Content)
    )
    return calls, reasoning, content


def cut(text: str, places: list[int]) -> list[str]:
    return [
        text[begin:end]
        for begin, end in pairwise([0, *sorted(place % (len(text) + 1) for place in places), len(text)])
    ]


@pytest.mark.parametrize("name", WRITERS)
@given(
    calls=CALLS_OF_AN_ANSWER,
    damage=st.frozensets(st.sampled_from(DAMAGES)),
    lead=st.sampled_from(["", "I look.\n"]),
    places=st.lists(st.integers(0, 999), max_size=4),
)
def test_calls_are_recovered(
    name: str, calls: list[Call], damage: Damage, lead: str, places: list[int]
) -> None:
    if damage:  # in a value whose end is missing, nobody can tell a tag from the text of one
        calls = [
            (tool, {key: value for key, value in arguments.items() if "<" not in plain(value)})
            for tool, arguments in calls
        ]
    text = lead * (name != "openai") + WRITERS[name](calls, damage)
    events = join(read(name, [text]))
    assert events == join(read(name, list(text))) == join(read(name, cut(text, places)))
    found, _, content = events
    assert [(tool, json.loads(arguments)) for tool, arguments, _ in found] == calls, text
    assert all(is_complete for *_, is_complete in found), text
    assert content.strip() == lead.strip() * (name != "openai"), text


@pytest.mark.parametrize("name", WRITERS)
@given(calls=CALLS_OF_AN_ANSWER, damage=st.frozensets(st.sampled_from(DAMAGES)), share=st.floats(0, 1))
def test_a_cut_answer_claims_no_call_that_it_lacks(
    name: str, calls: list[Call], damage: Damage, share: float
) -> None:
    text = WRITERS[name](calls, damage)
    text = text[: int(len(text) * share)]
    events = join(read(name, [text], is_cut=True))
    assert events == join(read(name, list(text), is_cut=True))
    for _, arguments, is_complete in events[0]:
        if is_complete:
            json.loads(arguments)


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if issubclass(CALLS[name], TaggedCalls | MiniMaxM3)]
)
@given(calls=CALLS_OF_AN_ANSWER, data=st.data())
def test_a_text_that_lost_characters_makes_valid_json(
    name: str, calls: list[Call], data: st.DataObject
) -> None:
    """Any piece of a tagged call may be missing. If the model ended it, its arguments are valid JSON."""
    text = WRITERS[name](calls, frozenset())
    begin = data.draw(st.integers(0, len(text)))
    text = text[:begin] + text[begin + data.draw(st.integers(1, 12)) :]
    events = join(read(name, [text]))
    assert events == join(read(name, list(text)))
    for _, arguments, is_complete in events[0]:
        assert is_complete and isinstance(json.loads(arguments), dict), text
