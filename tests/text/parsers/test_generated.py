"""Random calls in every syntax, sound and damaged.

The law: no exception; nothing lost; the arguments of a call are a JSON object, or the call is content; the
same in every cutting.
"""

from __future__ import annotations

import itertools
import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from moesaic.text.parsers.table import CALLS, Formats

from .writers import BREAKS, DAMAGES, TOOLS, WRITERS, Call, Damage, plain

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


def read(name: str, pieces: list[str], is_cut: bool = False, is_forced: bool = False) -> list[Event]:
    parser = Formats(name, "openai_gptoss" if name == "openai" else None).parser(TOOLS, False, is_forced)
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
    assert events == join(read(name, cut(text, places), is_forced=True))
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


SIGNS = st.sampled_from([*"{}[]\"':,\\<>x \n", "True", "1", "\\'", "]}", "```", "u00"])
WORD = re.compile("Z[0-9]+Z")
"""A value that stands in a text once, so that it can be looked for in what was read."""


@st.composite
def marked_calls(draw: st.DrawFn) -> list[Call]:
    """Calls whose arguments have words that can be looked for."""
    numbers = itertools.count(1)
    word = st.builds(lambda: f"Z{next(numbers)}Z")
    arguments = st.fixed_dictionaries(
        {}, optional={"city": word, "days": st.just(2), "where": st.dictionaries(WORDS, word, max_size=2)}
    )
    tools = st.sampled_from(["get_weather", "now"])
    return draw(st.lists(st.tuples(tools, arguments), min_size=1, max_size=3))


@st.composite
def damaged_texts(draw: st.DrawFn, name: str) -> str:
    """Calls from which up to three pieces are taken, with signs or marks of the syntax in their place."""
    text = WRITERS[name](draw(marked_calls()), draw(st.frozensets(st.sampled_from((*DAMAGES, *BREAKS)))))
    marks = st.sampled_from(sorted(Formats(name).marks(TOOLS)))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = begin + draw(st.integers(0, 12))
        text = text[:begin] + draw(st.just("") | SIGNS | marks) + text[end:]
    return text


@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data(), is_cut=st.booleans(), places=st.lists(st.integers(0, 999), max_size=4))
def test_damage_loses_nothing_and_makes_no_invalid_json(
    name: str, data: st.DataObject, is_cut: bool, places: list[int]
) -> None:
    text = data.draw(damaged_texts(name))
    calls, reasoning, content = join(read(name, [text], is_cut))
    assert (calls, reasoning, content) == join(read(name, list(text), is_cut))
    assert (calls, reasoning, content) == join(read(name, cut(text, places), is_cut))
    for _, arguments, is_complete in calls:
        assert is_complete or is_cut, text
        assert not is_complete or isinstance(json.loads(arguments), dict), text
    if not (calls or name == "openai"):  # whose headers are no part of a text
        assert content.strip() == text.strip()
    seen_text = "".join([reasoning, content, *(part for call in calls for part in call[:2])])
    assert set(WORD.findall(text)) <= set(WORD.findall(seen_text)), text
