"""Methods that raise when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def raises_at(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, error: BaseException
) -> None:
    """The method `name` of `owner` raises `error` the `call`-th time."""
    whole: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return whole(*arguments)

    monkeypatch.setattr(owner, name, broken)
