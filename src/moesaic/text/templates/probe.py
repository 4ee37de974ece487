"""Finds out what a chat template does with the texts of messages, by rendering conversations with markers.

Question: How is it known which messages a chat template leaves out?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moesaic.core.errors import TemplateError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Renders messages with further variables. Raises TemplateError."""

SYSTEM, DEVELOPER = "system", "developer"
INSTRUCTION_ROLES = (SYSTEM, DEVELOPER)
"""Roles of messages that instruct the model, in the order in which they replace each other."""


class Place(Enum):
    """Where an instruction stands in a conversation."""

    FIRST = "first"
    NEXT = "after another instruction at the start"
    AFTER_USER = "after a user's message"
    AFTER_ASSISTANT = "after an assistant's message"
    AFTER_TOOL = "after a tool's result"


_PLACES_AFTER = {"user": Place.AFTER_USER, "assistant": Place.AFTER_ASSISTANT, "tool": Place.AFTER_TOOL}

_NO_THINKING = "no_think"
_EFFORT_RANKS = {
    _NO_THINKING: 0,
    "none": 0,
    "minimal": 1,
    "low": 2,
    "medium": 3,
    "high": 4,
    "xhigh": 5,
    "max": 6,
}
"""Values of reasoning_effort, from the least to the most. no_think is Hy3's."""
CONTENT_BESIDE_CALLS = "text beside the calls of earlier turns"
_MARK = "zq7arrives7qz"
_ID = "call00001"
"""An id that every template takes: Mistral's demand nine letters and digits."""
_USER: Message = {"role": "user", "content": "One."}
_USER_AGAIN: Message = {"role": "user", "content": "Two."}
_ASSISTANT: Message = {"role": "assistant", "content": "Yes."}
_RESULT: Message = {"role": "tool", "content": "Done.", "tool_call_id": _ID, "name": "lookup"}


@dataclass(frozen=True)
class Arrivals:
    """Which texts of messages a chat template writes into the prompt."""

    instructions: Mapping[tuple[str, Place], bool] = field(default_factory=dict)
    """Role and place of an instruction -> whether its text arrives. What could not be tried is absent."""
    left_out: tuple[str, ...] = ()
    """Other texts that the template leaves out, in words."""
    efforts: Mapping[str, str] = field(default_factory=dict)
    """Value of reasoning_effort that the template refuses -> the nearest one that it takes."""
    failure: str = ""
    """Why the template could not be tried. Empty: it could."""

    def keeps(self, role: str, place: Place) -> bool:
        """Whether an instruction may stay as it is. What could not be tried stays."""
        return self.instructions.get((role, place), True)

    def describe(self) -> list[str]:
        """What becomes of messages, one sentence each."""
        if self.failure:
            return [f"the chat template could not be tried: it {self.failure}"]
        sentences = self.describe_instructions()
        if self.efforts:
            pairs = ", ".join(f"{effort} is {known_effort}" for effort, known_effort in self.efforts.items())
            sentences.append(f"reasoning_effort: {pairs}")
        if self.left_out:
            sentences.append(f"the chat template leaves out: {', '.join(self.left_out)}")
        return sentences

    def describe_instructions(self) -> list[str]:
        """What becomes of system and developer messages that may not stay as they are, one sentence each."""
        return [] if self.failure else list(self._describe_moves())

    def _describe_moves(self) -> Iterator[str]:
        first_role = self.first_role
        if first_role is None:
            yield "system and developer messages are put before the text of the first user message"
            return
        for role in INSTRUCTION_ROLES:
            if role != first_role and not self.keeps(role, Place.FIRST):
                yield f"{role} messages become {first_role} messages"
        moved_places = [place.value for place in Place if not self.keeps(first_role, place)]
        if moved_places:
            yield f"{first_role} messages join the first one where they stand {' or '.join(moved_places)}"

    @property
    def first_role(self) -> str | None:
        """The role of a first instruction that arrives. None: none does."""
        return next((role for role in INSTRUCTION_ROLES if self.keeps(role, Place.FIRST)), None)


def list_places(messages: Sequence[Message]) -> list[Place]:
    """The place of each message, if it is an instruction."""
    places: list[Place] = []
    place = Place.FIRST
    for message in messages:
        places.append(place)
        if message.get("role") not in INSTRUCTION_ROLES:
            place = _PLACES_AFTER.get(str(message.get("role")), Place.AFTER_USER)
        elif place is Place.FIRST:
            place = Place.NEXT
    return places


def probe(render: Render) -> Arrivals:
    """Render small conversations and report what arrives.

    A template that reaches a limit is not tried any further.
    """
    try:
        needed_variables = (
            {} if _render_or_none(render, [_USER]) is not None else {"tools": [_tool("Looks up.", "A word.")]}
        )

        def render_needed(messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
            return render(messages, {**needed_variables, **variables})

        render_needed([_USER], {})
        instructions, left_out = _try_instructions(render_needed), tuple(_list_left_out(render_needed))
        return Arrivals(instructions, left_out, _try_efforts(render_needed))
    except TemplateError as error:
        return Arrivals(failure=f"refuses a message of a user: {error}" if error.is_refusal else str(error))


def _try_instructions(render: Render) -> dict[tuple[str, Place], bool]:
    arrivals: dict[tuple[str, Place], bool] = {}
    for role in INSTRUCTION_ROLES:
        arrivals[role, Place.FIRST] = _arrives(render, [_instruct(role), _USER])
    first = next((role for role in INSTRUCTION_ROLES if arrivals[role, Place.FIRST]), None)
    for role in INSTRUCTION_ROLES:
        instruction = _instruct(role)
        arrivals[role, Place.NEXT] = first is not None and _arrives(
            render, [{"role": first, "content": "Zero."}, instruction, _USER]
        )
        arrivals[role, Place.AFTER_USER] = all(
            _arrives(render, [_USER, instruction, *later_messages])
            for later_messages in ([], [_ASSISTANT, _USER_AGAIN])
        )
        arrivals[role, Place.AFTER_ASSISTANT] = _arrives(
            render, [_USER, _ASSISTANT, instruction, _USER_AGAIN]
        )
        start = next(
            (start for start in _list_tool_turns() if _render_or_none(render, start) is not None), None
        )
        if start is not None:
            arrivals[role, Place.AFTER_TOOL] = _arrives(render, [*start, instruction])
    return arrivals


def _try_efforts(render: Render) -> dict[str, str]:
    """The values of reasoning_effort that are refused, each with the nearest one that is not."""
    known_efforts = [
        effort
        for effort in _EFFORT_RANKS
        if _render_or_none(render, [_USER], {"reasoning_effort": effort}) is not None
    ]

    def find_nearest(rank: int) -> str:
        return min(
            known_efforts, key=lambda effort: (abs(_EFFORT_RANKS[effort] - rank), -_EFFORT_RANKS[effort])
        )

    refused_efforts = [
        effort for effort in _EFFORT_RANKS if effort not in known_efforts and effort != _NO_THINKING
    ]
    return {effort: find_nearest(_EFFORT_RANKS[effort]) for effort in refused_efforts if known_efforts}


def _list_left_out(render: Render) -> Iterator[str]:
    """Texts that are no instructions and do not arrive, in words. Texts that are refused are not listed."""
    reasoning = dict.fromkeys(("reasoning", "reasoning_content"), _MARK)
    conversations: dict[str, list[list[Message]]] = {
        "results of tools": [[*turn[:2], {**_RESULT, "content": _MARK}] for turn in _list_tool_turns()],
        "arguments of calls": _list_tool_turns(argument=_MARK),
        CONTENT_BESIDE_CALLS: [[*turn, _ASSISTANT, _USER_AGAIN] for turn in _list_tool_turns(content=_MARK)],
        "reasoning of earlier turns": [[_USER, {**_ASSISTANT, **reasoning}, _USER_AGAIN]],
        "reasoning before a tool's result": _list_tool_turns(**reasoning, thinking=_MARK),
        "names of participants": [[{**_USER, "name": _MARK}]],
        "ids of calls": [
            [*turn[:2], {**_RESULT, "tool_call_id": _MARK[:9]}]
            for turn in _list_tool_turns(call_id=_MARK[:9])
        ],
    }
    for description, forms in conversations.items():
        texts = [text for form in forms if (text := _render_or_none(render, form)) is not None]
        if texts and not any(_MARK[:9] in text for text in texts):
            yield description
    for description, tool in (
        ("descriptions of tools", _tool(_MARK, "A word.")),
        ("descriptions of parameters", _tool("Looks up.", _MARK)),
    ):
        text = _render_or_none(render, [_USER], {"tools": [tool]})
        if text is not None and _MARK not in text:
            yield description


def _instruct(role: str) -> Message:
    return {"role": role, "content": _MARK}


def _list_tool_turns(
    content: str = "", argument: str = "word", call_id: str = _ID, **fields: str
) -> list[list[Message]]:
    """A question, a call and its result. Some templates need the arguments as an object, others as a text."""
    forms: tuple[object, ...] = ({"word": argument}, f'{{"word": "{argument}"}}')
    return [
        [
            _USER,
            {
                "role": "assistant",
                "content": content,
                **fields,
                "tool_calls": [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": "lookup", "arguments": arguments},
                    }
                ],
            },
            {**_RESULT, "tool_call_id": call_id},
        ]
        for arguments in forms
    ]


def _tool(description: str, parameter: str) -> Mapping[str, Any]:
    schema = {"type": "object", "properties": {"word": {"type": "string", "description": parameter}}}
    function = {"name": "lookup", "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _arrives(render: Render, messages: Sequence[Message]) -> bool:
    text = _render_or_none(render, messages)
    return text is not None and _MARK in text


def _render_or_none(
    render: Render, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
) -> str | None:
    """The text of a conversation. None if the template refuses it."""
    calls = any("tool_calls" in message for message in messages)
    used_variables = {"tools": [_tool("Looks up.", "A word.")]} if calls else {}
    try:
        return render(messages, used_variables if variables is None else variables)
    except TemplateError as error:
        if not error.is_refusal:
            raise
        return None
