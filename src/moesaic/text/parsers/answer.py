"""Parses one answer: reasoning first, then content and calls."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.text.parsers.calls import CallParser
from moesaic.text.parsers.events import Content, Event, MalformedText, Reasoning, Steps
from moesaic.text.parsers.reader import BLANK, Reader, TrimmedText, read_literal, skip_blank


@dataclass(frozen=True)
class Tags:
    """Reasoning between two tags at the start of an answer."""

    open: str
    close: str
    starts_open: bool = False
    """An answer begins inside of the reasoning, also where neither prompt nor answer says so."""


class AnswerParser:
    """Takes the text of one answer in pieces and returns events.

    Events whose texts are joined do not depend on where the text is cut. calls: None leaves calls in the
    content. tags: None leaves reasoning in the content. in_reasoning: the prompt opened the reasoning
    already.
    """

    def __init__(
        self, calls: CallParser | None, tags: Tags | None = None, in_reasoning: bool = False
    ) -> None:
        self._calls = calls
        self._tags = tags
        self._in_reasoning = in_reasoning or (tags is not None and tags.starts_open)
        self._thinking = tags is not None and self._in_reasoning
        self._reader = Reader()
        self._steps: Steps[None] | None = self._read()

    @property
    def thinking(self) -> bool:
        """The text so far ends inside of the reasoning."""
        return self._thinking or (self._calls is not None and self._calls.thinking)

    def push(self, text: str) -> list[Event]:
        """The events of `text`, as far as later text cannot change them."""
        self._reader.add(text)
        return self._advance()

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The events of what was held back. Nothing follows.

        is_cut: the model did not end the answer, as where it reached its maximum length. Then a call whose
        end is missing stays open.
        """
        self._reader.end(is_cut)
        return self._advance()

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps or ():
            if event is None:
                return events
            events.append(event)
        self._steps = None
        return events

    def _read(self) -> Steps[None]:
        lead = ""
        if self._tags is not None:
            if (yield from self._read_tag(self._tags.open)) or self._in_reasoning:
                self._thinking = True
                yield from self._reasoning(self._tags.close)
                self._thinking = False
                lead = "\n"  # newlines behind the closing tag belong to the syntax, not to the content
            elif (yield from self._read_tag(self._tags.close)):  # of reasoning that the prompt closed too
                lead = "\n"
        if self._calls is not None:
            yield from self._calls.read(self._reader, lead)
            return
        content = TrimmedText(Content, lead)
        yield from self._reader.read_until((), content)
        yield from content.flush()

    def _read_tag(self, tag: str) -> Steps[bool]:
        """Read `tag` and white space before it. False if something else stands there, which is not read."""
        self._reader.attempt()
        try:
            yield from skip_blank(self._reader)
            yield from read_literal(self._reader, tag)
        except MalformedText:
            self._reader.fail()
            return False
        self._reader.succeed()
        return True

    def _reasoning(self, close: str) -> Steps[None]:
        """Read reasoning up to `close`, or up to a call that ends it. White space around it is left out."""
        trimmed_text = TrimmedText(Reasoning, BLANK)
        call_marks = () if self._calls is None else self._calls.marks
        while mark := (yield from self._reader.read_until((close, *call_marks), trimmed_text)):
            if mark == close:
                return
            assert self._calls is not None
            if (yield from self._calls.is_call(self._reader, mark)):
                self._reader.unread(mark)
                return
            yield from trimmed_text(mark)
        yield from trimmed_text.flush()
