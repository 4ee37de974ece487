"""Calls that are JSON objects with a name and arguments: Hermes, Qwen and Mistral."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from moesaic.text.parsers.calls import JsonStrings, MarkedCalls
from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, MalformedText, Steps
from moesaic.text.parsers.reader import BLANK, Reader, read_if_next, read_literal, read_one_of, skip_blank

_ARGUMENTS = ("arguments", "parameters")
_SIGNS = re.compile(r'[\\"{}\[\]<]')


class _Value:
    """Finds the end of a JSON object or list. It checks only what decides where that is."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_broken = False
        """It ended at a `<` outside of strings, which no JSON has."""

    def end(self, text: str) -> int | None:
        """Index after the value's end in `text`, which comes next. None: it goes on."""
        position = 0
        if self._is_escaped and text:
            self._is_escaped, position = False, 1
        while match := _SIGNS.search(text, position):
            sign, position = match[0], match.end()
            if self._in_string:
                if sign == "\\":  # the character behind it is no sign
                    self._is_escaped = position == len(text)
                    position += 1
                self._in_string = sign != '"'
            elif sign == '"':
                self._in_string = True
            elif sign == "<":
                self.is_broken = True
                return position - 1
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position
        return None


def value(reader: Reader) -> Steps[str]:
    """The text of the next JSON value. Use it within an attempt."""
    yield from skip_blank(reader)
    first = yield from reader.character()
    if first == '"':
        return first + (yield from _read_string_rest(reader))
    if first in ("{", "["):
        return (yield from _read_nested(reader, first))
    reader.unread(first)
    read = ""
    while True:
        character = yield from reader.character()
        if not character or character in BLANK + ',}]"<':
            reader.unread(character)
            return read
        read += character


def string(reader: Reader) -> Steps[str]:
    """The next JSON string, decoded. Use it within an attempt."""
    yield from skip_blank(reader)
    yield from read_literal(reader, '"')
    return str(_decode('"' + (yield from _read_string_rest(reader))))


def _read_string_rest(reader: Reader) -> Steps[str]:
    read: list[str] = []
    while True:
        character = yield from reader.character()
        if not character:
            raise MalformedText
        read.append(character)
        if character == '"':
            return "".join(read)
        if character == "\\":
            read.append((yield from reader.character()))


def _read_nested(reader: Reader, first: str) -> Steps[str]:
    scan, read = _Value(), [first]
    scan.end(first)
    while True:
        character = yield from reader.character()
        if not character:
            raise MalformedText
        end = scan.end(character)
        if scan.is_broken:
            raise MalformedText
        read.append(character)
        if end is not None:
            return "".join(read)


def _decode(text: str) -> Any:
    try:
        return json.loads(text, strict=False)  # models write newlines in strings, which JSON forbids
    except (ValueError, RecursionError):
        raise MalformedText from None


class JsonCalls(MarkedCalls):
    """Objects {"name": ..., "arguments": {...}}. The arguments are passed on as the model writes them."""

    def __init__(self, tools: Any = ()) -> None:
        super().__init__(tools)
        self._early_arguments: str | None = None
        """Arguments that came before the name."""
        self._has_ended = False
        """The object ended before `_call` reads it."""

    def _object(self, reader: Reader) -> Steps[CallStart]:
        """Read an object up to the value of its arguments, or to its end where they came first."""
        self._early_arguments, self._has_ended, name = None, False, ""
        yield from skip_blank(reader)
        yield from read_literal(reader, "{")
        while True:
            key = yield from string(reader)
            yield from skip_blank(reader)
            yield from read_literal(reader, ":")
            if key == "name":
                name = yield from string(reader)
            elif key in _ARGUMENTS and name:
                yield from skip_blank(reader)
                return self._begin(name)
            else:
                read = yield from value(reader)
                self._early_arguments = read if key in _ARGUMENTS else self._early_arguments
            yield from skip_blank(reader)
            if (yield from read_one_of(reader, ",", "}")) == "}":
                self._has_ended = True
                return self._begin(name)

    def _arguments(self, reader: Reader, call: CallStart) -> Steps[bool]:
        """Read the arguments up to their end, or pass on those that came before the name.

        False: the end is missing.
        """
        yield from self._announce(call)
        if self._has_ended:
            yield Arguments(call.index, _as_object(self._early_arguments))
            return True
        first = yield from reader.character()
        if not first:
            return False
        reader.unread(first)
        if first not in ("{", "["):
            return (yield from self._scalar(reader, call))
        scan, strings = _Value(), JsonStrings()
        while True:
            text = yield from reader.read_available()
            if not text:
                return False
            end = scan.end(text)
            if end is not None:
                reader.unread(text[end:])
                text = text[:end]
            if text:
                yield Arguments(call.index, strings.escape(text))
            if end is not None:
                return True

    def _scalar(self, reader: Reader, call: CallStart) -> Steps[bool]:
        """Arguments that are no object: null, or a string that contains one. False: the end is missing."""
        reader.attempt()
        try:
            read = yield from value(reader)
        except MalformedText:
            reader.fail()
            while text := (yield from reader.read_available()):
                yield Arguments(call.index, text)
            return False
        reader.succeed()
        yield Arguments(call.index, _as_object(read))
        return True

    def _rest_of_object(self, reader: Reader) -> Steps[None]:
        """Read further keys and the end of an object. Raises Malformed."""
        yield from skip_blank(reader)
        while not self._has_ended and (yield from read_one_of(reader, ",", "}")) == ",":
            yield from string(reader)
            yield from skip_blank(reader)
            yield from read_literal(reader, ":")
            yield from value(reader)
            yield from skip_blank(reader)


def _as_object(text: str | None) -> str:
    """Arguments as a JSON object: null or none are empty, a string contains them."""
    if not text or text == "null":
        return "{}"
    if text.startswith('"'):
        try:
            text = str(_decode(text)) or "{}"
        except MalformedText:
            return text
    return JsonStrings().escape(text)


class Hermes(JsonCalls):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>"""

    marks: ClassVar = ("<tool_call>",)
    other_marks: ClassVar = ("</tool_call>",)
    ends_reasoning: ClassVar = ('<tool_call>\n{"name":', '<tool_call>{"name":')

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        return (yield from self._object(reader))

    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        yield from self._arguments(reader, call)
        is_complete = yield from _try_steps(reader, self._rest_of_object(reader))
        has_end_tag = yield from _try_steps(reader, _end_tag(reader))
        if is_complete or has_end_tag:
            yield CallEnd(call.index)


class Mistral(JsonCalls):
    """[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...} for each call.

    Models write the token twice, leave the brackets of the list out, or the arguments of the last call.
    """

    marks: ClassVar = ("[TOOL_CALLS]",)
    other_marks: ClassVar = ("[ARGS]", "[CALL_ID]")
    ends_reasoning: ClassVar = marks

    def __init__(self, tools: Any = ()) -> None:
        super().__init__(tools)
        self._is_list = False

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        yield from skip_blank(reader)
        while (yield from read_if_next(reader, mark)):
            yield from skip_blank(reader)
        first = yield from reader.character()
        self._is_list = first in ("[", "{")
        if self._is_list:
            reader.unread(first.removeprefix("["))
            return (yield from self._object(reader))
        self._early_arguments, self._has_ended, read = None, False, first
        while not read.endswith("{"):
            character = yield from reader.character()
            if not character and self._is_tool(read.strip()) and not reader.is_cut:
                self._has_ended = True
                return self._begin(read)
            if not character or character in "<\n":
                raise MalformedText
            read += character
        reader.unread("{")
        match = re.fullmatch(r"([^\[]*)(?:(?:\[CALL_ID\](\S*?))?\[ARGS\]\s*)?", read[:-1])
        if match is None:
            raise MalformedText
        return self._begin(match[1], match[2])

    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        while True:
            has_arguments = yield from self._arguments(reader, call)
            if not self._is_list:
                if has_arguments:
                    yield CallEnd(call.index)
                return
            if (yield from _try_steps(reader, self._rest_of_object(reader))):
                yield CallEnd(call.index)
            reader.attempt()
            try:
                yield from skip_blank(reader)
                if (yield from read_one_of(reader, ",", "]")) == "]":
                    reader.succeed()
                    return
                call = yield from self._object(reader)
            except MalformedText:
                reader.fail()
                return
            reader.succeed()


def _end_tag(reader: Reader) -> Steps[None]:
    yield from skip_blank(reader)
    yield from read_literal(reader, "</tool_call>")


def _try_steps(reader: Reader, steps: Steps[None]) -> Steps[bool]:
    """Carry out `steps`. False if the text is malformed: then nothing of it is read."""
    reader.attempt()
    try:
        yield from steps
    except MalformedText:
        reader.fail()
        return False
    reader.succeed()
    return True
