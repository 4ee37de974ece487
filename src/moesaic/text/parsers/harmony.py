"""gpt-oss: messages in channels, of which analysis is reasoning and a recipient makes a call."""

from __future__ import annotations

import re
from typing import ClassVar

from moesaic.text.parsers.calls import CallParser, Span
from moesaic.text.parsers.events import Content, Event, MalformedText, Reasoning, Steps
from moesaic.text.parsers.reader import BLANK, Reader, TrimmedText, read_literal, read_up_to
from moesaic.text.parsers.values import Tools

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
ANALYSIS = Span("<|channel|>analysis<|message|>", _ENDS, can_repeat=True)
"""Where gpt-oss reasons."""


class Harmony(CallParser):
    """<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>

    The prompt ends with <|start|>assistant. tools: None makes calls content. reasoning: whether analysis is
    reasoning; else it is content. <|call|> ends the answer and is no part of its text, so a call also ends
    with the text.
    """

    marks: ClassVar = (_START, _CHANNEL)
    other_marks: ClassVar = (*_ENDS[:3], _MESSAGE, "<|constrain|>")

    def __init__(self, tools: Tools | None = (), reasoning: bool = True) -> None:
        super().__init__(tools or ())
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
                channel, recipient = yield from self._header(reader, mark)
            except MalformedText:
                reader.fail()
                yield from self._content(mark) if mark else []
            else:
                reader.succeed()
                self._content.drop()
                mark = yield from self._body(reader, channel, recipient)
                if mark in self.marks:
                    continue
            mark = yield from reader.read_until(self.marks, self._content)
            if not mark:
                yield from self._content.flush()
                return

    def _header(self, reader: Reader, mark: str) -> Steps[tuple[str, str]]:
        """Channel and recipient of the next message, whose first special token may be read: `mark`."""
        words = ""
        if mark != _CHANNEL:
            words = yield from _words(reader)
            yield from read_literal(reader, _CHANNEL)
        head = yield from read_up_to(reader, _MESSAGE)
        # A model may begin a second channel before its message: that one counts.
        channel = re.match(r"\s*(\w*)", head.rpartition(_CHANNEL)[2])
        recipient = re.search(r"\bto=([^\s<]+)", f"{words} {head}")
        assert channel is not None
        return channel[1], recipient[1] if recipient else ""

    def _body(self, reader: Reader, channel: str, recipient: str) -> Steps[str]:
        """Read a message up to its end, which is returned."""
        name = recipient.removeprefix("functions.")
        if self._calls and name and (name != recipient or name in self._names):
            call = self._begin(name)
            yield from self._announce(call)
            return (yield from self._raw(reader, call, _ENDS, text_end=True))
        self.thinking = channel == "analysis"
        kind = Reasoning if self.thinking and self._splits else Content
        trimmed_text, first = TrimmedText(kind), self._texts.get(kind, 0) > 0

        def pass_on(text: str) -> list[Event]:
            nonlocal first
            # Messages of one kind become one text, so a newline stands between them.
            break_, first = "\n" if first else "", False
            return trimmed_text(break_ + text)

        mark = yield from reader.read_until(_ENDS, pass_on)
        yield from trimmed_text.flush()
        self._texts[kind] = self._texts.get(kind, 0) + 1
        self.thinking = False
        return mark


def _words(reader: Reader) -> Steps[str]:
    """What may stand before a channel: the role and a recipient. Raises Malformed at any other word."""
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
        if character == "<":
            reader.unread(character)
            return " ".join(words)
        if not character:
            raise MalformedText
