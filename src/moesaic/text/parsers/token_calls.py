"""Calls between special tokens, with JSON arguments: DeepSeek and Kimi."""

from __future__ import annotations

import re
from typing import ClassVar

from moesaic.text.parsers.calls import MarkedCalls
from moesaic.text.parsers.events import CallBegun, Malformed, Steps
from moesaic.text.parsers.reader import Reader, up_to


class TokenCalls(MarkedCalls):
    """Sections of calls, each of which is begin, head, separator, JSON and end."""

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str, str]]
    closing: ClassVar[tuple[str, ...]] = ()
    """What may stand between the arguments and the end of a call."""

    def __init_subclass__(cls) -> None:
        cls.marks = (*cls.section, cls.call[0])
        cls.further = cls.call[1:]
        cls.ends_reasoning = cls.section[:1]

    def _marked(self, reader: Reader, mark: str) -> Steps[None]:
        if mark == self.call[0]:
            yield from super()._marked(reader, mark)
        elif mark == self.section[0] or not self._index:
            self._content.hold(mark)

    def _head(self, reader: Reader, mark: str) -> Steps[CallBegun]:
        return self._named((yield from up_to(reader, self.call[1])))

    def _named(self, head: str) -> CallBegun:
        """The call of which `head` was written. Raises Malformed."""
        return self._begin(head)

    def _call(self, reader: Reader, call: CallBegun) -> Steps[None]:
        yield from self._announce(call)
        end = self.call[2]
        mark = yield from self._raw(reader, call, (*(each + end for each in self.closing), end))
        assert not mark or mark.endswith(end)


class DeepSeekV31(TokenCalls):
    """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""

    section: ClassVar = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call: ClassVar = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


class DeepSeekV3(DeepSeekV31):
    """The head is `function`. The name and a block of code with JSON follow the separator."""

    closing: ClassVar = ("\n```", "```")

    def _head(self, reader: Reader, mark: str) -> Steps[CallBegun]:
        if (yield from up_to(reader, self.call[1])).strip() != "function":
            raise Malformed
        name = yield from up_to(reader, "```json", never="<")
        return self._begin(name)


class KimiK2(TokenCalls):
    """<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>

    The head is the call's id, which Kimi's template writes into the prompt again.
    """

    section: ClassVar = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call: ClassVar = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

    def _named(self, head: str) -> CallBegun:
        found = re.fullmatch(r"\s*(?:functions\.)?([^\s:]+?)(?::\d+)?\s*", head)
        if found is None:
            raise Malformed
        return self._begin(found[1], head.strip())
