"""Looks for stop strings in a text that arrives in pieces, and holds back what may be the beginning of one.

For each stop string it knows the longest beginning with which the text ends (Knuth, Morris, Pratt 1977). So a
character costs the same however much text is held back, and nothing is compared twice.

Question: Who looks for stop strings?
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request. All of its completions share this object."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in dict.fromkeys(texts)]

    def search(self, keep: bool) -> Search:
        """A search in the text of one completion. keep: the text that `Search.push` returns includes the stop
        string that ended it.
        """
        return Search(self._patterns, keep)


class Search:
    """The search in one text."""

    def __init__(self, patterns: Sequence[_Pattern], keep: bool) -> None:
        self._patterns = patterns
        self._keep = keep
        self._match_lengths = [0] * len(patterns)
        """Characters of each stop string with which the text ends."""
        self.held_text = ""
        """Text that was not returned yet, since it may be the beginning of a stop string."""

    def push(self, piece: str, final: bool = False) -> tuple[str, str | None]:
        """The text to return after `piece` has arrived, and the stop string that was found.

        Of several stop strings the one that ends first is found, and of these the longest. So the result does
        not depend on how the text is cut into pieces. final: the text ends here, so nothing is held back.
        Example: "one\\nQ" with the stop string "\\nQuestion" -> "one", None; "\\nQ" is held.
        """
        text, num_held = self.held_text + piece, len(self.held_text)
        if not self._patterns:
            return text, None
        for end, character in enumerate(piece, start=num_held + 1):
            stop_string = self._step(character)
            if stop_string is not None:
                self.held_text = ""
                return text[: end if self._keep else end - len(stop_string)], stop_string
        size = 0 if final else max(self._match_lengths)
        self.held_text = text[len(text) - size :]
        return text[: len(text) - size], None

    def _step(self, character: str) -> str | None:
        """Add one character. Returns the longest stop string that ends with it."""
        stop_string: str | None = None
        for index, pattern in enumerate(self._patterns):
            length = self._match_lengths[index] = pattern.step(self._match_lengths[index], character)
            if length == len(pattern.text) and (stop_string is None or length > len(stop_string)):
                stop_string = pattern.text
        return stop_string


class _Pattern:
    """A stop string, and how far a search falls back in it. Only what a text has reached is computed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = array("I", [0, 0])
        """Entry m: the longest end of the first m characters that is shorter and begins `text`."""

    def step(self, length: int, character: str) -> int:
        """The matched characters after another one. length: less than all of them."""
        while length and self.text[length] != character:
            length = self._borders[length]
        if self.text[length] != character:
            return 0
        length += 1
        if length == len(self._borders):
            self._extend()
        return length

    def _extend(self) -> None:
        size = len(self._borders)
        border = self._borders[size - 1]
        while border and self.text[border] != self.text[size - 1]:
            border = self._borders[border]
        self._borders.append(border + (self.text[border] == self.text[size - 1]))
