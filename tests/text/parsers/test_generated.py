"""Random calls in every syntax, sound and damaged: no exception, nothing lost, the same in every cutting."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from moesaic.text.parsers.table import CALLS, Formats

pytestmark = pytest.mark.slow
Call = tuple[str, dict[str, Any]]
Damage = frozenset[str]

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "where": {"type": "object"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("get_weather", "now")
)
DAMAGES = ("value open", "last value open", "call open", "block open")
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


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_tagged(tags: dict[str, str], line: str, edge: str = "") -> Callable[[list[Call], Damage], str]:
    """line: what stands between tags. edge: what stands at the edges of a value."""

    def write(calls: list[Call], damage: Damage) -> str:
        text = ""
        for name, arguments in calls:
            text += tags["begin"] + line * ("{name}" in tags["name"]) + tags["name"].format(name=name) + line
            for number, (key, value) in enumerate(arguments.items()):
                is_open = ("last " if number == len(arguments) - 1 else "") + "value open" in damage
                end = (edge or line or "\n") if is_open else edge + tags["value end"] + line
                text += tags["key"].format(key=key) + edge + plain(value) + end
            call_end = "" if "call open" in damage else tags["call end"] + line * bool(tags["call end"])
            text += call_end + ("" if "block open" in damage else tags["end"]) + "\n"
        return text

    return write


def write_hermes(calls: list[Call], damage: Damage) -> str:
    text = ""
    for name, arguments in calls:
        brace = "" if "call open" in damage and "block open" not in damage else "}"
        inner = json.dumps(arguments, ensure_ascii=False)
        end = "" if "block open" in damage else "\n</tool_call>"
        text += f'<tool_call>\n{{"name": "{name}", "arguments": {inner}{brace}{end}\n'
    return text


def write_tokens(
    begin: str, head: str, end: str, section: tuple[str, str]
) -> Callable[[list[Call], Damage], str]:
    def write(calls: list[Call], damage: Damage) -> str:
        inner = "".join(
            begin + head.format(name=name) + json.dumps(arguments, ensure_ascii=False) + end
            for name, arguments in calls
        )
        return section[0] + inner + ("" if "block open" in damage else section[1])

    return write


def write_mistral(calls: list[Call], damage: Damage) -> str:
    if "call open" in damage:
        inner = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"[TOOL_CALLS] {json.dumps(inner, ensure_ascii=False)}"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def write_harmony(calls: list[Call], damage: Damage) -> str:
    prefix = "" if "call open" in damage else "functions."
    return "".join(
        f"<|channel|>commentary to={prefix}{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        "<|start|>assistant"
        for name, arguments in calls
    ).removesuffix("<|start|>assistant")


XML = {
    "begin": "<tool_call>",
    "name": "<function={name}>",
    "key": "<parameter={key}>",
    "value end": "</parameter>",
    "call end": "</function>",
    "end": "</tool_call>",
}
INVOKE = {
    "begin": "<minimax:tool_call>",
    "name": '<invoke name="{name}">',
    "key": '<parameter name="{key}">',
    "value end": "</parameter>",
    "call end": "</invoke>",
    "end": "</minimax:tool_call>",
}
GLM = {
    "begin": "<tool_call>{name}",
    "name": "",
    "key": "<arg_key>{key}</arg_key><arg_value>",
    "value end": "</arg_value>",
    "call end": "",
    "end": "</tool_call>",
}


def write_glm(line: str) -> Callable[[list[Call], Damage], str]:
    def write(calls: list[Call], damage: Damage) -> str:
        return "\n".join(
            write_tagged({**GLM, "begin": f"<tool_call>{name}"}, line)([(name, arguments)], damage).rstrip(
                "\n"
            )
            for name, arguments in calls
        )

    return write


def write_hy3(calls: list[Call], damage: Damage) -> str:
    tags = {name: tag.replace(">", ":opensource>") for name, tag in GLM.items()}
    text = "".join(
        write_tagged({**tags, "begin": f"<tool_call:opensource>{name}<tool_sep:opensource>"}, "\n")(
            [(name, arguments)], damage
        )
        for name, arguments in calls
    )
    return f"<tool_calls:opensource>\n{text}</tool_calls:opensource>"


WRITERS: dict[str, Callable[[list[Call], Damage], str]] = {
    "hermes": write_hermes,
    "qwen3_coder": write_tagged(XML, "\n", "\n"),
    "mimo": write_tagged(XML, "\n"),
    "glm45": write_glm("\n"),
    "glm47": write_glm(""),
    "hy_v3": write_hy3,
    "minimax_m2": write_tagged(INVOKE, "\n"),
    "deepseek_v31": write_tokens(
        "<｜tool▁call▁begin｜>",
        "{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v3": write_tokens(
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": write_tokens(
        "<|tool_call_begin|>",
        "functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "mistral": write_mistral,
    "openai": write_harmony,
}
"""Parser -> writes calls in its syntax, with the damages that its models make."""


def test_every_syntax_has_a_writer() -> None:
    assert {CALLS[name] for name in WRITERS} == set(CALLS.values())


def read(name: str, pieces: list[str], is_cut: bool = False) -> list[Event]:
    parser = Formats(name, "openai_gptoss" if name == "openai" else None).parser(TOOLS, False)
    assert parser is not None
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish(is_cut)


def join(events: list[Event]) -> tuple[list[tuple[str, str, bool]], str]:
    """Name, arguments and completeness of each call, and all other text."""
    calls = [
        (
            event.name,
            "".join(e.text for e in events if isinstance(e, Arguments) and e.index == event.index),
            CallEnd(event.index) in events,
        )
        for event in events
        if isinstance(event, CallStart)
    ]
    return calls, "".join(event.text for event in events if isinstance(event, Content | Reasoning))


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
    found, content = events
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


@pytest.mark.parametrize("name", [name for name in WRITERS if hasattr(CALLS[name], "value")])
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
