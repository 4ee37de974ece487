"""Calls whose arguments are tags around plain text: Qwen3-Coder, MiniMax and GLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moesaic.text.parsers.calls import MarkedCalls
from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Event, MalformedText, Steps
from moesaic.text.parsers.reader import (
    BLANK,
    Reader,
    is_at_end,
    read_if_next,
    read_literal,
    read_one_of,
    read_up_to,
    skip_blank,
)
from moesaic.text.parsers.values import find_parameters, find_types, write_json


@dataclass(frozen=True)
class _Tag:
    """What stands behind the name or behind a value of a call."""

    key: str | None = None
    """The key of the next argument. None: the call has ended."""
    ends_block: bool = False
    """The block has ended with the call, or another block begins."""
    closes_value: bool = False
    """The end tag of the value before it was there."""


class TaggedCalls(MarkedCalls):
    """A call is a name and arguments. Values of strings are passed on while they arrive.

    A value ends at its end tag only where another tag of the call follows, so that it may contain that tag.
    Models leave tags out. So a value also ends at another tag, where that can only stand outside of it: the
    tag of a further argument of this tool, or an end of the call that something of the syntax follows.
    """

    end: ClassVar[str]
    """Follows the last call of a block."""
    name: ClassVar[tuple[str, str]]
    """Around the name."""
    name_end: ClassVar[str]
    """Follows the last argument of a call."""
    key: ClassVar[tuple[str, str]]
    value: ClassVar[tuple[str, str]]
    separator: ClassVar[str] = ""
    """Follows the name, if it is no part of `name`."""
    own_lines: ClassVar[bool] = False
    """A value stands on lines of its own: its first and last newline belong to the tags."""

    def __init_subclass__(cls) -> None:
        tags = (cls.end, cls.name_end, *cls.key, *cls.value, cls.separator)
        cls.other_marks = tuple(filter(None, tags))

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        if mark != self.name[0]:
            yield from skip_blank(reader)
            yield from read_literal(reader, self.name[0])
        name = yield from read_up_to(reader, self.name[1], forbidden="<\n")
        self._tag = yield from self._next_tag(reader, may_end=self._is_tool(name))
        return self._begin(name)

    def _next_tag(self, reader: Reader, may_end: bool = False) -> Steps[_Tag]:
        """Read the next key and the beginning of its value, or the end of the call.

        may_end: the end of the text is the call's end too, where the model ended it.
        """
        yield from skip_blank(reader)
        if may_end and (yield from is_at_end(reader)):
            return _Tag(ends_block=True)
        tags = dict.fromkeys((self.key[0], self.name_end, self.end, *self._starts))
        tag = yield from read_one_of(reader, *tags)
        if tag == self.key[0]:
            return _Tag((yield from self._rest_of_key(reader)))
        if tag in self._starts:
            reader.unread(tag)
        return _Tag(ends_block=tag != self.name_end or tag == self.end)

    @property
    def _starts(self) -> tuple[str, ...]:
        """What begins another call."""
        return tuple(dict.fromkeys(filter(None, (*self.marks, self.name[0]))))

    def _rest_of_key(self, reader: Reader) -> Steps[str]:
        """Read a key behind its first tag, and the beginning of its value."""
        return (yield from read_up_to(reader, self.key[1], forbidden="\n"))

    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        while True:
            yield from self._announce(call)
            tag = yield from self._arguments(reader, call)
            following = None if tag is None or tag.ends_block else (yield from self._following(reader))
            if following is None:
                return
            call = following

    def _arguments(self, reader: Reader, call: CallStart) -> Steps[_Tag | None]:
        """Read the values and further keys of a call, up to its end. None: it was cut."""
        schema, separator, tag = find_parameters(self._tools, call.name), "{", self._tag
        keys = _Keys(schema)
        while tag.key is not None:
            yield Arguments(call.index, f"{separator}{json.dumps(tag.key, ensure_ascii=False)}: ")
            keys.earlier_keys.add(tag.key)
            writer = _Value(call.index, find_types(schema, tag.key), self.own_lines)
            next_tag = yield from self._value(reader, writer, keys)
            yield from writer.end(next_tag)
            if next_tag is None:
                return None
            tag, separator = next_tag, ", "
        yield Arguments(call.index, "{}" if separator == "{" else "}")
        yield CallEnd(call.index)
        return tag

    def _value(self, reader: Reader, writer: _Value, keys: _Keys) -> Steps[_Tag | None]:
        """Read a value, and the tag after it. None: the text was cut."""
        closing = self.value[1].removesuffix(">")
        outer_tags = dict.fromkeys((self.key[0], self.name_end, self.end, *self._starts))
        marks = (closing, *outer_tags, *(f"\n{tag}" for tag in outer_tags))
        marks += (f"\n{closing}",) if self.own_lines else ()
        while mark := (yield from reader.read_until(marks, writer)):
            tag = yield from self._try_tag(reader, mark, keys)
            if tag is not None:
                return tag
            yield from writer(mark)
        return None if reader.is_cut else _Tag(ends_block=True)

    def _try_tag(self, reader: Reader, mark: str, keys: _Keys) -> Steps[_Tag | None]:
        """Read what `mark` begins, if that ends a value. None: it is a part of the value."""
        tag = mark.removeprefix("\n")
        reader.attempt()
        try:
            if tag == self.value[1].removesuffix(">"):
                yield from _rest_of_tag(reader)
                next_tag = replace((yield from self._next_tag(reader, may_end=True)), closes_value=True)
            elif tag == self.key[0]:
                key = yield from self._rest_of_key(reader)
                if not keys.may_follow(key, is_on_own_line=mark != tag):
                    raise MalformedText
                next_tag = _Tag(key)
            else:
                check = self._check_start if tag in self._starts else self._check_end
                yield from check(reader, tag, mark != tag)
                reader.fail()  # what follows is read again
                reader.unread(tag if tag in self._starts else "")
                return _Tag(ends_block=tag != self.name_end or tag == self.end)
        except MalformedText:
            reader.fail()
            return None
        reader.succeed()
        return next_tag

    def _check_start(self, reader: Reader, tag: str, is_on_own_line: bool) -> Steps[None]:
        """Raise MalformedText unless `tag` begins a call of a tool of the request."""
        own_tag = self._tag
        try:
            call = yield from self._head(reader, tag)
        finally:
            self._tag = own_tag
        if not self._is_tool(call.name):
            raise MalformedText

    def _check_end(self, reader: Reader, tag: str, is_on_own_line: bool) -> Steps[None]:
        """Raise MalformedText unless the end `tag` of a call or block stands outside of a value."""
        blank = yield from skip_blank(reader)
        if (yield from is_at_end(reader)) or (tag == self.end and is_on_own_line and "\n" in blank):
            return
        followers = self._starts if tag == self.end else (self.end, *self._starts)
        yield from read_one_of(reader, *dict.fromkeys(followers))

    def _following(self, reader: Reader) -> Steps[CallStart | None]:
        """Read the end of a block: None. Or the head of another call in it."""
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


class _Keys:
    """The arguments that a call may still have."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._schema_keys = frozenset(properties) if isinstance(properties, Mapping) else frozenset[str]()
        self.earlier_keys: set[str] = set()

    def may_follow(self, key: str, is_on_own_line: bool) -> bool:
        """Whether the tag of `key` ends a value that has no end tag. Without a schema its line decides."""
        return key not in self.earlier_keys and (
            key in self._schema_keys or (not self._schema_keys and is_on_own_line)
        )


def _read_text(reader: Reader) -> Steps[str]:
    """The text before the next tag, or before the end."""
    text = ""
    while (character := (yield from reader.character())) not in ("", "<"):
        text += character
    reader.unread(character)
    return text


def _rest_of_tag(reader: Reader) -> Steps[None]:
    """Read the end of an end tag, whose name may be garbled, as in </parameter1>."""
    name_end = yield from read_up_to(reader, ">", forbidden="<\n ")
    if name_end and not name_end.isalnum():
        raise MalformedText


class _Value:
    """Writes one value as JSON: a string while it arrives, anything else at its end."""

    def __init__(self, index: int, types: frozenset[str], own_lines: bool) -> None:
        self._index = index
        self._types = types
        self._skip_newline = own_lines
        self._open = False
        """The quotation mark of a string was written."""
        self._text: list[str] = []
        self._last_newlines = ""
        """New lines that are a part of the value if its end tag follows."""

    def __call__(self, text: str) -> list[Event]:
        if self._skip_newline:
            self._skip_newline = False
            text = text.removeprefix("\n")
        text = self._last_newlines + text
        body = text.rstrip("\n")
        self._last_newlines = text[len(body) :]
        return self._write(body)

    def end(self, tag: _Tag | None) -> list[Event]:
        """The rest of the value. tag: what follows. None: the value was cut and stays open."""
        events = self._write(self._last_newlines) if tag is None or tag.closes_value else []
        if self._types == {"string"}:
            quotes = '"' if self._open else '""'
            return events + self._make_events("" if tag is None else quotes)
        text = "".join(self._text)
        return self._make_events(text if tag is None else write_json(text, self._types))

    def _write(self, text: str) -> list[Event]:
        if self._types != {"string"}:
            self._text.append(text)
            return []
        quote = "" if self._open or not text else '"'
        self._open = self._open or bool(text)
        return self._make_events(quote + json.dumps(text, ensure_ascii=False)[1:-1])

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
    ends_reasoning: ClassVar = ("<tool_call>\n<function=", "<tool_call><function=")


class MiMo(Qwen3Coder):
    """The same without lines of their own: new lines at the edges of a value belong to it."""

    own_lines: ClassVar = False


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

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    end: ClassVar = "</tool_call>"
    name: ClassVar = ("", "")
    name_end: ClassVar = "</tool_call>"
    key: ClassVar = ("<arg_key>", "</arg_key>")
    value: ClassVar = ("<arg_value>", "</arg_value>")
    ends_reasoning: ClassVar[tuple[str, ...]] = marks

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        text = yield from _read_text(reader)
        if self._is_tool(text.strip()) and (yield from is_at_end(reader)):
            self._tag = _Tag(ends_block=True)
            return self._begin(text)
        tag = yield from read_one_of(reader, *self.key, self.end, *self.marks)
        if tag in self.marks:  # another call begins
            reader.unread(tag)
        name, key = text.strip(), None
        if tag == self.key[0]:
            key = yield from self._rest_of_key(reader)
        elif tag == self.key[1]:  # the tag before the key is missing
            name, key = self._split_head(name)
            yield from self._begin_value(reader)
        if not name or any(blank in name for blank in BLANK):
            raise MalformedText
        self._tag = _Tag(key, ends_block=key is None)
        return self._begin(name)

    def _rest_of_key(self, reader: Reader) -> Steps[str]:
        key = yield from read_up_to(reader, "<", forbidden="\n")
        reader.unread("<")
        if (yield from read_one_of(reader, self.key[1], self.value[0])) == self.key[1]:
            yield from self._begin_value(reader)
        return key

    def _begin_value(self, reader: Reader) -> Steps[None]:
        """Read white space and the tag before a value, which may be missing."""
        yield from skip_blank(reader)
        yield from read_if_next(reader, self.value[0])

    def _split_head(self, text: str) -> tuple[str, str]:
        """A tool and its first key, which `text` has without a tag between. Raises MalformedText."""
        for tool in self._tools:
            name = str(tool["function"]["name"])
            key = text.removeprefix(name).strip()
            if text.startswith(name) and key in (find_parameters(self._tools, name).get("properties") or ()):
                return name, key
        raise MalformedText


class Hy3(Glm):
    """<tool_calls><tool_call>f<tool_sep><arg_key>key</arg_key><arg_value>value</arg_value></tool_call></tool_calls>

    Each of these tags has the suffix `:opensource`. Those of the preview have none.
    """

    section: ClassVar = ("<tool_calls:opensource>", "</tool_calls:opensource>")
    call_begin: ClassVar = "<tool_call:opensource>"
    separator: ClassVar = "<tool_sep:opensource>"
    marks: ClassVar = (*section, call_begin)
    end: ClassVar = "</tool_call:opensource>"
    name_end: ClassVar = "</tool_call:opensource>"
    key: ClassVar = ("<arg_key:opensource>", "</arg_key:opensource>")
    value: ClassVar = ("<arg_value:opensource>", "</arg_value:opensource>")
    ends_reasoning: ClassVar = (section[0], call_begin)

    def is_call(self, reader: Reader, mark: str) -> Steps[bool]:
        """A section begins with a token that stands nowhere else."""
        return mark == self.section[0] or (yield from super().is_call(reader, mark))

    def _read_marked_call(self, reader: Reader, mark: str) -> Steps[None]:
        if mark == self.call_begin:
            yield from super()._read_marked_call(reader, mark)
        elif mark == self.section[0] or not self._index:
            self._content.hold(mark)
        else:
            self._content.drop()  # the white space before the end of a section

    def _check_start(self, reader: Reader, tag: str, is_on_own_line: bool) -> Steps[None]:
        if tag != self.section[1]:
            yield from super()._check_start(reader, tag, is_on_own_line)
            return
        yield from skip_blank(reader)
        if not (yield from is_at_end(reader)):
            yield from read_one_of(reader, *self._starts)

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        if mark != self.call_begin:
            raise MalformedText
        name = (yield from _read_text(reader)).strip()
        if (yield from read_if_next(reader, self.separator)):
            self._tag = yield from self._next_tag(reader, may_end=self._is_tool(name))
        elif self._is_tool(name):  # a model may leave the separator out
            self._tag = yield from self._next_tag(reader, may_end=True)
        else:
            raise MalformedText
        if not name or any(blank in name for blank in BLANK):
            raise MalformedText
        return self._begin(name)


class Hy3Preview(Hy3):
    """The same in tags without a suffix."""

    section: ClassVar = ("<tool_calls>", "</tool_calls>")
    call_begin: ClassVar = "<tool_call>"
    separator: ClassVar = "<tool_sep>"
    marks: ClassVar = (*section, call_begin)
    end: ClassVar = "</tool_call>"
    name_end: ClassVar = "</tool_call>"
    key: ClassVar = Glm.key
    value: ClassVar = Glm.value
    ends_reasoning: ClassVar = (section[0], call_begin)
