"""Calls that are JSON objects with a name and arguments: Hermes, Qwen and Mistral."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from moesaic.text.parsers.calls import MarkedCalls
from moesaic.text.parsers.events import Arguments, CallBegun, CallEnded, Malformed, Steps
from moesaic.text.parsers.reader import BLANK, Reader, blank, either, literal

_ARGUMENTS = ("arguments", "parameters")
_SIGNS = re.compile(r'[\\"{}\[\]<]')


class _Value:
    """Finds the end of a JSON object or list. It checks only what decides where that is."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.broken = False
        """It ended at a `<` outside of strings, which no JSON has."""

    def end(self, text: str) -> int | None:
        """Index after the value's end in `text`, which comes next. None: it goes on."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while found := _SIGNS.search(text, at):
            sign, at = found[0], found.end()
            if self._in_string:
                if sign == "\\":
                    self._escaped = at == len(text)
                    at += 1
                self._in_string = sign != '"'
            elif sign == '"':
                self._in_string = True
            elif sign == "<":
                self.broken = True
                return at - 1
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


def value(reader: Reader) -> Steps[str]:
    """The text of the next JSON value. Use it within an attempt."""
    yield from blank(reader)
    first = yield from reader.character()
    if first == '"':
        return first + (yield from _string_rest(reader))
    if first in ("{", "["):
        return (yield from _nested_rest(reader, first))
    reader.back(first)
    read = ""
    while True:
        character = yield from reader.character()
        if not character or character in BLANK + ',}]"<':
            reader.back(character)
            return read
        read += character


def string(reader: Reader) -> Steps[str]:
    """The next JSON string, decoded. Use it within an attempt."""
    yield from blank(reader)
    yield from literal(reader, '"')
    return str(_decoded('"' + (yield from _string_rest(reader))))


def _string_rest(reader: Reader) -> Steps[str]:
    read: list[str] = []
    while True:
        character = yield from reader.character()
        if not character:
            raise Malformed
        read.append(character)
        if character == '"':
            return "".join(read)
        if character == "\\":
            read.append((yield from reader.character()))


def _nested_rest(reader: Reader, first: str) -> Steps[str]:
    scan, read = _Value(), [first]
    scan.end(first)
    while True:
        character = yield from reader.character()
        if not character:
            raise Malformed
        ended = scan.end(character)
        if scan.broken:
            raise Malformed
        read.append(character)
        if ended is not None:
            return "".join(read)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Malformed from None


class JsonCalls(MarkedCalls):
    """Objects {"name": ..., "arguments": {...}}. The arguments are passed on as the model writes them."""

    def __init__(self, tools: Any = ()) -> None:
        super().__init__(tools)
        self._early: str | None = None
        """Arguments that came before the name."""
        self._ended = False
        """The object ended before `_call` reads it."""

    def _object(self, reader: Reader) -> Steps[CallBegun]:
        """Read an object up to the value of its arguments, or to its end where they came first."""
        self._early, self._ended, name = None, False, ""
        yield from blank(reader)
        yield from literal(reader, "{")
        while True:
            key = yield from string(reader)
            yield from blank(reader)
            yield from literal(reader, ":")
            if key == "name":
                name = yield from string(reader)
            elif key in _ARGUMENTS and name:
                yield from blank(reader)
                return self._begin(name)
            else:
                read = yield from value(reader)
                self._early = read if key in _ARGUMENTS else self._early
            yield from blank(reader)
            if (yield from either(reader, ",", "}")) == "}":
                self._ended = True
                return self._begin(name)

    def _arguments(self, reader: Reader, call: CallBegun) -> Steps[None]:
        """Read the arguments up to their end, or pass on those that came before the name."""
        yield from self._announce(call)
        if self._ended:
            yield Arguments(call.index, _as_object(self._early))
            return
        first = yield from reader.character()
        if not first:
            return
        reader.back(first)
        if first not in ("{", "["):
            yield from self._scalar(reader, call)
            return
        scan = _Value()
        while True:
            text = yield from reader.some()
            if not text:
                return
            end = scan.end(text)
            if end is not None:
                reader.back(text[end:])
                text = text[:end]
            if text:
                yield Arguments(call.index, text)
            if end is not None:
                return

    def _scalar(self, reader: Reader, call: CallBegun) -> Steps[None]:
        """Arguments that are no object: null, or a string that contains one."""
        reader.attempt()
        try:
            read = yield from value(reader)
        except Malformed:
            reader.fail()
            while rest := (yield from reader.some()):
                yield Arguments(call.index, rest)
            return
        reader.succeed()
        yield Arguments(call.index, _as_object(read))

    def _rest_of_object(self, reader: Reader) -> Steps[None]:
        """Read further keys and the end of an object. Raises Malformed."""
        yield from blank(reader)
        while not self._ended and (yield from either(reader, ",", "}")) == ",":
            yield from string(reader)
            yield from blank(reader)
            yield from literal(reader, ":")
            yield from value(reader)
            yield from blank(reader)


def _as_object(text: str | None) -> str:
    """Arguments as a JSON object: null or none are empty, a string contains them."""
    if not text or text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    try:
        return str(_decoded(text)) or "{}"
    except Malformed:
        return text


class Hermes(JsonCalls):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>"""

    marks: ClassVar = ("<tool_call>",)
    further: ClassVar = ("</tool_call>",)

    def _head(self, reader: Reader, mark: str) -> Steps[CallBegun]:
        return (yield from self._object(reader))

    def _call(self, reader: Reader, call: CallBegun) -> Steps[None]:
        yield from self._arguments(reader, call)
        complete = yield from _tried(reader, self._rest_of_object(reader))
        tagged = yield from _tried(reader, _end_tag(reader))
        if complete or tagged:
            yield CallEnded(call.index)


class Mistral(JsonCalls):
    """[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...} for each call."""

    marks: ClassVar = ("[TOOL_CALLS]",)
    further: ClassVar = ("[ARGS]", "[CALL_ID]")

    def __init__(self, tools: Any = ()) -> None:
        super().__init__(tools)
        self._listed = False

    def _head(self, reader: Reader, mark: str) -> Steps[CallBegun]:
        yield from blank(reader)
        first = yield from reader.character()
        self._listed = first == "["
        if self._listed:
            return (yield from self._object(reader))
        self._early, self._ended, read = None, False, first
        while not read.endswith("{"):
            character = yield from reader.character()
            if not character or character in "<\n":
                raise Malformed
            read += character
        reader.back("{")
        name, _, rest = read[:-1].partition("[")
        found = re.fullmatch(r"(?:CALL_ID\](\S*?)\[)?ARGS\]\s*|", rest)
        if found is None:
            raise Malformed
        return self._begin(name, found[1])

    def _call(self, reader: Reader, call: CallBegun) -> Steps[None]:
        while True:
            yield from self._arguments(reader, call)
            if not self._listed:
                yield CallEnded(call.index)
                return
            if (yield from _tried(reader, self._rest_of_object(reader))):
                yield CallEnded(call.index)
            reader.attempt()
            try:
                yield from blank(reader)
                if (yield from either(reader, ",", "]")) == "]":
                    reader.succeed()
                    return
                call = yield from self._object(reader)
            except Malformed:
                reader.fail()
                return
            reader.succeed()


def _end_tag(reader: Reader) -> Steps[None]:
    yield from blank(reader)
    yield from literal(reader, "</tool_call>")


def _tried(reader: Reader, steps: Steps[None]) -> Steps[bool]:
    """Carry out `steps`. False if the text is malformed: then nothing of it is read."""
    reader.attempt()
    try:
        yield from steps
    except Malformed:
        reader.fail()
        return False
    reader.succeed()
    return True
