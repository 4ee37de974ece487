"""JSON that arrives in pieces, read strictly. What can only mean one thing is mended.

Mended are line ends and other control characters in strings, a backslash that begins no escape, the constants
of Python, and closing brackets that are missing at the end.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

from moesaic.text.parsers.events import Event, MalformedText, Steps
from moesaic.text.parsers.reader import Reader, is_at_end, skip_blank

PassOn = Callable[[str], list[Event]]
"""Takes the next piece of a text, and returns its events."""
_STRING_MARKS = ('"', "\\", *map(chr, range(0x20)))
_ESCAPES = frozenset('"\\/bfnrt')
_WORD_SIGNS = frozenset(string.ascii_letters + string.digits + "+-.")
_LONGEST_WORD = 1024
"""Maximum number of characters of a number."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CONSTANTS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}


def read_json(reader: Reader, pass_on: PassOn) -> Steps[str]:
    """Read a JSON value and pass its text on. Returns the closing brackets that are missing at its end.

    It ends where the next character does not belong to it. Raises MalformedText where brackets would not
    complete it. The end of a cut text is never its end.
    """
    closings, next_token, may_close = list[str](), "value", False
    yield from skip_blank(reader)
    while closings or next_token == "value":
        blank = yield from skip_blank(reader)
        sign = yield from reader.character()
        if next_token == "value" and sign in ("{", "["):
            closings.append("}" if sign == "{" else "]")
            next_token, may_close = "key" if sign == "{" else "value", True
        elif may_close and sign == closings[-1]:
            closings.pop()
            next_token = "comma"
        elif next_token == "comma" and sign == ",":
            next_token, may_close = "key" if closings[-1] == "}" else "value", False
        elif next_token == "colon" and sign == ":":
            next_token = "value"
        elif next_token in ("key", "value") and sign == '"':
            yield from pass_on(blank + sign)
            yield from _read_string_rest(reader, pass_on)
            blank, sign = "", ""
            may_close = next_token == "value"
            next_token = "comma" if may_close else "colon"
        elif next_token == "value" and sign in _WORD_SIGNS:
            sign = yield from _read_word(reader, sign)
            next_token, may_close = "comma", True
        else:
            reader.unread(sign)
            if not may_close or reader.is_at_cut:
                raise MalformedText
            break
        yield from pass_on(blank + sign)
    return "".join(reversed(closings))


def read_value(reader: Reader) -> Steps[str]:
    """The text of a JSON value that is complete. Raises MalformedText."""
    pieces = list[str]()
    if (yield from read_json(reader, _collect(pieces))):
        raise MalformedText
    return "".join(pieces)


def read_string(reader: Reader) -> Steps[str]:
    """The next JSON string, decoded. Raises MalformedText."""
    text = yield from read_value(reader)
    if text[0] != '"':
        raise MalformedText
    return str(json.loads(text))


def read_arguments(reader: Reader, pass_on: PassOn) -> Steps[str]:
    """Read the arguments of a call and pass them on as a JSON object, or nothing where there are none.

    null is an empty object, and a string contains an object. Returns the closing brackets that were missing.
    Raises MalformedText.
    """
    yield from skip_blank(reader)
    first = yield from reader.character()
    reader.unread(first)
    if first == "{":
        closings = yield from read_json(reader, pass_on)
        yield from pass_on(closings)
        return closings
    if not first and reader.is_cut:
        raise MalformedText
    pieces = list[str]()
    if first and first in '"nN':
        try:
            yield from read_json(reader, _collect(pieces))
            pieces = [(yield from _convert_value("".join(pieces)))]
        except MalformedText:
            yield from pass_on("".join(pieces))  # the beginning of a value that was cut
            raise
    yield from pass_on("".join(pieces))
    return ""


def convert_arguments(text: str) -> Steps[str]:
    """The JSON object that `text` is as the arguments of a call. Raises MalformedText."""
    reader, pieces = Reader(), list[str]()
    reader.add(text)
    reader.end()
    yield from read_arguments(reader, _collect(pieces))
    yield from skip_blank(reader)
    if not (yield from is_at_end(reader)):
        raise MalformedText
    return "".join(pieces) or "{}"


def _convert_value(text: str) -> Steps[str]:
    """The JSON object that a JSON value other than an object is as the arguments of a call."""
    if text == "null":
        return "{}"
    if text[0] != '"':
        raise MalformedText
    return (yield from convert_arguments(json.loads(text)))


def skip_closings(reader: Reader) -> Steps[str]:
    """Skip closing brackets that are too many, and white space before them. Returns them."""
    closings = ""
    while True:
        blank = yield from skip_blank(reader)
        sign = yield from reader.character()
        if not sign or sign not in "]}":
            reader.unread(blank + sign)
            return closings
        closings += sign


def _collect(pieces: list[str]) -> PassOn:
    def pass_on(text: str) -> list[Event]:
        pieces.append(text)
        return []

    return pass_on


def _read_string_rest(reader: Reader, pass_on: PassOn) -> Steps[None]:
    """Read a string behind its first quotation mark."""
    while mark := (yield from reader.read_until(_STRING_MARKS, pass_on)):
        if mark == "\\":
            mark = yield from _read_escape(reader)
        elif mark < " ":
            mark = json.dumps(mark)[1:-1]
        yield from pass_on(mark)
        if mark == '"':
            return
    raise MalformedText


def _read_escape(reader: Reader) -> Steps[str]:
    """Read an escape behind its backslash. A backslash that begins none stands for itself.

    Raises MalformedText for an escaped apostrophe, whose backslash may be meant or not.
    """
    escape = yield from reader.character()
    while escape[:1] == "u" and len(escape) < 5:
        digit = yield from reader.character()
        escape += digit
        if not digit or digit not in string.hexdigits:
            break
    else:
        if escape == "'":
            raise MalformedText
        if escape[:1] == "u" or escape in _ESCAPES:
            return f"\\{escape}"
    if reader.is_at_cut:
        return f"\\{escape}"
    reader.unread(escape)
    return "\\\\"


def _read_word(reader: Reader, first: str) -> Steps[str]:
    """A number or a constant as JSON writes it. At the end of a cut text it may be the beginning of one."""
    word = character = first
    while (character := (yield from reader.character())) and character in _WORD_SIGNS:
        word += character
        if len(word) > _LONGEST_WORD:
            raise MalformedText
    reader.unread(character)
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    is_beginning = any(constant.startswith(word) for constant in _CONSTANTS) or _NUMBER.fullmatch(f"{word}0")
    if not (_NUMBER.fullmatch(word) or (reader.is_at_cut and is_beginning)):
        reader.unread(word)
        raise MalformedText
    return word
