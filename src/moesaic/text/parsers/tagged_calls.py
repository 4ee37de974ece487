"""Calls whose arguments are tags around plain text: Qwen3-Coder, MiniMax and GLM."""

from __future__ import annotations

import json
from typing import ClassVar

from moesaic.text.parsers.calls import MarkedCalls
from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Event, MalformedText, Steps
from moesaic.text.parsers.reader import BLANK, Reader, read_literal, read_one_of, read_up_to, skip_blank
from moesaic.text.parsers.values import find_parameters, find_types, write_json


class TaggedCalls(MarkedCalls):
    """A call is a name and arguments. A value ends at its end tag only where another key or the call's end
    follows, so that it may contain that tag. Values of strings are passed on while they arrive.
    """

    end: ClassVar[str]
    """Follows the last call of a block."""
    name: ClassVar[tuple[str, str]]
    """Around the name."""
    name_end: ClassVar[str]
    """Follows the last argument of a call."""
    key: ClassVar[tuple[str, str]]
    value: ClassVar[tuple[str, str]]
    own_lines: ClassVar[bool] = False
    """A value stands on lines of its own: its first and last newline belong to the tags."""

    def __init_subclass__(cls) -> None:
        cls.other_marks = tuple(filter(None, (cls.end, cls.name_end, *cls.key, *cls.value)))

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        if mark != self.name[0]:
            yield from skip_blank(reader)
            yield from read_literal(reader, self.name[0])
        name = yield from read_up_to(reader, self.name[1], forbidden="<\n")
        yield from skip_blank(reader)
        self._key = yield from self._next_key(reader)
        return self._begin(name)

    def _next_key(self, reader: Reader) -> Steps[str | None]:
        """Read the next key and the beginning of its value, or the call's end: None."""
        if (yield from read_one_of(reader, self.key[0], self.name_end)) == self.name_end:
            return None
        key = yield from read_up_to(reader, self.key[1], forbidden="\n")
        if self.value[0]:
            yield from skip_blank(reader)
            yield from read_literal(reader, self.value[0])
        return key

    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        while True:
            yield from self._announce(call)
            yield from self._arguments(reader, call)
            following = yield from self._following(reader)
            if following is None:
                return
            call = following

    def _arguments(self, reader: Reader, call: CallStart) -> Steps[None]:
        """Read the values and further keys of a call, up to its end."""
        schema, separator, key = find_parameters(self._tools, call.name), "{", self._key
        while key is not None:
            yield Arguments(call.index, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            writer = _Value(call.index, find_types(schema, key), self.own_lines)
            key = yield from self._value(reader, writer)
            yield from writer.flush()
            if not writer.has_ended:
                return
            separator = ", "
        yield Arguments(call.index, "{}" if separator == "{" else "}")
        yield CallEnd(call.index)

    def _value(self, reader: Reader, writer: _Value) -> Steps[str | None]:
        """Read a value, and the key or the end of the call after it."""
        end = self.value[1]
        marks = ("\n" + end, end) if self.own_lines else (end,)
        while mark := (yield from reader.read_until(marks, writer)):
            reader.attempt()
            try:
                yield from skip_blank(reader)
                key = yield from self._next_key(reader)
            except MalformedText:
                reader.fail()
                yield from writer(mark)
                continue
            reader.succeed()
            writer.has_ended = True
            return key
        return None

    def _following(self, reader: Reader) -> Steps[CallStart | None]:
        """Read the end of a block: None. Or the head of another call in it."""
        if self.name_end == self.end:
            return None
        reader.attempt()
        try:
            yield from skip_blank(reader)
            call = None
            if (yield from read_one_of(reader, self.end, self.name[0])) != self.end:
                call = yield from self._head(reader, self.name[0])
        except MalformedText:
            reader.fail()
            return None
        reader.succeed()
        return call


class _Value:
    """Writes one value as JSON: a string while it arrives, anything else at its end."""

    def __init__(self, index: int, types: frozenset[str], own_lines: bool) -> None:
        self._index = index
        self._types = types
        self._skip_newline = own_lines
        self._open = False
        """The quotation mark of a string was written."""
        self._text: list[str] = []
        self.has_ended = False

    def __call__(self, text: str) -> list[Event]:
        if self._skip_newline:
            self._skip_newline = False
            text = text.removeprefix("\n")
        if self._types != {"string"}:
            self._text.append(text)
            return []
        quote = "" if self._open else '"'
        self._open = True
        return self._make_events(quote + json.dumps(text, ensure_ascii=False)[1:-1])

    def flush(self) -> list[Event]:
        """The rest of the value. One that the end of the answer cuts off stays open."""
        if self._types == {"string"}:
            quotes = '"' if self._open else '""'
            return self._make_events(quotes if self.has_ended else "")
        text = "".join(self._text)
        return self._make_events(write_json(text, self._types) if self.has_ended else text)

    def _make_events(self, text: str) -> list[Event]:
        return [Arguments(self._index, text)] if text else []


class Qwen3Coder(TaggedCalls):
    """<tool_call><function=f><parameter=key>value</parameter></function></tool_call>

    The model sometimes leaves out the first tag.
    """

    marks: ClassVar = ("<tool_call>", "<function=")
    end: ClassVar = "</tool_call>"
    name: ClassVar = ("<function=", ">")
    name_end: ClassVar = "</function>"
    key: ClassVar = ("<parameter=", ">")
    value: ClassVar = ("", "</parameter>")
    own_lines: ClassVar = True
    ends_reasoning: ClassVar = ("<tool_call>\n<function=",)


class MiniMaxM2(TaggedCalls):
    """<minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke>
    </minimax:tool_call>
    """

    marks: ClassVar = ("<minimax:tool_call>",)
    end: ClassVar = "</minimax:tool_call>"
    name: ClassVar = ('<invoke name="', '">')
    name_end: ClassVar = "</invoke>"
    key: ClassVar = ('<parameter name="', '">')
    value: ClassVar = ("", "</parameter>")
    ends_reasoning: ClassVar = ("<minimax:tool_call>",)


class Glm(TaggedCalls):
    """<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>

    GLM-4.5 writes newlines between them, GLM-4.7 does not.
    """

    marks: ClassVar = ("<tool_call>",)
    end: ClassVar = "</tool_call>"
    name: ClassVar = ("", "")
    name_end: ClassVar = "</tool_call>"
    key: ClassVar = ("<arg_key>", "</arg_key>")
    value: ClassVar = ("<arg_value>", "</arg_value>")

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        yield from skip_blank(reader)
        name = ""
        while not name or name[-1] not in BLANK + "<":
            character = yield from reader.character()
            if not character:
                raise MalformedText
            name += character
        reader.unread(name[-1])
        yield from skip_blank(reader)
        self._key = yield from self._next_key(reader)
        return self._begin(name[:-1])
