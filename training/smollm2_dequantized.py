"""Reads the padded copies in a GGUF file as a dense model of transformers.

The numbers are those of the `gguf` library, so that moesaic's reader can be compared with it.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from smollm2_file import LAYER_NAMES, OUTER_NAMES


def read_dense(file: Path, dense: Path) -> PreTrainedModel:
    """Returns the dense model whose MLPs are the experts of a file. dense: the checkpoint with its config.

    Raises ValueError if the experts of a layer are not copies.
    """
    config = AutoConfig.from_pretrained(dense)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = {}
    for entry in gguf.GGUFReader(file).tensors:
        stem = entry.name.removesuffix(".weight")
        if stem.endswith("ffn_gate_inp"):
            continue
        data = entry.data
        if stem.endswith("_exps"):
            if any(not np.array_equal(data[0], expert) for expert in data[1:]):
                raise ValueError(f"{file}: {entry.name}: the experts are not copies")
            data = data[0]
        weight = torch.from_numpy(gguf.dequantize(data, entry.tensor_type).astype(np.float32))
        tensors[name_in_transformers(stem)] = order_rows(stem, weight, config.head_dim)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{file}: tensors missing: {missing}, not expected: {unexpected}")
    return model.eval()


def name_in_transformers(stem: str) -> str:
    """The name of a tensor in a dense Llama of transformers."""
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.weight"
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind.removesuffix('_exps')]}.weight"


def order_rows(stem: str, weight: Tensor, head_dim: int) -> Tensor:
    """Undoes llama.cpp's order of the rows of queries and keys, which has rotated pairs side by side."""
    if not stem.endswith(("attn_q", "attn_k")):
        return weight
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)
