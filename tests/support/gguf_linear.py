"""What llama.cpp's converter makes of linear attention, and of the norms of the same models.

Nothing here uses moesaic's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Back = Callable[[Mapping[str, Array]], Array]
KINDS = ("qwen3_next", "qwen3_5_moe_text")
"""The model types with linear attention."""
TILED = KINDS[1]
"""The one whose value heads change their order."""


def changed(name: str) -> bool:
    """Whether the file has other numbers than the checkpoint, or another order or shape."""
    return ".linear_attn." in name or name.endswith("norm.weight")


def piece(
    name: str, array: Array, config: Mapping[str, Any], names: gguf.TensorNameMap, legacy: bool
) -> tuple[dict[str, Array], Back]:
    """The tensors of the file that one of transformers becomes, and the way back.

    legacy: whether Qwen3-Next's joint projection stays joint, as in early files.
    """
    part = name.rsplit(".linear_attn.", 1)[-1].removesuffix(".weight")
    block = ".".join(["blk", *name.split(".")[2:3]])
    to = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
    if part == "in_proj_qkvz" and not legacy:
        return _apart(array, config["linear_num_key_heads"], config, block)
    assert to is not None, name
    if part == "A_log":
        array = -torch.exp(torch.from_numpy(array)).numpy()
        order = _order(config, 1)
        return {to: array[order]}, lambda file: np.log(-file[to][_back(order)])
    if part == "conv1d":
        order = _after_keys(config)
        return {to: array.squeeze()[order]}, lambda file: file[to][_back(order)][:, None]
    if part in ("dt_bias", "in_proj_a", "in_proj_b", "in_proj_z", "in_proj_qkv"):
        order = _order(config, config["linear_value_head_dim"] if part == "in_proj_z" else 1)
        order = _after_keys(config) if part == "in_proj_qkv" else order
        return {to: array[order]}, lambda file: file[to][_back(order)]
    if part == "out_proj":
        order = _order(config, config["linear_value_head_dim"])
        return {to: array[:, order]}, lambda file: file[to][:, _back(order)]
    if part in ("norm", "in_proj_ba", "in_proj_qkvz"):
        return {to: array}, lambda file: file[to]
    return {to: array + np.float32(1)}, lambda file: file[to] - np.float32(1)


def _apart(array: Array, heads: int, config: Mapping[str, Any], block: str) -> tuple[dict[str, Array], Back]:
    """Queries, keys and values of all heads in one tensor, the gate of the output in another."""
    key, hidden = config["linear_key_head_dim"], config["hidden_size"]
    value = config["linear_value_head_dim"] * config["linear_num_value_heads"] // heads
    each = np.split(array.reshape(heads, -1, hidden), np.cumsum([key, key, value]), axis=1)
    query, keys, values, gate = (one.reshape(-1, hidden) for one in each)
    mixed_name, gate_name = f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"

    def back(file: Mapping[str, Array]) -> Array:
        parts = np.split(file[mixed_name], np.cumsum([heads * key, heads * key]))
        rows = [one.reshape(heads, -1, hidden) for one in (*parts, file[gate_name])]
        return np.concatenate(rows, axis=1).reshape(array.shape)

    return {mixed_name: np.concatenate([query, keys, values]), gate_name: gate}, back


def _order(config: Mapping[str, Any], width: int) -> Array:
    """Which of transformers' rows stands where in the file: value heads of `width` rows each."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    rows = np.arange(values * width)
    if config["model_type"] != TILED:
        return rows
    shared = values // keys
    file = [key * shared + turn for turn in range(shared) for key in range(keys)]
    return rows.reshape(values, width)[file].reshape(-1)


def _after_keys(config: Mapping[str, Any]) -> Array:
    """The same for rows of queries and keys, whose order stays, and of values."""
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return np.concatenate([np.arange(before), before + _order(config, config["linear_value_head_dim"])])


def _back(order: Array) -> Array:
    return np.argsort(order)


def metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Writes what the converter writes for these models beside what it writes for all."""
    values, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(width * values)
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    extra = config.get("num_nextn_predict_layers", 0)
    if extra:
        writer.add_nextn_predict_layers(extra)
    if config.get("layer_types") is not None:
        recurrent = [kind == "linear_attention" for kind in config["layer_types"]] + [False] * extra
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    partial = config["rope_parameters"].get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config["head_dim"] * partial))
    if config["model_type"] == TILED:
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def extra_layers(pieces: Mapping[str, Array], layers: int, extra: int) -> dict[str, Array]:
    """Tensors of layers after the others: those of the last one again, and a joint projection of inputs."""
    found: dict[str, Array] = {}
    for layer in range(layers, layers + extra):
        last = {name: one for name, one in pieces.items() if name.startswith(f"blk.{layers - 1}.")}
        found |= {name.replace(f"blk.{layers - 1}.", f"blk.{layer}."): one for name, one in last.items()}
        norm = pieces["output_norm.weight"]
        found[f"blk.{layer}.nextn.eh_proj.weight"] = np.zeros((len(norm), 2 * len(norm)), np.float32)
        found |= {f"blk.{layer}.nextn.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head_norm")}
    return found
