"""Calls between special tokens, with JSON arguments: DeepSeek and Kimi."""

from __future__ import annotations

import re
from typing import ClassVar

from moesaic.text.parsers.calls import MarkedCalls, read_end_of_call
from moesaic.text.parsers.events import CallStart, MalformedText, Steps
from moesaic.text.parsers.json_text import skip_closings
from moesaic.text.parsers.reader import Reader, read_if_next, read_up_to, skip_blank


class TokenCalls(MarkedCalls):
    """Sections of calls, each of which is begin, head, separator, JSON and end."""

    section: ClassVar[tuple[str, str]]
    misspelled_section: ClassVar[tuple[str, ...]] = ()
    """The same two tokens as a model sometimes writes them, in letters."""
    call: ClassVar[tuple[str, str, str]]

    def __init_subclass__(cls) -> None:
        cls.marks = (*cls.section, *cls.misspelled_section, cls.call[0])
        cls.other_marks = cls.call[1:]
        cls.ends_reasoning = cls.section[:1]

    def _read_marked_call(self, reader: Reader, mark: str) -> Steps[None]:
        if mark == self.call[0]:
            yield from super()._read_marked_call(reader, mark)
        elif mark in (self.section[0], *self.misspelled_section[:1]) or not self._index:
            self._content.hold(mark)

    def is_call(self, reader: Reader, mark: str) -> Steps[bool]:
        """A section begins with a token that stands nowhere else."""
        return mark == self.section[0] or (
            mark == self.call[0] and (yield from super().is_call(reader, mark))
        )

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        return self._parse_head((yield from read_up_to(reader, self.call[1])))

    def _parse_head(self, head: str) -> CallStart:
        """The call of which `head` was written. Raises Malformed."""
        return self._begin(head)

    def _call(self, reader: Reader, call: CallStart) -> Steps[None]:
        yield from self._json_call(reader, call, self._read_end)

    def _read_end(self, reader: Reader, closings: str) -> Steps[str]:
        """Read the end of a call, which a model may leave out."""
        begin, _, end = self.call
        tokens = (end, begin, *self.section, *self.misspelled_section)
        token = yield from read_end_of_call(reader, tokens)
        reader.unread("" if token == end else token)
        return token


class DeepSeekV31(TokenCalls):
    """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""

    section: ClassVar = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call: ClassVar = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


class DeepSeekV3(DeepSeekV31):
    """The head is `function`. The name and a block of code with JSON follow the separator."""

    def _head(self, reader: Reader, mark: str) -> Steps[CallStart]:
        if (yield from read_up_to(reader, self.call[1])).strip() != "function":
            raise MalformedText
        name = yield from read_up_to(reader, "```json", forbidden="<")
        return self._begin(name)

    def _read_end(self, reader: Reader, closings: str) -> Steps[str]:
        yield from skip_closings(reader)
        yield from skip_blank(reader)
        yield from read_if_next(reader, "```")
        return (yield from super()._read_end(reader, closings))


class KimiK2(TokenCalls):
    """<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>

    The head is the call's id, which Kimi's template writes into the prompt again.
    """

    section: ClassVar = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    misspelled_section: ClassVar = ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")
    call: ClassVar = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

    def _parse_head(self, head: str) -> CallStart:
        match = re.fullmatch(r"\s*(?:functions\.)?(\S+?)(?::\d+)?\s*", head)
        if match is None:
            raise MalformedText
        return self._begin(match[1], head.strip())
