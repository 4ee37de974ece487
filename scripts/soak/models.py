"""The checkpoints that are served, and what one process answers with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from scripts.soak.plan import pool
from scripts.soak.shapes import Shape
from tests.support import model_configs, tiny_models
from tests.support.cluster_driver import Answer

from moesaic import LLM
from moesaic.testing import byte_tokenizer

transformers.utils.logging.disable_progress_bar()

LONG = {"max_position_embeddings": 288}
"""The maximum number of tokens of a prompt of the pool and its answer."""
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, k 2": ("mixtral", model_configs.mixtral(sliding_window=40, num_key_value_heads=2, **LONG)),
    "mixtral, k 1": ("mixtral", model_configs.mixtral(num_experts_per_tok=1, num_key_value_heads=2, **LONG)),
    "qwen3, k 8": ("qwen3_moe", model_configs.qwen3(num_experts_per_tok=8, **LONG)),
    "deepseek, k 6": ("deepseek_v2", model_configs.deepseek(n_shared_experts=1, **LONG)),
    "states": ("qwen3_next", model_configs.qwen3_next(**LONG)),
}
"""Tiny models with random weights, since the cost of a model does not matter here."""


class Models:
    """Makes a checkpoint and its answers when they are first asked for. folder: contains the checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[tuple[str, str, bool], list[Answer]] = {}

    def path(self, name: str) -> str:
        """What LLM takes as its model. name: one of `shapes.MODELS`."""
        if name == "demo":
            return name
        path = self._folder / name.replace(", ", "-").replace(" ", "")
        if not path.exists():
            kind, options = CHECKPOINTS[name]
            byte_tokenizer(tiny_models.save(tiny_models.build(kind, options), path))
        return str(path)

    def vocabulary(self, name: str) -> int:
        """Upper bound of the token ids of the pool."""
        return 900 if name == "demo" else model_configs.VOCAB

    def alone(self, shape: Shape) -> list[Answer]:
        """The pool's answers by an LLM in one process: token ids and log-probabilities."""
        key = (shape.model, shape.kernels, shape.exact)
        if key not in self._answers:
            self._answers[key] = self._ask(*key)
        return self._answers[key]

    def _ask(self, name: str, kernels: str, exact: bool) -> list[Answer]:
        requests = pool(greedy=not exact, vocabulary=self.vocabulary(name))
        model = LLM(self.path(name), threads=1, kv_cache_memory="64MiB", kernels=kernels)
        found = []
        for completion in model.generate(
            [prompt for prompt, _ in requests], [params for _, params in requests]
        ):
            [output] = completion.outputs
            found.append((output.token_ids, [entry.logprob for entry in output.logprobs or []]))
        return found
