"""What is done to the content of messages before a template runs.

Special tokens in it are found, and written in other characters. The end of a message that the model
continues is marked.

A template writes special tokens around the contents of messages. In the rendered text nobody can tell whose
they are. So they are replaced in the contents by characters of a private-use plane, one for one. The
template then handles a content of the same length, and the text shows what came from a content.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moesaic.core.errors import RequestError

_PLANES = (0xF0000, 0x100000)
"""First characters of Unicode's private-use planes."""
_PLANE_SIZE = 0xFFFE
"""Number of characters in a plane."""
CONTINUE_MARK = "\ue000"
"""A private-use character. It marks the end of a continued message while the template is rendered."""


class SpecialTokens:
    """The special tokens of a tokenizer, as texts."""

    def __init__(self, texts: Collection[str]) -> None:
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Begin and end of each special token in `text`, from left to right. The longest one wins."""
        return [match.span() for match in self._pattern.finditer(text)]

    def first_in(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """A special token in what `messages` say, or None. A role is no content."""
        for text in _texts([list(_content(message).values()) for message in messages]):
            if match := self._pattern.search(text):
                return match[0]
        return None

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int] | None:
        """`messages` with special tokens in other characters, and the first character of their plane.

        None if the messages have characters of both planes.
        """
        texts = _texts([list(_content(message).values()) for message in messages])
        plane = next(
            (
                first_character
                for first_character in _PLANES
                if not any(_has_characters(first_character, text) for text in texts)
            ),
            None,
        )
        if plane is None:
            return None
        hidden: list[Mapping[str, Any]] = [
            {**message, **{name: self._hide(value, plane) for name, value in _content(message).items()}}
            for message in messages
        ]
        return hidden, plane

    def _hide(self, value: Any, plane: int) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _shift(match[0], plane), value)
        if isinstance(value, Mapping):
            return {self._hide(name, plane): self._hide(item, plane) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(item, plane) for item in value]
        return value


def restore_tokens(text: str, plane: int) -> str:
    """`text` with the hidden special tokens as they were."""
    return _plane_pattern(plane).sub(lambda match: _shift(match[0], -plane), text)


def mask_tokens(text: str, plane: int) -> str:
    """`text` with an `x` in place of each character of a hidden special token."""
    return _plane_pattern(plane).sub(lambda match: "x" * len(match[0]), text)


def _content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "role"}


def _texts(value: Any) -> list[str]:
    """Every text in `value`, which may hold lists and dictionaries. The keys of these are texts too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return _texts([*value, *value.values()])
    inner = value if isinstance(value, list | tuple) else ()
    return [text for item in inner for text in _texts(item)]


def _has_characters(plane: int, text: str) -> bool:
    return _plane_pattern(plane).search(text) is not None


def _plane_pattern(plane: int) -> re.Pattern[str]:
    return re.compile(f"[{chr(plane)}-{chr(plane + _PLANE_SIZE - 1)}]+")


def _shift(text: str, offset: int) -> str:
    """`text` with each character of a token moved by `offset`. Characters without a place in a plane stay."""
    shifted_codes = (ord(character) + offset for character in text)
    return "".join(
        chr(code) if ord(character) < _PLANE_SIZE or offset < 0 else character
        for character, code in zip(text, shifted_codes, strict=True)
    )


def mark_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` with CONTINUE_MARK and a space added to the last one's content.

    The space shows whether the template trims contents: then it is gone.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError("messages: the last message has no content to continue", "messages")
    return [*messages[:-1], {**messages[-1], "content": f"{content}{CONTINUE_MARK} "}]


def cut_at_mark(text: str) -> str:
    """`text` up to the end of the last message's content, which the model then continues."""
    start, mark, end = text.rpartition(CONTINUE_MARK)
    if not mark:
        raise RequestError("messages: the chat template leaves the last message out", "messages")
    return start if end.startswith(" ") else start.rstrip()
