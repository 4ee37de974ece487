"""Qwen3-Next and Qwen3.5 for `convert_gguf.py`: what llama.cpp wants of linear attention, and of norms.

Facts are those of llama.cpp's own converter (conversion/qwen.py) and of its loaders of qwen3next and
qwen35moe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Change = Callable[[Floats], Floats]
Part = tuple[str, str, Change | None]
"""Name in the file, name in the checkpoint, and what becomes of the tensor."""
KINDS = ("qwen3_next", "qwen3_5_moe_text")
SECTIONS = [11, 11, 10, 0]
"""How angles are divided among time, height and width. They are all equal for text."""


def one_added(weight: Floats) -> Floats:
    """The weight of a norm, which these models store less one."""
    return weight + np.float32(1)


def _decay(logarithm: Floats) -> Floats:
    return -np.exp(logarithm)


class Sizes:
    """The sizes of linear attention in config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.keys: int = config.get("linear_num_key_heads", 16)
        self.values: int = config.get("linear_num_value_heads", 32)
        self.width: int = config.get("linear_key_head_dim", 128)
        if config.get("linear_value_head_dim", 128) != self.width:
            raise SystemExit(
                "convert_gguf: linear_value_head_dim: allowed: linear_key_head_dim, for llama.cpp"
            )
        self.taps: int = config.get("linear_conv_kernel_dim", 4)
        self.tiled = config["model_type"] == KINDS[1]

    def heads(self, each: int) -> NDArray[np.int64]:
        """Which row of the checkpoint stands where. each: rows of a value head.

        Those of Qwen3.5 stand as llama.cpp repeats key heads: one value head of each key head, then the
        next of each.
        """
        rows = np.arange(self.values * each).reshape(self.keys, -1, each)
        return (rows.swapaxes(0, 1) if self.tiled else rows).reshape(-1)

    def channels(self) -> NDArray[np.int64]:
        """The same of queries and keys, which stay in place, and of values."""
        first = 2 * self.keys * self.width
        return np.concatenate([np.arange(first), first + self.heads(self.width)])


def parts(config: dict[str, Any], source: str) -> Iterator[Part]:
    """The tensors of linear attention, whose names begin with `source` in the checkpoint."""
    sizes = Sizes(config)
    of_head, of_number, channels = sizes.heads(1), sizes.heads(sizes.width), sizes.channels()
    yield "ssm_conv1d.weight", f"{source}.conv1d.weight", lambda taps: taps[channels, 0]
    yield "ssm_dt.bias", f"{source}.dt_bias", lambda bias: bias[of_head]
    yield "ssm_a", f"{source}.A_log", lambda logarithm: _decay(logarithm)[of_head]
    yield "ssm_norm.weight", f"{source}.norm.weight", None
    yield "ssm_out.weight", f"{source}.out_proj.weight", lambda matrix: matrix[:, of_number]
    if sizes.tiled:
        yield "attn_qkv.weight", f"{source}.in_proj_qkv.weight", lambda matrix: matrix[channels]
        yield "attn_gate.weight", f"{source}.in_proj_z.weight", lambda matrix: matrix[of_number]
        yield "ssm_beta.weight", f"{source}.in_proj_b.weight", lambda matrix: matrix[of_head]
        yield "ssm_alpha.weight", f"{source}.in_proj_a.weight", lambda matrix: matrix[of_head]
        return
    yield "attn_qkv.weight", f"{source}.in_proj_qkvz.weight", lambda matrix: _split(sizes, matrix)[0]
    yield "attn_gate.weight", f"{source}.in_proj_qkvz.weight", lambda matrix: _split(sizes, matrix)[1]
    yield "ssm_ba.weight", f"{source}.in_proj_ba.weight", None


def _split(sizes: Sizes, matrix: Floats) -> tuple[Floats, Floats]:
    """The rows of query, key, value and gate, which follow one another head by head in Qwen3-Next."""
    shared = sizes.values // sizes.keys * sizes.width
    by_head = matrix.reshape(sizes.keys, -1, matrix.shape[1])
    cut = np.split(by_head, np.cumsum([sizes.width, sizes.width, shared]), axis=1)
    *mixed, gate = (part.reshape(-1, matrix.shape[1]) for part in cut)
    return np.concatenate(mixed), gate


def is_linear(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer has linear attention."""
    kinds = config.get("layer_types")
    if kinds is None:
        return (layer + 1) % config.get("full_attention_interval", 4) > 0
    return bool(kinds[layer] == "linear_attention")


def describe(writer: Any, config: dict[str, Any], width: int) -> None:
    """Writes the keys of these two models alone. width: of a head of gated attention."""
    sizes = Sizes(config)
    rope = config.get("rope_parameters") or {}
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.25
    writer.add_rope_dimension_count(int(width * partial))
    if sizes.tiled:
        writer.add_rope_dimension_sections(SECTIONS)
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(sizes.taps)
    writer.add_ssm_state_size(sizes.width)
    writer.add_ssm_group_count(sizes.keys)
    writer.add_ssm_time_step_rank(sizes.values)
    writer.add_ssm_inner_size(sizes.width * sizes.values)
    layers = range(config["num_hidden_layers"])
    recurrent = [is_linear(config, layer) for layer in layers]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
