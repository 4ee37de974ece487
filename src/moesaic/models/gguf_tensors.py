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
    checkpoint, recorder = Checkpoint(path), ShapeRecorder(path)
    file.blocks(config, Loader(recorder, REFERENCE, "meta", torch.float32, positions=0))
    vocabulary = config.spec.vocab_size, config.spec.hidden_size
    recorder.shapes |= {EMBEDDING: vocabulary, NORM: vocabulary[1:]}
    if HEAD in checkpoint.names:
        recorder.shapes[HEAD] = vocabulary

    def read(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.tensor(name, *shape, dtype=torch.float32)

    tensors = {name: read(name, *shape) for name, shape in recorder.shapes.items() if name.startswith(prefix)}
    for name in [name for name in tensors if name.endswith(f".linear_attn.{DECAY}")]:
        tensors[name.removesuffix(DECAY) + "A_log"] = torch.log(-tensors.pop(name))
    for layer in config.spec.moe_layers:
        if f"model.layers.{layer}." == prefix:
            names = file.expert_names(config, layer)
            tensors |= FUSED.get(config.spec.model_type, _read_separately)(names, read)
    return tensors


class ShapeRecorder(Claims):
    """A checkpoint of which nothing is read. It notes the tensors that a model asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, *shape: int, **options: Any) -> torch.Tensor:
        """Claims a tensor, and notes its shape."""
        self.shapes[name] = shape
        return super().tensor(name, *shape, **options)


Read = Callable[..., torch.Tensor]


def _read_separately(names: ExpertNames, read: Read) -> Tensors:
    """Experts one by one."""
    named_shapes = (
        named_shape for expert in range(names.num_experts) for named_shape in names.list_tensors(expert)
    )
    return {name: read(name, *shape) for name, *shape in named_shapes}


def _read_each(names: ExpertNames, read: Read) -> list[list[torch.Tensor]]:
    """The tensors of each expert."""
    return [
        [read(*named_shape) for named_shape in names.list_tensors(expert)]
        for expert in range(names.num_experts)
    ]


def _read_granite(names: ExpertNames, read: Read) -> Tensors:
    """All experts in two tensors: input_linear [E, 2w, h] and output_linear [E, h, w]."""
    prefix, experts = names.prefix.removesuffix(".experts"), _read_each(names, read)
    return {
        f"{prefix}.input_linear.weight": torch.stack(
            [torch.cat([gate_proj, up_proj]) for gate_proj, up_proj, _ in experts]
        ),
        f"{prefix}.output_linear.weight": torch.stack([down_proj for *_, down_proj in experts]),
    }


def _read_gpt_oss(names: ExpertNames, read: Read) -> Tensors:
    """All experts in two tensors in columns, [E, h, 2w] and [E, w, h], and two of biases."""
    experts = _read_each(names, read)
    turns = [torch.stack([gate_proj, up_proj], dim=1).flatten(0, 1) for gate_proj, up_proj, *_ in experts]
    return {
        f"{names.prefix}.gate_up_proj": torch.stack([tensors.T for tensors in turns]),
        f"{names.prefix}.down_proj": torch.stack([tensors[2].T for tensors in experts]),
        f"{names.prefix}.gate_up_proj_bias": torch.stack([tensors[3] for tensors in experts]),
        f"{names.prefix}.down_proj_bias": torch.stack([tensors[4] for tensors in experts]),
    }


FUSED = {"granitemoe": _read_granite, "gpt_oss": _read_gpt_oss}
"""model_type -> how its checkpoints have experts, where that is not one by one."""
