"""Tiny checkpoints for tests of whole engines, each written when a test asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from moesaic.testing import byte_tokenizer
from tests.support import model_configs, tiny_models

MODELS = {
    "mixtral-window": "float32",
    "qwen3-bias-dense-layers": "bfloat16",
    "deepseek-full": "bfloat16",
}
"""A case, and the type of its weights."""
MORE = {"olmoe-clip-bias-gqa": "bfloat16", "qwen2-dense-layers-plain": "float32"}
"""Other families, for tests that try each of MODELS with all that there is, and these with less."""


class Written(dict[str, Path]):
    """Case of MODELS or MORE -> its folder. make: an empty folder of a name."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Path:
        dtype = getattr(torch, (MODELS | MORE)[name])
        self[name] = tiny_models.save(tiny_models.build(*model_configs.CASES[name]), self._make(name), dtype)
        byte_tokenizer(self[name])  # nothing is asked of it but to be there
        return self[name]
