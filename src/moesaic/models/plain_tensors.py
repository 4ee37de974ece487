"""The tensors of a part of a model as transformers reads them: compressed and quantised ones as numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from moesaic.core.experts import BIASED_ROWS
from moesaic.kernels.table import REFERENCE
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint, Claims
from moesaic.models.families import Config, ModelFile
from moesaic.models.gguf.header import is_gguf
from moesaic.models.gguf_tensors import gguf_tensors
from moesaic.models.loader import ExpertNames, Loader

Matrices = dict[str, tuple[int, int]]
"""Names of tensors, with ".weight" at the end, and their shapes."""


def plain_tensors(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, such as "model.layers.3.", as the files have them.

    But compressed ones are made bf16, and quantised ones float32, except for experts in MXFP4. Those of a
    GGUF file are all float32, by the names of a safetensors checkpoint.
    """
    if is_gguf(path):
        return gguf_tensors(path, prefix)
    file, config = registry.model_file(path)
    checkpoint = Checkpoint(path)
    names = next(
        (
            file.expert_names(config, layer)
            for layer in config.spec.moe_layers
            if f"model.layers.{layer}." == prefix
        ),
        None,
    )
    in_mxfp4 = names is not None and names.form == BIASED_ROWS
    matrices = _list_expert_matrices(None if in_mxfp4 else names) | _record_matrices(
        file, config, MatrixRecorder(path)
    )
    tensors, read_names = {}, set()
    for name, shape in matrices.items():
        matrix = checkpoint.find_quantized(name, *shape) if name.startswith(prefix) else None
        if matrix is not None:
            tensors[name] = checkpoint.tensor(name, *shape, dtype=torch.float32)
            read_names |= {part.tensor for part in matrix.parts}
    for name in sorted(checkpoint.names - read_names):
        if name.startswith(prefix) and not any(
            re.fullmatch(pattern, name) for pattern in checkpoint.skipped_patterns
        ):
            is_compressed = checkpoint.dtype(name) is torch.uint8 and name in matrices
            tensors[name] = (
                checkpoint.tensor(name, *matrices[name], dtype=torch.bfloat16)
                if is_compressed
                else checkpoint.read_raw(name)
            )
    return tensors


class MatrixRecorder(Claims):
    """A checkpoint of which nothing is read. It notes the matrices that a model asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.matrices: Matrices = {}

    def tensor(self, name: str, *shape: int, **options: Any) -> torch.Tensor:
        """Claims a tensor, and notes its shape if it is a matrix."""
        if len(shape) == 2 and name.endswith(".weight"):
            self.matrices[name] = shape[0], shape[1]
        return super().tensor(name, *shape, **options)


def _record_matrices(file: ModelFile, config: Config, recorder: MatrixRecorder) -> Matrices:
    """All matrices but those of routed experts."""
    loader = Loader(recorder, REFERENCE, "meta", torch.float32, positions=0)
    file.blocks(config, loader)
    for name in ("model.embed_tokens", "lm_head"):
        recorder.matrices[f"{name}.weight"] = config.spec.vocab_size, config.spec.hidden_size
    return recorder.matrices


def _list_expert_matrices(names: ExpertNames | None) -> Matrices:
    if names is None:
        return {}
    shapes = (shape for expert in range(names.num_experts) for shape in names.shapes(expert))
    return {f"{name}.weight": (rows, columns) for name, rows, columns in shapes}
