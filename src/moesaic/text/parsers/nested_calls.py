"""Calls whose arguments are nested elements: MiniMax-M3."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import ClassVar

from moesaic.text.parsers.calls import MarkedCalls
from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Event, MalformedText, Steps
from moesaic.text.parsers.reader import Reader, is_at_end, read_if_next, read_literal, read_up_to, skip_blank
from moesaic.text.parsers.values import ValueSchema, find_parameters, write_json

PREFIX = "]<]minimax[>["
"""Stands before each tag. It is a special token."""
BLOCK, CALL, ITEM = "tool_call", "invoke", "item"
_CALL_TAG = re.compile(rf"""{CALL}\s+name\s*=\s*(["']?)(?P<name>.*?)\1""")
_MAX_DEPTH = 64
"""Maximum number of elements inside of one another. A tag that opens more is text."""


@dataclass(frozen=True)
class _Tag:
    """A tag without its prefix."""

    text: str
    """The tag as the model wrote it, with the white space before it."""
    name: str
    is_end: bool = False
    starts_block: bool = False

    @property
    def tool(self) -> str | None:
        """The tool whose call this tag begins. None: it begins none."""
        match = None if self.is_end else _CALL_TAG.fullmatch(self.name)
        return None if match is None else match["name"]

    @property
    def opens_element(self) -> bool:
        return bool(self.name) and not self.is_end and not self.starts_block and self.tool is None

    @property
    def ends_call(self) -> bool:
        """The arguments of a call end here."""
        return not self.opens_element and (not self.is_end or self.name in (CALL, BLOCK))


_NO_TAG = _Tag("", "")
"""No tag follows."""
_CUT = _Tag("", "")
"""The text was cut before a tag, or within one."""


@dataclass
class _Element:
    """An argument, a member of an object or an item of a list."""

    key: str
    schema: ValueSchema
    pieces: list[str] = field(default_factory=list)
    """The text, or the white space between children."""
    newlines: str = ""
    """New lines behind the text. They are no part of it if its end tag was left out."""
    has_text: bool = False
    """The text is more than white space."""
    children: list[_Element] = field(default_factory=list)
    is_closed: bool = False
    """The end tag was read."""

    @property
    def is_string(self) -> bool:
        return self.schema.types == {"string"}

    def has_only_text(self) -> bool:
        """Whether a tag that opens an element cannot be inside of it."""
        types = self.schema.types
        may_have_children = not types or bool(types & {"array", "object"})
        return not self.children and (not may_have_children or self.has_text)

    def add_text(self, text: str) -> str:
        """Add text. Returns what is surely a part of it."""
        text = self.newlines + text
        body = text.rstrip("\n")
        self.newlines = text[len(body) :]
        self.pieces.append(body)
        self.has_text = self.has_text or bool(body.strip())
        return body

    def write(self, is_open: bool = False) -> str:
        """The JSON of the element. is_open: the text was cut in it, so its end is missing."""
        if not self.children:
            return self._write_text(is_open)
        values = [child.write(is_open and child is self.children[-1]) for child in self.children]
        if self._is_list:
            return f"[{', '.join(values)}{'' if is_open else ']'}"
        members: dict[str, list[str]] = {}
        for child, value in zip(self.children, values, strict=True):
            members.setdefault(child.key, []).append(value)
        pairs = ", ".join(f"{_write_string(key)}: {_join(values)}" for key, values in members.items())
        return f"{{{pairs}{'' if is_open else '}'}"

    def write_end(self, is_open: bool) -> str:
        """The end of the JSON of a string, whose text was written while it arrived."""
        newlines = self.newlines if self.is_closed or is_open else ""
        return _write_string(newlines)[1:-1] + ("" if is_open else '"')

    def split_siblings(self, parent: ValueSchema, keys: set[str]) -> list[_Element]:
        """Take out the children that are no children, since the end of this element was left out.

        They have keys of the parent's schema. keys: those of elements before.
        """
        for number, child in enumerate(self.children):
            if child.key in parent.keys - self.schema.keys - keys:
                siblings, self.children = self.children[number:], self.children[:number]
                for sibling in siblings:
                    sibling.set_schema(parent.child(sibling.key))
                return siblings
        return []

    def set_schema(self, schema: ValueSchema) -> None:
        self.schema = schema
        for number, child in enumerate(self.children):
            child.set_schema(schema.child(child.key, number))

    @property
    def _is_list(self) -> bool:
        if ("array" in self.schema.types) != ("object" in self.schema.types):
            return "array" in self.schema.types
        return bool(self.children) and all(child.key == ITEM for child in self.children)

    def _write_text(self, is_open: bool) -> str:
        newlines = self.newlines if self.is_closed or is_open else ""
        text, types = "".join(self.pieces) + newlines, self.schema.types
        if not self.has_text and types & {"array", "object"} and "string" not in types:
            return "" if is_open else "[]" if self._is_list else "{}"
        json_text = write_json(text, types)
        if not is_open:
            return json_text
        return json_text[:-1] if json_text[0] == '"' and text.lstrip()[:1] not in ("[", "{") else text


class MiniMaxM3(MarkedCalls):
    """]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<key>value]<]minimax[>[</key>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

    An object has an element for each of its keys, a list has elements named `item`. A value ends at its end
    tag only where another tag or the end of the text follows. Models leave end tags out, so a text also ends
    at any other tag.
    """

    marks: ClassVar = (PREFIX,)
    ends_reasoning: ClassVar = (f"{PREFIX}<{BLOCK}>",)

    def _read_marked_call(self, reader: Reader, mark: str) -> Steps[None]:
        if self._index and (yield from self._skip_end_of_block(reader)):
            self._content.drop()
        else:
            yield from super()._read_marked_call(reader, mark)

    def _skip_end_of_block(self, reader: Reader) -> Steps[bool]:
        """Read the end of a block whose calls are read: text stood before it."""
        reader.attempt()
        try:
            tag = yield from _read_tag(reader)
            if not (tag.is_end and tag.name == BLOCK):
                raise MalformedText
        except MalformedText:
            reader.fail()
            return False
        reader.succeed()
        return True

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        tag = yield from _read_tag(reader)
        if tag.starts_block:
            tag = yield from _read_prefixed_tag(reader)
        return (yield from self._begin_call(reader, tag))

    def _begin_call(self, reader: Reader, tag: _Tag) -> Steps[CallStart]:
        """The call that `tag` begins. Raises MalformedText unless a tag or the end of the text follows."""
        call = self._begin(tag.tool or "")
        blank = yield from skip_blank(reader)
        if not (self._is_tool(call.name) and (yield from is_at_end(reader))):
            following_tag = yield from _read_prefixed_tag(reader)
            reader.unread(PREFIX + following_tag.text)
        reader.unread(blank)
        return call

    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        following_call: CallStart | None = call
        while following_call is not None:
            yield from self._announce(following_call)
            tag = yield from self._arguments(reader, following_call)
            following_call = None
            if tag.is_end and tag.name == CALL:
                following_call = yield from self._following(reader)
            elif not tag.is_end and tag.name:
                reader.unread(PREFIX + tag.text)

    def _arguments(self, reader: Reader, call: CallStart) -> Steps[_Tag]:
        """Read the arguments of a call. Returns the tag that ends it."""
        schema = ValueSchema.read(find_parameters(self._tools, call.name))
        keys = set[str]()

        def begin(key: str) -> Arguments:
            separator = ", " if keys else "{"
            keys.add(key)
            return Arguments(call.index, f"{separator}{_write_string(key)}: ")

        tag = yield from _read_tag_between(reader)
        while not tag.ends_call:
            if tag.is_end:  # of nothing that is open
                tag = yield from _read_tag_between(reader)
                continue
            element = _Element(tag.name, schema.child(tag.name))
            yield begin(tag.name)
            tag = yield from self._value(reader, element, call.index)
            siblings = [] if element.is_closed else element.split_siblings(schema, keys)
            is_open = tag is _CUT and not siblings
            text = element.write_end(is_open) if element.is_string else element.write(is_open)
            if text:
                yield Arguments(call.index, text)
            for sibling in siblings:
                yield begin(sibling.key)
                yield Arguments(call.index, sibling.write(tag is _CUT and sibling is siblings[-1]))
        if tag is not _CUT:
            yield Arguments(call.index, "}" if keys else "{}")
            yield CallEnd(call.index)
        return tag

    def _value(self, reader: Reader, argument: _Element, index: int) -> Steps[_Tag]:
        """Read an argument, and the tag behind it. The text of a string is passed on while it arrives."""
        stack = [argument]
        if argument.is_string:
            yield Arguments(index, '"')

        def add_text(text: str) -> list[Event]:
            body = stack[-1].add_text(text)
            return [Arguments(index, _write_string(body)[1:-1])] if argument.is_string and body else []

        while True:
            if not (yield from reader.read_until((PREFIX,), add_text)):
                return _CUT if reader.is_cut else _NO_TAG
            tag = yield from _read_tag_in_value(reader)
            if tag is _CUT:
                return tag
            while stack and tag.opens_element and stack[-1].has_only_text():
                stack.pop()  # its end tag was left out
            if not stack:
                return tag
            keys = [element.key for element in stack]
            if tag is _NO_TAG or (tag.opens_element and len(stack) == _MAX_DEPTH):
                while stack[-1].children:  # the text goes on behind its end tag
                    stack.append(stack[-1].children[-1])
                yield from add_text(PREFIX + tag.text)
            elif tag.opens_element:
                child = _Element(tag.name, stack[-1].schema.child(tag.name, len(stack[-1].children)))
                stack[-1].children.append(child)
                stack.append(child)
            elif tag.ends_call and not (tag.is_end and tag.name in keys):
                return tag
            else:
                while tag.name in keys and stack[-1].key != tag.name:
                    stack.pop()
                stack.pop().is_closed = True
                if not stack:
                    return (yield from _read_tag_between(reader))

    def _following(self, reader: Reader) -> Steps[CallStart | None]:
        """Read the end of a block: None. Or the head of another call in it."""
        reader.attempt()
        try:
            tag = yield from _read_prefixed_tag(reader)
            is_block_end = tag.is_end and tag.name == BLOCK
            call = None if is_block_end else (yield from self._begin_call(reader, tag))
        except MalformedText:
            yield from _give_up(reader)
            return None
        reader.succeed()
        return call


def _write_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _join(values: list[str]) -> str:
    """The value of a key: a list where the key is there more than once."""
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _read_tag(reader: Reader) -> Steps[_Tag]:
    """Read a tag behind its prefix. Raises MalformedText if none stands there."""
    blank = yield from skip_blank(reader)
    yield from read_literal(reader, "<")
    inner = yield from read_up_to(reader, ">", forbidden="<\n")
    name = inner.removeprefix("/").strip()
    if not name:
        raise MalformedText
    text = f"{blank}<{inner}>"
    starts_block = inner == BLOCK and (yield from _is_tag_next(reader, f"<{CALL} "))
    return _Tag(text, name, inner.startswith("/"), starts_block)


def _is_tag_next(reader: Reader, text: str, or_end: bool = False) -> Steps[bool]:
    """Whether a tag that begins with `text` comes next. Nothing is read. or_end: or the end of the text."""
    read = yield from skip_blank(reader)
    is_next = or_end and (yield from is_at_end(reader))
    if (yield from read_if_next(reader, PREFIX)):
        read += PREFIX + (yield from skip_blank(reader))
        if (yield from read_if_next(reader, text)):
            is_next, read = True, read + text
    reader.unread(read)
    return is_next or (or_end and reader.is_cut)


def _read_prefixed_tag(reader: Reader) -> Steps[_Tag]:
    """Read white space, the prefix and a tag. Raises MalformedText if something else stands there."""
    yield from skip_blank(reader)
    yield from read_literal(reader, PREFIX)
    return (yield from _read_tag(reader))


def _read_tag_between(reader: Reader) -> Steps[_Tag]:
    """Read the tag behind the end of a value."""
    reader.attempt()
    try:
        tag = yield from _read_prefixed_tag(reader)
    except MalformedText:
        return (yield from _give_up(reader))
    reader.succeed()
    return tag


def _read_tag_in_value(reader: Reader) -> Steps[_Tag]:
    """Read the tag behind a prefix in a value. The end tag of a value is none unless a tag follows."""
    reader.attempt()
    try:
        tag = yield from _read_tag(reader)
        ends_value = tag.is_end and not tag.ends_call
        if ends_value and not (yield from _is_tag_next(reader, "<", or_end=True)):
            raise MalformedText
    except MalformedText:
        return (yield from _give_up(reader))
    reader.succeed()
    return tag


def _give_up(reader: Reader) -> Steps[_Tag]:
    """Read again what is no tag. A tag that the end of the text cuts is read for good."""
    if reader.is_cut and not (yield from reader.character()):
        reader.succeed()
        return _CUT
    reader.fail()
    return _NO_TAG
