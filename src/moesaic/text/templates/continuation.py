"""Marks the end of the last message, so that the model continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.core.errors import RequestError

MARK = "\ue000"
"""A private-use character. It marks the end of a continued message while the template is rendered."""


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` with MARK and a space added to the last one's content.

    The space shows whether the template trims contents: then it is gone.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError("messages: the last message has no content to continue", "messages")
    return [*messages[:-1], {**messages[-1], "content": f"{content}{MARK} "}]


def cut_at_mark(text: str) -> str:
    """`text` up to the end of the last message's content, which the model then continues."""
    before, found, after = text.rpartition(MARK)
    if not found:
        raise RequestError("messages: the chat template leaves the last message out", "messages")
    return before if after.startswith(" ") else before.rstrip()
