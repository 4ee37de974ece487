"""Pads a model with zeros, so that all rows are whole blocks of 256 numbers, as K-quants have them.

The padded model computes the same numbers. A norm divides by the mean over more numbers, so its weight and
its epsilon are made smaller. Heads are added in whole groups; what they read and give is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Numbers of a block. Widths become multiples of it."""


def pad(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns config and tensors of the padded model. Norms become float32, all else keeps its type.

    Takes a dense Llama or the Mixtral of its copies, without biases.
    """
    hidden = config["hidden_size"]
    wide = -(-hidden // BLOCK) * BLOCK
    key_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    group = config["num_attention_heads"] // key_heads
    wide_key_heads = key_heads
    while wide_key_heads * group * head_dim % BLOCK:
        wide_key_heads += 1
    ratio = hidden / wide
    padded = {}
    for name, weight in tensors.items():
        if weight.ndim == 1:
            padded[name] = enlarge(weight.float() * ratio**0.5, wide)
            continue
        rows, columns = (wide if size == hidden else size for size in weight.shape)
        projection = name.split(".")[-2]
        if projection in ("k_proj", "v_proj"):
            rows = wide_key_heads * head_dim
        elif projection == "q_proj":
            rows = wide_key_heads * group * head_dim
        elif projection == "o_proj":
            columns = wide_key_heads * group * head_dim
        padded[name] = enlarge(weight, rows, columns)
    sizes = {
        "hidden_size": wide,
        "num_attention_heads": wide_key_heads * group,
        "num_key_value_heads": wide_key_heads,
        "rms_norm_eps": config["rms_norm_eps"] * ratio,
    }
    return config | sizes, padded


def enlarge(weight: Tensor, *shape: int) -> Tensor:
    """Appends zeros to each dimension of a tensor up to `shape`."""
    larger = torch.zeros(shape, dtype=weight.dtype)
    larger[tuple(slice(size) for size in weight.shape)] = weight
    return larger
