"""Answers of a chat, as pieces of messages or as whole messages."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from dataclasses import dataclass, field

from moesaic.core.request import FinishReason, RequestOutput
from moesaic.server.responses import CalledFunction, ChatDelta, ChatFinishReason, ChatMessage, ToolCall
from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from moesaic.text.parsers.table import Formats
from moesaic.text.parsers.values import Tools

_SHORT = 9
"""Letters and digits in the ids of Mistral's calls."""


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read."""

    formats: Formats
    tools: Tools | None = None
    """The tools that an answer may call. None: calls are content."""
    in_reasoning: bool = False
    """The prompt has opened the reasoning."""
    parallel: bool = True
    """More than the first call of an answer is returned."""
    include_reasoning: bool = True
    has_named_function: bool = False
    """The request names the function that the answer calls."""
    forced_names: tuple[str, ...] = ()
    """The functions of which a grammar makes the answer call one. Empty: no call is forced."""

    def answer(self) -> Answer:
        """A new answer."""
        return Answer(self)


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Answer:
    """The answer to a request, of which outputs arrive one after another."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        is_forced = bool(reading.forced_names)
        self._parser = reading.formats.parser(reading.tools, reading.in_reasoning, is_forced)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._tokens = 0
        self.reasoning_tokens = 0
        """Tokens of reasoning so far, with its tags."""

    def take(self, output: RequestOutput) -> list[ChatDelta]:
        """The pieces of the message that `output` adds."""
        if self._parser is None:
            self._content.append(output.text)
            return [ChatDelta(content=output.text)] if output.text else []
        thinking = self._parser.thinking
        events = self._parser.push(output.text) if output.text else []
        self._tokens += len(output.token_ids)
        if thinking or self._parser.thinking:
            # The first time, tokens that the parser held back until it knew the tag count too.
            self.reasoning_tokens += len(output.token_ids) if self.reasoning_tokens else self._tokens
        if output.finish_reason is not None:
            ended_by_model = output.finish_reason is FinishReason.STOP and output.stop_reason is None
            last_events = self._parser.finish(is_cut=not ended_by_model)
            if self._reading.forced_names and not ended_by_model:
                last_events = self._read_cut_call(last_events)
            events += last_events
        return [delta for event in events for delta in self._deltas(event)]

    def _read_cut_call(self, events: list[Event]) -> list[Event]:
        """The last events of a forced call that was cut. What looks like content is the beginning of its
        syntax, and the call has begun if that says of which function."""
        text = "".join(event.text for event in events if isinstance(event, Content))
        events = [event for event in events if not isinstance(event, Content)]
        names = self._reading.forced_names
        if len(names) > 1:
            names = tuple(
                name for name in names if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", text)
            )
        if self._calls or not text.strip() or len(names) != 1:
            return events
        return [*events, CallStart(0, names[0])]

    def message(self) -> ChatMessage:
        """The message of all outputs so far."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        is_empty = not content and (self._calls or reasoning)
        message = ChatMessage(
            role="assistant",
            content=None if is_empty else content,
            refusal=None,
            reasoning=reasoning or None,  # clients of vLLM read it everywhere
        )
        if reasoning:
            message.reasoning_content = reasoning
        if self._calls:
            message.tool_calls = [
                ToolCall(
                    id=call.id,
                    type="function",
                    function=CalledFunction(name=call.name, arguments="".join(call.arguments)),
                )
                for call in self._calls
            ]
        return message

    def finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        """Why the answer ended, in OpenAI's words: `stop` also after a call of a named function."""
        has_calls = self._calls and not self._reading.has_named_function
        return "tool_calls" if has_calls and reason is FinishReason.STOP else reason.value

    def _deltas(self, event: Event) -> list[ChatDelta]:
        """The piece for an event, if it has one, which is noted for the message."""
        match event:
            case Content(text):
                self._content.append(text)
                return [ChatDelta(content=text)]
            case Reasoning(text):
                if not self._reading.include_reasoning:
                    return []
                self._reasoning.append(text)
                return [ChatDelta(reasoning=text, reasoning_content=text)]
            case CallEnd() | CallStart() | Arguments() if event.index and not self._reading.parallel:
                return []
            case CallStart(index, name, call_id):
                self._calls.append(_Call(call_id or self._new_id(), name))
                function = CalledFunction(name=name, arguments="")
                call = ToolCall(index=index, id=self._calls[-1].id, type="function", function=function)
                return [ChatDelta(tool_calls=[call])]
            case Arguments(index, text):
                self._calls[index].arguments.append(text)
                return [
                    ChatDelta(tool_calls=[ToolCall(index=index, function=CalledFunction(arguments=text))])
                ]
        return []

    def _new_id(self) -> str:
        if self._reading.formats.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_SHORT))
        return f"call_{uuid.uuid4().hex[:24]}"
