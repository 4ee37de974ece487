"""What syntaxes of tool calls share. In most, a mark begins a call, or text that only looks like one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, MalformedText, Steps
from moesaic.text.parsers.json_text import convert_arguments, read_arguments, skip_closings
from moesaic.text.parsers.reader import (
    Reader,
    TrimmedText,
    is_at_end,
    read_if_next,
    read_one_of,
    skip_blank,
)
from moesaic.text.parsers.values import Tools

ReadEnd = Callable[[Reader, str], Steps[str]]
"""Reads the end of a call and returns it. It gets the closing brackets that its arguments lacked. Raises
MalformedText if something else stands there."""
_LONGEST_PIECE = 8192
"""Maximum number of characters of arguments in one event, since clients limit the length of a line."""


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

    Text that does not fit its syntax is content, or a part of an argument that the model writes as text. So
    every character is in an event or belongs to the syntax, and arguments are a JSON object.
    is_forced: a grammar makes the answer call, so that its calls are sound.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    """What a call begins with."""
    other_marks: ClassVar[tuple[str, ...]] = ()
    """Other texts of this syntax that may be special tokens."""
    ends_reasoning: ClassVar[tuple[str, ...]] = ()
    """What surely begins a call, and so ends the reasoning although it was not closed."""

    thinking: bool = False
    """The answer is inside of its reasoning, if this syntax tells that."""

    def __init__(self, tools: Tools = (), is_forced: bool = False) -> None:
        self._tools = tools
        self._is_forced = is_forced
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
        """The event of the next call. Raises Malformed without a name, and for a text with a mark."""
        if not name.strip() or "<" in name:
            raise MalformedText
        return CallStart(self._index, name.strip(), given_id)

    def _is_tool(self, name: str) -> bool:
        """Whether the request has a tool of this name."""
        return any(tool["function"]["name"] == name for tool in self._tools)

    def _announce(self, call: CallStart) -> Iterator[Event]:
        self._content.drop()
        self._index += 1
        yield call

    def _json_call(
        self, reader: Reader, call: CallStart, read_end: ReadEnd, early_arguments: str | None = None
    ) -> Steps[str]:
        """Read a call's arguments and its end, which is returned, and yield all of its events.

        The call is announced when all of it is read. A forced call is announced at once, and its arguments
        are passed on while they arrive. Raises MalformedText, and nothing is read, if it is no call after
        all. early_arguments: those that are read already.
        """
        pieces, end, is_complete = list[str](), "", True

        def pass_on(text: str) -> list[Event]:
            pieces.append(text)
            return [Arguments(call.index, text)] if self._is_forced and text else []

        if self._is_forced:
            yield from self._announce(call)
        reader.attempt(any_size=True)
        try:
            closings = ""
            if early_arguments is None:
                closings = yield from read_arguments(reader, pass_on)
            else:
                yield from pass_on((yield from convert_arguments(early_arguments)))
            end = yield from read_end(reader, closings)
        except MalformedText:
            if not reader.is_at_cut:
                reader.fail()
                raise
            is_complete = False
        reader.succeed()
        text = "".join(pieces)
        if not self._is_forced:
            yield from self._announce(call)
            for begin in range(0, len(text), _LONGEST_PIECE):
                yield Arguments(call.index, text[begin : begin + _LONGEST_PIECE])
        if is_complete and not text:
            yield Arguments(call.index, "{}")
        if is_complete:
            yield CallEnd(call.index)
        return end


def read_end_of_call(reader: Reader, ends: tuple[str, ...], may_be_missing: bool = False) -> Steps[str]:
    """Read one of `ends`, with white space and closing brackets that are too many before it, and return it.

    Empty at the end of a text that the model ended, or, with may_be_missing, before another text, which is
    not read. Raises MalformedText where something else stands.
    """
    surplus = yield from skip_closings(reader)
    blank = yield from skip_blank(reader)
    if (yield from is_at_end(reader)):
        return ""
    if surplus or not may_be_missing:
        return (yield from read_one_of(reader, *ends))
    end = yield from read_if_next(reader, *ends, ",")
    if end == "," or reader.is_at_cut:
        raise MalformedText
    reader.unread("" if end else blank)
    return end


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
        if not (yield from self._try_call(reader, self._head(reader, mark))):
            yield from self._content(mark)

    def _try_call(self, reader: Reader, head: Steps[CallStart]) -> Steps[bool]:
        """Read a call, which begins with `head`. False: it is none, and nothing is read."""
        reader.attempt()
        try:
            call = yield from head
        except MalformedText:
            reader.fail()
            return False
        head_text = reader.succeed()
        try:
            yield from self._call(reader, call)
        except MalformedText:
            reader.unread(head_text)
            return False
        return True

    @abstractmethod
    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        """Read a call up to its arguments. Raises Malformed if it is none."""

    @abstractmethod
    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        """Read a call's arguments and its end, and yield all of its events. Raises Malformed, and nothing is
        read, if it is no call."""
