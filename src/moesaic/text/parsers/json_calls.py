"""Calls that are JSON objects with a name and arguments: Hermes, Qwen and Mistral."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from moesaic.text.parsers.calls import MarkedCalls, read_end_of_call
from moesaic.text.parsers.events import CallStart, MalformedText, Steps
from moesaic.text.parsers.json_text import read_string, read_value
from moesaic.text.parsers.reader import Reader, read_if_next, read_literal, read_one_of, skip_blank

_ARGUMENTS = ("arguments", "parameters")
_IGNORED_KEYS = ("id", "type", "index")
"""What a call has in OpenAI's API beside its function. Another key may be an argument in the wrong place."""


class JsonCalls(MarkedCalls):
    """Objects {"name": ..., "arguments": {...}}, of which several may stand behind one mark."""

    _early_arguments: str | None = None
    """The arguments of an object that was read to its end as a head. None: they follow."""
    _may_go_on = False
    """Another object may follow."""

    def _read_marked_call(self, reader: Reader, mark: str) -> Steps[None]:
        if not (yield from self._try_call(reader, self._head(reader, mark))):
            yield from self._content(mark)
            return
        while self._may_go_on and (yield from self._try_call(reader, self._object(reader))):
            pass

    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        yield from self._json_call(reader, call, self._read_end, self._early_arguments)

    @abstractmethod
    def _read_end(self, reader: Reader, closings: str) -> Steps[str]:
        """Read what follows arguments. See `ReadEnd`."""

    def _object(self, reader: Reader) -> Steps[CallStart]:
        """Read an object up to the value of its arguments, or to its end where they came first."""
        self._early_arguments, early_arguments, name = None, "", ""
        yield from skip_blank(reader)
        yield from read_literal(reader, "{")
        while True:
            key = yield from _read_key(reader)
            if key == "name" and not name:
                name = yield from read_string(reader)
            elif key in _ARGUMENTS and name and not early_arguments:
                return self._begin(name)
            elif key in _ARGUMENTS and not early_arguments:
                early_arguments = yield from read_value(reader)
            else:
                yield from _read_ignored_value(reader, key)
            yield from skip_blank(reader)
            if (yield from read_one_of(reader, ",", "}")) == "}":
                self._early_arguments = early_arguments
                return self._begin(name)

    def _rest_of_object(self, reader: Reader) -> Steps[bool]:
        """Read further keys and the end of an object. False: its end is missing. Raises Malformed."""
        while self._early_arguments is None:
            yield from skip_blank(reader)
            sign = yield from read_if_next(reader, ",", "}")
            if sign != ",":
                return sign == "}"
            yield from _read_ignored_value(reader, (yield from _read_key(reader)))
        return True


def _read_key(reader: Reader) -> Steps[str]:
    key = yield from read_string(reader)
    yield from skip_blank(reader)
    yield from read_literal(reader, ":")
    return key


def _read_ignored_value(reader: Reader, key: str) -> Steps[None]:
    """Read the value of a key that is ignored. Raises Malformed for another key."""
    if key not in _IGNORED_KEYS:
        raise MalformedText
    yield from read_value(reader)


class Hermes(JsonCalls):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>

    Models leave the end tag out, or write two objects before it.
    """

    marks: ClassVar = ("<tool_call>",)
    other_marks: ClassVar = ("</tool_call>",)
    ends_reasoning: ClassVar = ('<tool_call>\n{"name":', '<tool_call>{"name":')

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        return (yield from self._object(reader))

    def _read_end(self, reader: Reader, closings: str) -> Steps[str]:
        is_closed = yield from self._rest_of_object(reader)
        tag = yield from read_end_of_call(reader, (*self.other_marks, *self.marks), may_be_missing=is_closed)
        self._may_go_on = not tag
        reader.unread(tag if tag in self.marks else "")
        return tag


class Mistral(JsonCalls):
    """[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...} for each call.

    Models write the token twice, leave the brackets of the list out, or the arguments of the last call.
    """

    marks: ClassVar = ("[TOOL_CALLS]",)
    other_marks: ClassVar = ("[ARGS]", "[CALL_ID]")
    ends_reasoning: ClassVar = marks
    _is_list = False

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        yield from skip_blank(reader)
        while (yield from read_if_next(reader, mark)):
            yield from skip_blank(reader)
        first = yield from reader.character()
        self._is_list = first in ("[", "{")
        if self._is_list:
            reader.unread(first.removeprefix("["))
            return (yield from self._object(reader))
        self._early_arguments, read = None, first
        while not read.endswith("{"):
            character = yield from reader.character()
            if not character and self._is_tool(read.strip()) and not reader.is_cut:
                self._early_arguments = ""
                return self._begin(read)
            if not character or character in "<\n":
                raise MalformedText
            read += character
        reader.unread("{")
        match = re.fullmatch(r"([^\[]*)(?:(?:\[CALL_ID\](\S*?))?\[ARGS\]\s*)?", read[:-1])
        if match is None:
            raise MalformedText
        return self._begin(match[1], match[2])

    def _read_end(self, reader: Reader, closings: str) -> Steps[str]:
        is_closed = (yield from self._rest_of_object(reader)) if self._is_list else not closings
        self._may_go_on = False
        if self._is_list and is_closed:
            blank = yield from skip_blank(reader)
            sign = yield from read_if_next(reader, ",", "]")
            if sign == ",":
                self._may_go_on = True
                yield from skip_blank(reader)
                yield from read_literal(reader, "{")
                reader.unread("{")
                return sign
            reader.unread("" if sign else blank)
        mark = yield from read_end_of_call(reader, self.marks, may_be_missing=is_closed)
        reader.unread(mark)
        return mark
