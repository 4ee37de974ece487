"""The tensors of a part of a GGUF model as a safetensors checkpoint of the same family has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moesaic.kernels.table import REFERENCE
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint, Claims
from moesaic.models.delta_net import DECAY
from moesaic.models.loader import ExpertNames, Loader

Tensors = dict[str, torch.Tensor]
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def gguf_tensors(path: Path, prefix: str) -> Tensors:
    """Those whose names begin with `prefix`, such as "model.layers.3.", in float32."""
    file, config = registry.model_file(path)
    checkpoint, asked = Checkpoint(path), ShapeRecorder(path)
    file.blocks(config, Loader(asked, REFERENCE, "meta", torch.float32, positions=0))
    vocabulary = config.spec.vocab_size, config.spec.hidden_size
    asked.shapes |= {EMBEDDING: vocabulary, NORM: vocabulary[1:]}
    if HEAD in checkpoint.names:
        asked.shapes[HEAD] = vocabulary

    def read(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.tensor(name, *shape, dtype=torch.float32)

    found = {name: read(name, *shape) for name, shape in asked.shapes.items() if name.startswith(prefix)}
    for name in [name for name in found if name.endswith(f".linear_attn.{DECAY}")]:
        found[name.removesuffix(DECAY) + "A_log"] = torch.log(-found.pop(name))
    for layer in config.spec.moe_layers:
        if f"model.layers.{layer}." == prefix:
            names = file.expert_names(config, layer)
            found |= FUSED.get(config.spec.model_type, _read_separately)(names, read)
    return found


class ShapeRecorder(Claims):
    """A checkpoint of which nothing is read. It notes the tensors that a model asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, *shape: int, **options: Any) -> torch.Tensor:
        """As `Claims.tensor`."""
        self.shapes[name] = shape
        return super().tensor(name, *shape, **options)


Read = Callable[..., torch.Tensor]


def _read_separately(names: ExpertNames, read: Read) -> Tensors:
    """Experts one by one."""
    every = (one for expert in range(names.num_experts) for one in names.list_tensors(expert))
    return {name: read(name, *shape) for name, *shape in every}


def _read_each(names: ExpertNames, read: Read) -> list[list[torch.Tensor]]:
    """The tensors of each expert."""
    return [[read(*one) for one in names.list_tensors(expert)] for expert in range(names.num_experts)]


def _read_granite(names: ExpertNames, read: Read) -> Tensors:
    """All experts in two tensors: input_linear [E, 2w, h] and output_linear [E, h, w]."""
    prefix, every = names.prefix.removesuffix(".experts"), _read_each(names, read)
    return {
        f"{prefix}.input_linear.weight": torch.stack([torch.cat([gate, up]) for gate, up, _ in every]),
        f"{prefix}.output_linear.weight": torch.stack([down for *_, down in every]),
    }


def _read_gpt_oss(names: ExpertNames, read: Read) -> Tensors:
    """All experts in two tensors in columns, [E, h, 2w] and [E, w, h], and two of biases."""
    every = _read_each(names, read)
    turns = [torch.stack([gate, up], dim=1).flatten(0, 1) for gate, up, *_ in every]
    return {
        f"{names.prefix}.gate_up_proj": torch.stack([one.T for one in turns]),
        f"{names.prefix}.down_proj": torch.stack([one[2].T for one in every]),
        f"{names.prefix}.gate_up_proj_bias": torch.stack([one[3] for one in every]),
        f"{names.prefix}.down_proj_bias": torch.stack([one[4] for one in every]),
    }


FUSED = {"granitemoe": _read_granite, "gpt_oss": _read_gpt_oss}
"""model_type -> how its checkpoints have experts, where that is not one by one."""
