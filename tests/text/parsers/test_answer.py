"""Every syntax: what is found, wherever the text is cut, and that nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.text.parsers import reader
from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from moesaic.text.parsers.reader import Reader
from moesaic.text.parsers.table import CALLS, Formats

from .answers import COMPLETE, DAMAGED, NO_CALLS, TOOLS, Answer

CASES = [pytest.param(answer, id=name) for name, answer in (COMPLETE | DAMAGED).items()]
BROKEN = [
    pytest.param(name, text, id=f"{name} {text[:40]}") for name, texts in NO_CALLS.items() for text in texts
]


def events(answer: Answer, *pieces: str, is_cut: bool = False) -> list[Event]:
    """The events of the answer's text in these pieces; neighbours of one kind are joined."""
    reasoning = None if answer.reasoning_parser == "none" else answer.reasoning_parser
    parser = Formats(answer.parser, reasoning).parser(TOOLS, answer.inside)
    assert parser is not None
    found: list[Event] = []
    for event in [each for piece in pieces for each in parser.push(piece)] + parser.finish(is_cut):
        last = found[-1] if found else None
        if isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
            found[-1] = Arguments(event.index, last.text + event.text)
        elif isinstance(event, (Content, Reasoning)) and type(last) is type(event):
            found[-1] = type(event)(last.text + event.text)  # type: ignore[union-attr]
        else:
            found.append(event)
    return found


def text_of(found: list[Event], kind: type) -> str:
    return "".join(event.text for event in found if isinstance(event, kind))


def cut(text: str, *places: int) -> list[str]:
    ends = [0, *sorted(places), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


@pytest.mark.parametrize("answer", CASES)
def test_calls_content_and_reasoning_are_told_apart(answer: Answer) -> None:
    found = events(answer, answer.text)
    begun = [event for event in found if isinstance(event, CallStart)]
    calls = [
        (one.name, text_of([e for e in found if getattr(e, "index", None) == one.index], Arguments))
        for one in begun
    ]
    assert tuple(calls) == answer.calls
    assert [one.index for one in begun] == list(range(len(begun)))
    assert tuple(one.id for one in begun) == (answer.ids or (None,) * len(begun))
    assert (text_of(found, Content), text_of(found, Reasoning)) == (answer.content, answer.reasoning)
    assert sum(isinstance(event, CallEnd) for event in found) == len(begun)


@pytest.mark.parametrize("answer", CASES)
def test_cutting_changes_nothing(answer: Answer) -> None:
    whole = events(answer, answer.text)
    assert events(answer, *answer.text) == whole
    for place in range(1, len(answer.text)):
        assert events(answer, *cut(answer.text, place)) == whole


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    answer = Answer(name, text)
    assert events(answer, text) == [Content(text)]
    assert events(answer, *text) == [Content(text)]


MARKS = [mark for name in CALLS for mark in sorted(Formats(name, "qwen3").marks(()))] + [
    "<think>",
    "</think>",
    "<tool_call>\n<function=",
    '{"name": "f", "arguments": ',
    "{",
    "}",
    '"',
    "\\",
    "\n",
    " ",
    "f",
    "<",
    "a",
]


@pytest.mark.parametrize("name", sorted({CALLS[name].__name__: name for name in CALLS}.values()))
@given(pieces=st.lists(st.sampled_from(MARKS), max_size=30), data=st.data())
def test_any_text_may_be_cut_anywhere(name: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    reasoning = "openai_gptoss" if name == "openai" else "qwen3"
    answer = Answer(name, text, reasoning_parser=reasoning, inside=data.draw(st.booleans()))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    assert events(answer, *cut(text, *places)) == events(answer, text) == events(answer, *text)


@pytest.mark.parametrize(
    "answer", [case for case in CASES if case.values[0].parser != "openai" and " ends " not in str(case.id)]
)
def test_what_stands_around_a_call_is_content(answer: Answer) -> None:
    if answer.calls and not answer.reasoning:
        found = events(replace(answer, reasoning_parser="none"), f"Zeta {answer.text}\nOmega")
        said = text_of(found, Content)
        assert said.startswith("Zeta") and said.endswith("\nOmega")
        assert sum(isinstance(event, CallStart) for event in found) == len(answer.calls)


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_call_after_what_is_no_call_is_found(name: str, text: str) -> None:
    answer = next(each for each in COMPLETE.values() if CALLS[each.parser] is CALLS[name] and each.calls)
    if name not in ("openai", "hermes"):  # an open string or header has no end
        found = events(replace(answer, reasoning_parser="none"), f"{text}\n{answer.text}")
        assert sum(isinstance(event, CallStart) for event in found) == len(answer.calls)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_that_is_cut_off_has_no_valid_arguments(name: str) -> None:
    """A client must never take the beginning of the arguments for all of them."""
    answer = next(each for each in COMPLETE.values() if CALLS[each.parser] is CALLS[name] and each.calls)
    for place in range(len(answer.text)):
        found = events(answer, answer.text[:place], is_cut=True)
        ended = {event.index for event in found if isinstance(event, CallEnd)}
        for index, (_, arguments) in enumerate(answer.calls):
            written = text_of([e for e in found if getattr(e, "index", None) == index], Arguments)
            assert arguments.startswith(written) or name != "hermes"
            if index not in ended and written.rstrip() != arguments:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(written)


@pytest.mark.parametrize("is_forced", [False, True])
def test_arguments_arrive_while_they_are_written(is_forced: bool) -> None:
    """Those of JSON only in a forced call, since JSON can be damaged later."""
    tagged = ("qwen3_coder", "glm45", "minimax_m2", "minimax_m3")
    for name in (*tagged, "hermes", "mistral", "mistral new", "kimi_k2", "deepseek_v3", "harmony"):
        answer = COMPLETE[name]
        parser = Formats(answer.parser).parser(TOOLS, False, is_forced)
        assert parser is not None
        place = answer.text.index("Bern") + 3
        found = parser.push(answer.text[:place])
        assert (CallStart in map(type, found)) == (is_forced or name in tagged), name
        assert text_of(found, Arguments).endswith("Ber") == (is_forced or name in tagged), name


@pytest.mark.parametrize(
    ("arguments", "begun"),
    [
        ('{"a": [1, "b\\u00', None),
        ('{"a": 1, "b": -', None),
        ('{"a": fal', None),
        ('"{\\"a', None),
        ("", None),
        ('{"a": 1', None),
        ("nul", None),
        ('{"a": x', ""),
        ("{'", ""),
        ('{"a": 1}}, "b"', ""),
        ("1", ""),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi_k2", "openai"])
def test_the_beginning_of_a_call_that_is_cut_is_a_call(name: str, arguments: str, begun: str | None) -> None:
    """As far as it is sound. begun: None for the arguments themselves, else the call is content."""
    head = {
        "hermes": '<tool_call>{"name": "f", "arguments": ',
        "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": ',
        "kimi_k2": "<|tool_call_begin|>f<|tool_call_argument_begin|>",
        "openai": "<|channel|>commentary to=functions.f<|message|>",
    }[name]
    text = head + arguments
    found = events(Answer(name, text), *text, is_cut=True)
    if begun is None:
        assert [event for event in found if not isinstance(event, Arguments)] == [
            CallStart(0, "f", found[0].id)
        ]
        assert text_of(found, Arguments) == arguments
    else:
        assert found == [Content(text)]


def test_long_arguments_come_in_pieces() -> None:
    parser = Formats("hermes").parser(TOOLS, False)
    assert parser is not None
    text = '{"city": "' + "a" * 100_000 + '"}'
    found = parser.push(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>')
    assert text_of(found, Arguments) == text
    assert max(len(event.text) for event in found if isinstance(event, Arguments)) <= 2**16


def test_content_is_not_held_back() -> None:
    parser = Formats("hermes", "qwen3").parser(TOOLS, False)
    assert parser is not None
    assert parser.push("Hi, <tool") == [Content("Hi,")]
    assert parser.push("box> there") == [Content(" <toolbox> there")]


def test_the_reasoning_is_marked() -> None:
    parser = Formats("hermes", "qwen3").parser(None, False)
    assert parser is not None
    seen = []
    for piece in ("<think>", "a", "</think>", "b"):
        parser.push(piece)
        seen.append(parser.thinking)
    assert seen == [True, True, False, False]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", '<tool_call>{"a": "'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"'),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}{"name":"f","arguments":"'),
        ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{}},{"'),
        ("kimi_k2", '<|tool_call_begin|>f<|tool_call_argument_begin|>{"'),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"a": "<|start|>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n"),
        ("qwen3_coder", "<function=f><parameter=a>\n</parameter>"),
        ("glm45", "<tool_call>f<arg_key>"),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>'),
        ("minimax_m3", "]<]minimax[>[</a>]<]minimax[>[<b>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("kimi_k2", "<|tool_call_begin|>a"),
        ("openai", "<|channel|>a"),
    ],
)
def test_work_grows_with_the_length_only(name: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that look like calls again and again, a character at a time."""
    read, took = 0, Reader._take

    def counted(self: Reader, text: str) -> str:
        nonlocal read
        read += len(text)
        return took(self, text)

    monkeypatch.setattr(Reader, "_take", counted)
    monkeypatch.setattr(reader, "MAX_ATTEMPT", 64)
    text = unit * 300
    events(Answer(name, text), *text)
    assert read <= len(text) * (2 + 64 / len(unit))
