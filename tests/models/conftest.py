"""Tiny checkpoints, each written once, and which kernels to try them with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import cases, tiny


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """The transformers model of a case and where its checkpoint lies, by name and by type of the weights."""

    @functools.cache
    def write(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
        model = tiny.build(*cases.CASES[name])
        return model, tiny.save(model, tmp_path_factory.mktemp(name), dtype)

    return write
