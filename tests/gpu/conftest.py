"""Checkpoints for tests on a GPU, or on one that is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import gpu_cases


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the checkpoint of a model of `cases` lies."""
    known: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp(name)
            gpu_cases.write(name, known[name])
        return known[name]

    return path
