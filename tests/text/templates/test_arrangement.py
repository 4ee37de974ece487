"""Every text of a conversation reaches the prompt, or the request is refused by name."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.template_kinds import KINDS, TAKES_INSTRUCTIONS, make_template

from moesaic.core.errors import RequestError
from moesaic.text.templates.chat_template import ChatTemplate, Options
from moesaic.text.templates.probe import Place

ROLES = ("system", "developer", "user", "assistant", "calling", "tool")
TOOL = {"type": "function", "function": {"name": "look_it_up", "description": "Zebra tool", "parameters": {}}}


@cache
def template(kind: str) -> ChatTemplate:
    return make_template(KINDS[kind])


def marked(number: int) -> str:
    return f"Zebra{number}q"


def conversation(*roles: str) -> list[dict[str, Any]]:
    """Messages of these roles, each with a marker. `calling` is an assistant that calls a tool."""
    messages: list[dict[str, Any]] = []
    for number, role in enumerate(roles):
        message: dict[str, Any] = {"role": role, "content": f'{marked(number)}\n"it" '}
        if role == "calling":
            function = {"name": f"call_{number}", "arguments": {"a": 1}}
            calls = [{"id": "call00001", "type": "function", "function": function}]
            message |= {"role": "assistant", "content": "", "tool_calls": calls}
        if role == "tool":
            message |= {"tool_call_id": "call00001"}
        messages.append(message)
    return messages


def says(text: str, wanted: str) -> bool:
    return wanted.casefold() in text.casefold()


@pytest.mark.parametrize("kind", KINDS)
@given(roles=st.lists(st.sampled_from(ROLES), min_size=1, max_size=6), tools=st.booleans())
def test_no_text_is_lost_without_a_word(kind: str, roles: list[str], tools: bool) -> None:
    messages = conversation(*roles)
    try:
        text, _ = template(kind).render(messages, Options(variables={"tools": [TOOL]} if tools else {}))
    except RequestError as error:
        refusal = r"messages: the chat template refuses|(messages|tools)\[\d+\].*leaves this"
        if re.match(refusal, str(error)) is None:
            raise
        return
    for number, role in enumerate(roles):
        assert says(text, f"call_{number}" if role == "calling" else marked(number))
    assert not tools or (says(text, "look_it_up") and says(text, "Zebra tool"))


@pytest.mark.parametrize("kind", TAKES_INSTRUCTIONS)
@pytest.mark.parametrize(
    "roles",
    [
        ("system", "user"),
        ("developer", "user"),
        ("system", "system", "user"),
        ("system", "developer", "user"),
        ("user", "system"),
        ("developer", "user", "developer"),
        ("system", "user", "assistant", "system", "user"),
        ("user", "assistant", "developer", "user"),
    ],
    ids=" ".join,
)
def test_instructions_reach_the_prompt(kind: str, roles: tuple[str, ...]) -> None:
    text, _ = template(kind).render(conversation(*roles), Options())
    assert all(says(text, marked(number)) for number in range(len(roles)))


def arranged(kind: str, *roles: str) -> list[tuple[str, str]]:
    messages = template(kind).render(
        [{"role": r, "content": f"{n}"} for n, r in enumerate(roles)], Options()
    )[1]
    return [(message["role"], message["content"]) for message in messages]


def test_what_arrives_is_passed_as_it_is() -> None:
    roles = ("system", "developer", "user", "system", "assistant", "developer", "user")
    assert arranged("every role", *roles) == [(role, str(number)) for number, role in enumerate(roles)]


def test_a_developer_becomes_a_system_where_it_stands() -> None:
    assert arranged("known roles", "user", "developer", "user") == [
        ("user", "0"),
        ("system", "1"),
        ("user", "2"),
    ]


def test_later_instructions_join_the_first_in_their_order() -> None:
    assert arranged("strict", "system", "developer", "user", "system") == [
        ("system", "0\n\n1\n\n3"),
        ("user", "2"),
    ]
    assert arranged("first only", "user", "system") == [("system", "1"), ("user", "0")]
    assert arranged("first developer", "developer", "user", "system") == [
        ("developer", "0\n\n2"),
        ("user", "1"),
    ]
    assert arranged("only developer", "system", "user") == [("developer", "0"), ("user", "1")]


def test_without_a_role_for_them_instructions_begin_the_first_users_turn() -> None:
    assert arranged("no system", "system", "user", "assistant", "user") == [
        ("user", "0\n\n1"),
        ("assistant", "2"),
        ("user", "3"),
    ]


def test_a_template_that_keeps_only_the_last_instruction_gets_one() -> None:
    assert arranged("last system counts", "system", "user", "system") == [("system", "0\n\n2"), ("user", "1")]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("last turn only", "messages[0]"), ("no content", "messages[0]"), ("cuts", "messages[0]")],
)
def test_a_lost_text_is_named(kind: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^{re.escape(message)}: the chat template of this model leaves"):
        template(kind).render(conversation("user", "user"), Options())


@pytest.mark.parametrize(
    ("field", "source"), [("name", "{{ t.function.description }}"), ("description", "{{ t.function.name }}")]
)
def test_a_lost_tool_is_named(field: str, source: str) -> None:
    source = (
        "{% for t in tools %}" + source + "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RequestError, match=rf"^tools\[0\]\.function\.{field}: ") as caught:
        make_template(source).render(conversation("user"), Options(variables={"tools": [TOOL]}))
    assert caught.value.field == "tools"


def test_the_message_that_is_continued_stays_last() -> None:
    options = Options(add_generation_prompt=False, continue_final_message=True)
    text, messages = template("strict").render(conversation("user", "system", "assistant"), options)
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert text.rstrip().endswith(marked(2) + '\n"it"')


def test_a_plain_conversation_is_rendered_once() -> None:
    fresh = make_template(KINDS["strict"])
    for _ in range(3):
        fresh.render(conversation("system", "user", "assistant", "user"), Options())
    assert fresh._renderers.count == 3  # type: ignore[attr-defined]


def test_what_was_found_is_described() -> None:
    strict, found = template("strict").arrivals, template("every role").arrivals
    assert all(found.instructions.values()) and not found.describe_instructions()
    assert found.describe()[0].startswith("the chat template leaves out")
    moved, joined = strict.describe_instructions()
    assert moved == "developer messages become system messages"
    assert joined == (
        "system messages join the first one where they stand after another instruction at the start or "
        "after a user's message or after an assistant's message or after a tool's result"
    )
    assert not strict.keeps("system", Place.AFTER_TOOL) and strict.keeps("system", Place.FIRST)
    assert template("no system").arrivals.describe()[0].endswith("before the text of the first user message")
    assert "text beside the calls of earlier turns" in template("first developer").arrivals.left_out
    assert make_template("{{ raise_exception('no') }}").arrivals.describe() == [
        "the chat template could not be tried: it refuses a message of a user: no"
    ]


@pytest.mark.parametrize(
    ("effort", "known_effort"),
    [
        *[("none", "no_think"), ("minimal", "low"), ("low", "low"), ("medium", "high"), ("high", "high")],
        *[("xhigh", "high"), ("max", "high"), ("no_think", "no_think")],
    ],
)
def test_an_effort_becomes_the_nearest_that_the_template_takes(effort: str, known_effort: str) -> None:
    options = Options(variables={"reasoning_effort": effort})
    text, messages = template("few efforts").render(conversation("user"), options)
    assert text.startswith(known_effort) and template("few efforts").render_exactly(messages, options) == text
    assert "medium is high" in " ".join(template("few efforts").arrivals.describe())
    assert not template("every role").arrivals.efforts


def test_text_beside_calls_may_be_left_out_by_design() -> None:
    messages = conversation("user", "calling", "tool", "assistant", "user")
    messages[1]["content"] = "I look."
    text, _ = template("first developer").render(messages, Options())
    assert "I look." not in text and "call_1" in text
