"""Text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator. It reads by `yield from`, and it is suspended where the text has not arrived yet. So
its events do not depend on how the text is cut. Each character is copied and compared a bounded number of
times.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from moesaic.text.parsers.events import Event, MalformedText, Steps

MAX_ATTEMPT = 4096
"""Maximum number of characters that are read before it is known whether they are a call. They are held back
meanwhile, and read again if they are none."""
BLANK = " \t\r\n"


class Reader:
    """The text that has arrived and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._has_ended = False
        self.is_cut = False
        """The text has ended, and not because the model ended it."""
        self._met_end = False
        """The last read found no more text."""
        self._attempt_pieces: list[str] | None = None
        self._attempt_size = 0
        self._max_attempt: int | None = None

    def add(self, text: str) -> None:
        """Append `text`, which has arrived."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self, is_cut: bool = False) -> None:
        """No more text follows. is_cut: the model did not end it."""
        self._has_ended, self.is_cut = True, is_cut

    @property
    def is_at_cut(self) -> bool:
        """The last read found that the text was cut there."""
        return self._met_end and self.is_cut

    def character(self) -> Steps[str]:
        """The next character. Empty at the end."""
        while self._position == len(self._text):
            if self._has_ended:
                self._met_end = True
                return ""
            yield None
        return self._take(self._text[self._position])

    def unread(self, text: str) -> None:
        """Read `text` again, which was read last."""
        self._met_end = self._met_end and not text
        if self._attempt_pieces is not None:
            self._attempt_size -= len(text)
            size = len(text)
            while size:
                last_piece = self._attempt_pieces.pop()
                if len(last_piece) > size:
                    self._attempt_pieces.append(last_piece[:-size])
                size -= min(size, len(last_piece))
        if len(text) <= self._position:
            self._position -= len(text)
        else:
            self._text = text + self._text[self._position :]
            self._position = 0

    def attempt(self, any_size: bool = False) -> None:
        """Remember what is read from now on. More than MAX_ATTEMPT characters of it are malformed, unless it
        may have any size."""
        self._attempt_pieces, self._attempt_size = [], 0
        self._max_attempt = None if any_size else MAX_ATTEMPT

    def succeed(self) -> str:
        """What was attempted is read for good. Returns it."""
        attempted_text = "".join(self._attempt_pieces or ())
        self._attempt_pieces, self._attempt_size = None, 0
        return attempted_text

    def fail(self) -> None:
        """Read again what was attempted."""
        self.unread(self.succeed())

    def read_until(self, marks: tuple[str, ...], pass_on: Callable[[str], list[Event]]) -> Steps[str]:
        """Give the text before one of `marks` to `pass_on`, in pieces. Returns the mark; empty at the end.

        No mark may occur in another one except at its end.
        """
        pattern, longest = _compile_marks(marks)
        while True:
            while self._position == len(self._text) and not self._has_ended:
                yield None
            match = pattern.search(self._text, self._position)
            stop = len(self._text) if match is None else match.start()
            if match is None and not self._has_ended:
                stop -= self._partial_mark_size(marks, longest)
            if stop > self._position:
                yield from pass_on(self._take(self._text[self._position : stop]))
            if match is not None:
                return self._take(match[0])
            if self._has_ended:
                self._met_end = True
                return ""
            yield None

    def _partial_mark_size(self, marks: tuple[str, ...], longest: int) -> int:
        """Number of characters at the end of the text that may be the beginning of a mark."""
        for size in range(min(longest - 1, len(self._text) - self._position), 0, -1):
            if any(mark.startswith(self._text[-size:]) for mark in marks):
                return size
        return 0

    def _take(self, text: str) -> str:
        self._position += len(text)
        if self._attempt_pieces is not None:
            self._attempt_pieces.append(text)
            self._attempt_size += len(text)
            if self._max_attempt is not None and self._attempt_size > self._max_attempt:
                raise MalformedText
        return text


@lru_cache(maxsize=256)
def _compile_marks(marks: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """A pattern that finds the first mark, and the length of the longest one."""
    for mark in marks:
        inner_marks = [
            other_mark
            for other_mark in marks
            if other_mark != mark and other_mark in mark and not mark.endswith(other_mark)
        ]
        assert not inner_marks, f"{inner_marks} in {mark}"
    # A pattern takes the first alternative that fits, and one mark may end with another.
    longest_first = sorted(marks, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.compile(pattern), max(map(len, marks), default=1)


def skip_blank(reader: Reader) -> Steps[str]:
    """Skip white space. Returns it."""
    characters: list[str] = []
    while True:
        character = yield from reader.character()
        if not character or character not in BLANK:
            reader.unread(character)
            return "".join(characters)
        characters.append(character)


def is_at_end(reader: Reader) -> Steps[bool]:
    """Whether the model has ended the text here."""
    character = yield from reader.character()
    reader.unread(character)
    return not character and not reader.is_cut


def read_literal(reader: Reader, text: str) -> Steps[None]:
    """Read `text`. Raises Malformed where another character stands."""
    for expected_character in text:
        character = yield from reader.character()
        if character != expected_character:
            raise MalformedText


def read_if_next(reader: Reader, *texts: str) -> Steps[str]:
    """Read one of `texts` if it comes next, and return it. Else nothing is read, and the result is empty.

    None of them begins another. Use it within an attempt.
    """
    read = ""
    while read not in texts:
        character = yield from reader.character()
        read += character
        if not character or not any(text.startswith(read) for text in texts):
            reader.unread(read)
            return ""
    return read


def read_up_to(reader: Reader, mark: str, forbidden: str = "") -> Steps[str]:
    """The text before `mark`, which is read too. Raises Malformed at a character of `forbidden`, and at the
    end.

    Use it within an attempt, which bounds its length.
    """
    read = ""
    while not read.endswith(mark):
        character = yield from reader.character()
        if not character or character in forbidden:
            raise MalformedText
        read += character
    return read[: len(read) - len(mark)]


def read_one_of(reader: Reader, *texts: str) -> Steps[str]:
    """Read one of `texts`, of which none begins another. Raises Malformed if none stands there."""
    read = ""
    while read not in texts:
        character = yield from reader.character()
        if not character or not any(text.startswith(read + character) for text in texts):
            raise MalformedText
        read += character
    return read


class TrimmedText:
    """Passes text on as events of one kind, without white space before a call or a tag.

    White space at the end is held until more text follows. lead: characters that are left out at the start.
    """

    def __init__(self, kind: Callable[[str], Event], lead: str = "") -> None:
        self._kind = kind
        self._lead = lead
        self._held_pieces: list[str] = []

    def __call__(self, text: str) -> list[Event]:
        if self._lead:
            text = text.lstrip(self._lead)
            if not text:
                return []
            self._lead = ""
        body = text.rstrip(BLANK)
        if not body:
            self._held_pieces.append(text)
            return []
        full_text = "".join([*self._held_pieces, body])
        self._held_pieces = [text[len(body) :]]
        return [self._kind(full_text)]

    def hold(self, text: str) -> None:
        """Hold a mark that belongs to a call, until it is clear whether a call follows."""
        self._held_pieces.append(text)

    def drop(self) -> None:
        """Leave out what is held: a call follows."""
        self._held_pieces = []

    def flush(self) -> list[Event]:
        """What is held, at the end of the answer."""
        held_text, self._held_pieces = "".join(self._held_pieces), []
        return [self._kind(held_text)] if held_text else []
