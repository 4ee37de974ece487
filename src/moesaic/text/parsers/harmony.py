"""gpt-oss: messages in channels, of which analysis is reasoning and a recipient makes a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.text.parsers.calls import CallParser, Span, read_end_of_call
from moesaic.text.parsers.events import Content, Event, MalformedText, Reasoning, Steps
from moesaic.text.parsers.reader import (
    BLANK,
    Reader,
    TrimmedText,
    read_if_next,
    read_one_of,
    skip_blank,
)
from moesaic.text.parsers.values import Tools

_CHANNEL, _MESSAGE, _START, _CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
_CLOSINGS = ("<|end|>", "<|return|>", "<|call|>")
_ENDS = (*_CLOSINGS, _START, _CHANNEL)
_SPECIALS = (*_ENDS, _MESSAGE, _CONSTRAIN)
_CHANNELS = ("analysis", "commentary", "final")
_SIGNS = BLANK + '<{["'
"""What ends a word of a header."""
_LONGEST_WORD = 256
"""Maximum number of characters of a word in a header, such as a recipient."""
ANALYSIS = Span("<|channel|>analysis<|message|>", _ENDS, can_repeat=True)
"""Where gpt-oss reasons."""


@dataclass(frozen=True)
class _Header:
    """What stands before the text of a message. Both are empty where the model left them out."""

    channel: str = ""
    recipient: str = ""


class Harmony(CallParser):
    """<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>

    The prompt ends with <|start|>assistant. tools: None makes calls content. reasoning: whether analysis is
    reasoning; else it is content. <|call|> ends the answer and is no part of its text, so a call also ends
    with the text.
    """

    marks: ClassVar = (*_ENDS, _MESSAGE)
    other_marks: ClassVar = (_CONSTRAIN,)

    def __init__(self, tools: Tools | None = (), is_forced: bool = False, reasoning: bool = True) -> None:
        super().__init__(tools or (), is_forced)
        self._calls = tools is not None
        self._names = frozenset(str(tool["function"]["name"]) for tool in tools or ())
        self._splits = reasoning
        self._texts = dict[type, int]()
        """Kind of event -> number of messages that had it."""

    def read(self, reader: Reader, lead: str = "") -> Steps[None]:
        self._content = TrimmedText(Content)
        mark = ""
        while True:
            reader.attempt()
            try:
                header = yield from _read_header(reader, mark)
            except MalformedText:
                reader.fail()
                yield from self._content(mark) if mark else []
            else:
                head = mark + reader.succeed()
                self._content.drop()
                mark = "" if header is None else (yield from self._body(reader, header, head))
                if mark in (_START, _CHANNEL):
                    continue
            mark = yield from reader.read_until(self.marks, self._content)
            if not mark:
                yield from self._content.flush()
                return
            mark = "" if mark in _CLOSINGS else mark  # it ends no message, and is no text of one

    def _body(self, reader: Reader, header: _Header, head: str) -> Steps[str]:
        """Read a message up to its end, which is returned. head: its header as the model wrote it.

        A call that is damaged is content with its head and its end.
        """
        name, lead = header.recipient.removeprefix("functions."), ""
        if self._calls and name and (name != header.recipient or name in self._names):
            try:
                return (yield from self._json_call(reader, self._begin(name), _read_end))
            except MalformedText:
                lead = head
        self.thinking = header.channel == "analysis" and not lead
        kind = Reasoning if self.thinking and self._splits else Content
        trimmed_text, first = TrimmedText(kind), self._texts.get(kind, 0) > 0

        def pass_on(text: str) -> list[Event]:
            nonlocal first
            # Messages of one kind become one text, so a newline stands between them.
            break_, first = "\n" if first else "", False
            return trimmed_text(break_ + text)

        if lead:
            yield from pass_on(lead)
        mark = yield from reader.read_until(_ENDS, pass_on)
        if lead and mark in _CLOSINGS:
            yield from trimmed_text(mark)
        yield from trimmed_text.flush()
        self._texts[kind] = self._texts.get(kind, 0) + 1
        self.thinking = False
        return mark


def _read_end(reader: Reader, closings: str) -> Steps[str]:
    return (yield from read_end_of_call(reader, _ENDS))


def _read_header(reader: Reader, mark: str) -> Steps[_Header | None]:
    """The header of the next message, whose first special token may be read: `mark`.

    None: the text ends within it. Raises MalformedText if it is none.
    """
    recipient = ""
    if mark not in (_CHANNEL, _MESSAGE):
        words = yield from _read_role(reader)
        if words is None:
            if mark:
                return None
            raise MalformedText
        recipient = next((word[3:] for word in words if word.startswith("to=")), "")
        mark = yield from read_one_of(reader, _CHANNEL, _MESSAGE)
    return _Header("", recipient) if mark == _MESSAGE else (yield from _read_head(reader, recipient))


def _read_head(reader: Reader, recipient: str) -> Steps[_Header | None]:
    """A header behind the token of its channel. `recipient` may stand before that token.

    The text of a message begins behind <|message|>. Where that is missing, the text begins with the first
    word that is no part of a header.
    """
    channel, is_typed = "", False
    while True:
        character = yield from _read_visible(reader)
        special = (yield from _read_special(reader)) if character == "<" else ""
        if special == _MESSAGE:
            return _Header(channel, recipient)
        if special == _CHANNEL:  # a model may begin a second channel before its message: that one counts
            channel = ""
        elif special == _CONSTRAIN:
            is_typed = True
        elif not character and any(name.startswith(channel) for name in _CHANNELS):
            return None
        elif not channel:
            channel = yield from _read_word(reader, character)
        elif channel not in _CHANNELS:
            raise MalformedText
        elif special:
            reader.unread(special)
            return _Header(channel, recipient)
        else:
            word = yield from _read_word(reader, character)
            if word.startswith("to="):
                recipient = word.removeprefix("to=")
            elif not word or not (is_typed or recipient or (yield from _is_before_special(reader))):
                reader.unread(word or character)
                return _Header(channel, recipient)
        if not (channel or special):
            raise MalformedText


def _read_visible(reader: Reader) -> Steps[str]:
    """The next character that is no white space. Empty at the end."""
    while (character := (yield from reader.character())) and character in BLANK:
        pass
    return character


def _read_special(reader: Reader) -> Steps[str]:
    """A special token whose first character is read. Empty if it is none; then nothing more is read."""
    reader.unread("<")
    special = yield from read_if_next(reader, *_SPECIALS)
    if not special:
        yield from reader.character()
    return special


def _read_word(reader: Reader, first: str) -> Steps[str]:
    """Letters from `first` to white space or a sign with which a text or a token begins.

    Empty if another thing begins with `first`.
    """
    word = ""
    character = first
    while character and character not in _SIGNS:
        word += character
        if len(word) > _LONGEST_WORD:
            reader.unread(word[1:])
            return ""
        character = yield from reader.character()
    if word:
        reader.unread(character)
    return word


def _is_before_special(reader: Reader) -> Steps[bool]:
    """Whether the next thing but white space is a special token. Nothing is read."""
    blank = yield from skip_blank(reader)
    special = yield from read_if_next(reader, *_SPECIALS)
    reader.unread(blank + special)
    return bool(special)


def _read_role(reader: Reader) -> Steps[list[str] | None]:
    """What may stand before a channel: the role and a recipient. None: the text ends there.

    Raises MalformedText at any other word.
    """
    words: list[str] = []
    word = ""
    while True:
        character = yield from reader.character()
        if character and character not in BLANK + "<":
            word += character
            if not ("assistant".startswith(word) or "to=".startswith(word[:3])):
                raise MalformedText
            continue
        if word not in ("", "assistant") and not word.startswith("to="):
            raise MalformedText
        words.append(word)
        word = ""
        if not character:
            return None
        if character == "<":
            reader.unread(character)
            return words
