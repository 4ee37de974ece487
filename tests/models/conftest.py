"""Tiny checkpoints, each written once, and which kernels to try them with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, tiny_models


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """The transformers model of a case and where its checkpoint lies, by name and by type of the weights."""

    @functools.cache
    def write(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
        model = tiny_models.build(*model_configs.CASES[name])
        return model, tiny_models.save(model, tmp_path_factory.mktemp(name), dtype)

    return write


@pytest.fixture(scope="session")
def answered(
    published: Callable[..., tuple[Any, Path]],
) -> Callable[..., tuple[torch.Tensor, list[int]]]:
    """What transformers answers in float32 over the weights of a case: logits, then greedy tokens."""

    @functools.cache
    def answer(name: str, dtype: torch.dtype, length: int, count: int) -> tuple[torch.Tensor, list[int]]:
        model, path = published(name, dtype)
        if dtype is not torch.float32:
            model = type(model).from_pretrained(path, dtype=torch.float32)
        tokens = tiny_models.prompt(length, model_configs.VOCAB)
        return tiny_models.reference_logits(model, tokens), tiny_models.reference_greedy(model, tokens, count)

    return answer
