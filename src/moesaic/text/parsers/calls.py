"""What syntaxes of tool calls share. In most, a mark begins a call, or text that only looks like one."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, MalformedText, Steps
from moesaic.text.parsers.reader import BLANK, Reader, TrimmedText
from moesaic.text.parsers.values import Tools


@dataclass(frozen=True)
class Span:
    """Where the reasoning of an answer stands."""

    opening: str
    endings: tuple[str, ...]
    """What ends it. The first one is what a model writes that makes no mistake."""
    in_reasoning: bool = False
    """The answer begins inside of it."""
    can_repeat: bool = False
    """It may begin at any place, and more than once. False: at the start of the answer."""


class CallParser(ABC):
    """Parses the calls of one answer. tools: those of the request, whose schemas say what values are.

    Before a call has begun, text that does not fit its syntax is content. After that it is a part of the
    arguments, or content if they are complete. So every character is in an event or belongs to the syntax.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    """What a call begins with."""
    other_marks: ClassVar[tuple[str, ...]] = ()
    """Other texts of this syntax that may be special tokens."""
    ends_reasoning: ClassVar[tuple[str, ...]] = ()
    """What surely begins a call, and so ends the reasoning although it was not closed."""

    thinking: bool = False
    """The answer is inside of its reasoning, if this syntax tells that."""

    def __init__(self, tools: Tools = ()) -> None:
        self._tools = tools
        self._index = 0
        self._content = TrimmedText(Content)

    @abstractmethod
    def read(self, reader: Reader, lead: str = "") -> Steps[None]:
        """Read the answer to its end. lead: characters that are left out at its start."""

    def is_call(self, reader: Reader, mark: str) -> Steps[bool]:
        """Whether `mark` and the text behind it begin a call of a tool of the request. Nothing is read."""
        yield from ()
        return False

    def _begin(self, name: str, given_id: str | None = None) -> CallStart:
        """The event of the next call. Raises Malformed without a name."""
        if not name.strip():
            raise MalformedText
        return CallStart(self._index, name.strip(), given_id)

    def _is_tool(self, name: str) -> bool:
        """Whether the request has a tool of this name."""
        return any(tool["function"]["name"] == name for tool in self._tools)

    def _announce(self, call: CallStart) -> Iterator[Event]:
        self._content.drop()
        self._index += 1
        yield call

    def _raw(
        self, reader: Reader, call: CallStart, ends: tuple[str, ...], text_end: bool = False
    ) -> Steps[str]:
        """Pass on JSON up to one of `ends`, which is returned, without white space around it.

        text_end: the end of the text is an end too, where the model ended it. Without any JSON the
        arguments are an empty object.
        """
        strings = JsonStrings()
        trimmed_text = TrimmedText(lambda text: Arguments(call.index, strings.escape(text)), BLANK)
        has_text = False

        def pass_on(text: str) -> list[Event]:
            nonlocal has_text
            events = trimmed_text(text)
            has_text = has_text or bool(events)
            return events

        mark = yield from reader.read_until(ends, pass_on)
        if not mark and (reader.is_cut or not text_end):
            yield from trimmed_text.flush()
            return mark
        if not has_text:
            yield Arguments(call.index, "{}")
        yield CallEnd(call.index)
        return mark


_PARTS_OF_STRINGS = re.compile(r'\\[^\x00-\x1f]|\\\Z|["\x00-\x1f]')


class JsonStrings:
    """Escapes line ends, tabs and other control characters in the strings of JSON that arrives in pieces.

    Models write them as they are, and JSON forbids that. A text that is no object or list stays as it is.
    """

    def __init__(self) -> None:
        self._is_json: bool | None = None
        self._in_string = False
        self._after_backslash = False

    def escape(self, piece: str) -> str:
        """The next piece as JSON allows it."""
        if self._is_json is None and piece.strip():
            self._is_json = piece.lstrip()[0] in "{["
        if not self._is_json or not piece:
            return piece
        escaped_character = piece[0] if self._after_backslash and piece[0] >= " " else ""
        self._after_backslash = False
        return escaped_character + _PARTS_OF_STRINGS.sub(self._replace, piece.removeprefix(escaped_character))

    def _replace(self, match: re.Match[str]) -> str:
        part = match[0]
        if part == '"':
            self._in_string = not self._in_string
        elif part == "\\":
            self._after_backslash = True
        elif part < " " and self._in_string:
            return json.dumps(part)[1:-1]
        return part


class MarkedCalls(CallParser):
    """A syntax in which each call stands behind a mark, and all else is content."""

    def read(self, reader: Reader, lead: str = "") -> Steps[None]:
        self._content = TrimmedText(Content, lead)
        while mark := (yield from reader.read_until(self.marks, self._content)):
            yield from self._read_marked_call(reader, mark)
        yield from self._content.flush()

    def is_call(self, reader: Reader, mark: str) -> Steps[bool]:
        reader.attempt()
        try:
            call = yield from self._head(reader, mark)
        except MalformedText:
            return False
        finally:
            reader.fail()
        return not self._tools or self._is_tool(call.name)

    def _read_marked_call(self, reader: Reader, mark: str) -> Steps[None]:
        """Read what follows `mark`."""
        reader.attempt()
        try:
            call = yield from self._head(reader, mark)
        except MalformedText:
            reader.fail()
            yield from self._content(mark)
            return
        reader.succeed()
        yield from self._call(reader, call)

    @abstractmethod
    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        """Read a call up to its arguments. Raises Malformed if it is none."""

    @abstractmethod
    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        """Read a call's arguments and its end, and yield all of its events."""
