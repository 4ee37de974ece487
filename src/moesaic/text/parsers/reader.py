"""Text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator. It reads by `yield from`, and it is suspended where the text has not arrived yet. So
its events do not depend on how the text is cut. Each character is copied and compared a bounded number of
times.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from moesaic.text.parsers.events import Event, Malformed, Steps

MOST = 4096
"""Maximum number of characters that are read before it is known whether they are a call. They are held back
meanwhile, and read again if they are none."""
BLANK = " \t\r\n"


class Reader:
    """The text that has arrived and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._tried: list[str] | None = None
        self._tried_size = 0

    def add(self, text: str) -> None:
        """Append `text`, which has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text follows."""
        self._ended = True

    def some(self) -> Steps[str]:
        """All text that has arrived, at least one character. Empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield None
        return self._took(self._text[self._at :])

    def character(self) -> Steps[str]:
        """The next character. Empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield None
        return self._took(self._text[self._at])

    def back(self, text: str) -> None:
        """Read `text` again, which was read last."""
        if self._tried is not None and text:
            left = "".join(self._tried)[: self._tried_size - len(text)]
            self._tried, self._tried_size = [left], len(left)
        if len(text) <= self._at:
            self._at -= len(text)
        else:
            self._text = text + self._text[self._at :]
            self._at = 0

    def attempt(self) -> None:
        """Remember what is read from now on. More than MOST characters of it are malformed."""
        self._tried, self._tried_size = [], 0

    def succeed(self) -> None:
        """What was attempted is read for good."""
        self._tried, self._tried_size = None, 0

    def fail(self) -> None:
        """Read again what was attempted."""
        tried = "".join(self._tried or ())
        self.succeed()
        self.back(tried)

    def until(self, marks: tuple[str, ...], pass_on: Callable[[str], list[Event]]) -> Steps[str]:
        """Give the text before one of `marks` to `pass_on`, in pieces. Returns the mark; empty at the end.

        No mark may occur in another one except at its end.
        """
        pattern, longest = _compiled(marks)
        while True:
            while self._at == len(self._text) and not self._ended:
                yield None
            found = pattern.search(self._text, self._at)
            stop = len(self._text) if found is None else found.start()
            if found is None and not self._ended:
                stop -= self._begun(marks, longest)
            if stop > self._at:
                yield from pass_on(self._took(self._text[self._at : stop]))
            if found is not None:
                return self._took(found[0])
            if self._ended:
                return ""
            yield None

    def _begun(self, marks: tuple[str, ...], longest: int) -> int:
        """Number of characters at the end of the text that may be the beginning of a mark."""
        for size in range(min(longest - 1, len(self._text) - self._at), 0, -1):
            if any(mark.startswith(self._text[-size:]) for mark in marks):
                return size
        return 0

    def _took(self, text: str) -> str:
        self._at += len(text)
        if self._tried is not None:
            self._tried.append(text)
            self._tried_size += len(text)
            if self._tried_size > MOST:
                raise Malformed
        return text


@lru_cache(maxsize=256)
def _compiled(marks: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """A pattern that finds the first mark, and the length of the longest one."""
    for one in marks:
        inside = [other for other in marks if other != one and other in one and not one.endswith(other)]
        assert not inside, f"{inside} in {one}"
    longest_first = sorted(marks, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.compile(pattern), max(map(len, marks), default=1)


def blank(reader: Reader) -> Steps[str]:
    """Skip white space. Returns it."""
    skipped: list[str] = []
    while True:
        character = yield from reader.character()
        if not character or character not in BLANK:
            reader.back(character)
            return "".join(skipped)
        skipped.append(character)


def literal(reader: Reader, text: str) -> Steps[None]:
    """Read `text`. Raises Malformed where another character stands."""
    for expected in text:
        character = yield from reader.character()
        if character != expected:
            raise Malformed


def up_to(reader: Reader, mark: str, never: str = "") -> Steps[str]:
    """The text before `mark`, which is read too. Raises Malformed at a character of `never`, and at the end.

    Use it within an attempt, which bounds its length.
    """
    read = ""
    while not read.endswith(mark):
        character = yield from reader.character()
        if not character or character in never:
            raise Malformed
        read += character
    return read[: len(read) - len(mark)]


def either(reader: Reader, *texts: str) -> Steps[str]:
    """Read one of `texts`, of which none begins another. Raises Malformed if none stands there."""
    read = ""
    while read not in texts:
        character = yield from reader.character()
        if not character or not any(text.startswith(read + character) for text in texts):
            raise Malformed
        read += character
    return read


class Trimmed:
    """Passes text on as events of one kind, without white space before a call or a tag.

    White space at the end is held until more text follows. lead: characters that are left out at the start.
    """

    def __init__(self, kind: Callable[[str], Event], lead: str = "") -> None:
        self._kind = kind
        self._lead = lead
        self._held: list[str] = []

    def __call__(self, text: str) -> list[Event]:
        if self._lead:
            text = text.lstrip(self._lead)
            if not text:
                return []
            self._lead = ""
        body = text.rstrip(BLANK)
        if not body:
            self._held.append(text)
            return []
        whole = "".join([*self._held, body])
        self._held = [text[len(body) :]]
        return [self._kind(whole)]

    def hold(self, text: str) -> None:
        """Hold a mark that belongs to a call, until it is clear whether a call follows."""
        self._held.append(text)

    def drop(self) -> None:
        """Leave out what is held: a call follows."""
        self._held = []

    def flush(self) -> list[Event]:
        """What is held, at the end of the answer."""
        held, self._held = "".join(self._held), []
        return [self._kind(held)] if held else []
