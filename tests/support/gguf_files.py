"""Writes checkpoints as GGUF files, as llama.cpp's converter does, and what such a file stands for.

Names, types and the file itself are the library's own (`gguf`). Nothing here uses moesaic's code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from tests.support import gguf_linear, k_quants

Array = npt.NDArray[Any]
Kinds = Callable[[str], str]
"""Name of a tensor in the file -> its type."""
Back = Callable[[Mapping[str, Array]], Array]
"""The tensor of transformers' checkpoint, from the tensors of the file."""
ARCHITECTURES = {
    "mixtral": "llama", "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "olmoe": "olmoe",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "dots1": "dots1", "ernie4_5_moe": "ernie4_5-moe",
    "granitemoe": "granitemoe", "minimax_m2": "minimax-m2", "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe", "lfm2_moe": "lfm2moe",
}  # fmt: skip
EXPERT = re.compile(r"(model\.layers\.(\d+)\..*experts)\.(\d+)\.(\w+)\.weight")
WORDS = {
    "gate_proj": "ffn_gate_exps", "w1": "ffn_gate_exps", "up_proj": "ffn_up_exps", "w3": "ffn_up_exps",
    "down_proj": "ffn_down_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def write(
    source: Path,
    to: Path,
    kinds: Kinds = lambda name: "F32",
    split_heads: bool = True,
    files: int = 1,
    apart: bool = False,
    legacy: bool = False,
    extra: int = 0,
) -> tuple[Path, Path]:
    """Writes the checkpoint `source` as a GGUF file, and the dequantised checkpoint. Returns both paths.

    split_heads: whether the up-projection of a latent is written in two tensors, as newer files have it.
    files: over how many files the tensors are split. apart: write experts one by one, as in early files.
    legacy: write Qwen3-Next's projections of linear attention as early files have them. extra: layers of
    Qwen3.5 after the others, which predict several tokens at once.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    pieces, backs = _pieces(load_file(source / "model.safetensors"), config, split_heads, legacy)
    pieces |= gguf_linear.extra_layers(pieces, config["num_hidden_layers"], extra)
    to.mkdir(parents=True, exist_ok=True)
    names = [to / "model.gguf"]
    if files > 1:
        names = [to / f"model-{each:05}-of-{files:05}.gguf" for each in range(1, files + 1)]
    writers = [GGUFWriter(str(name), architecture) for name in names]
    metadata(writers[0], config | ({"num_nextn_predict_layers": extra} if extra else {}), split_heads)
    byte_tokens(writers[0])
    numbers: dict[str, Array] = {}
    for index, (name, array) in enumerate(sorted(pieces.items())):
        small = array.ndim == 1 or name.endswith(".bias")
        small = small or "ffn_gate_inp" in name or "ssm_conv1d" in name
        kind = "F32" if small else fitting(kinds(name), array.shape[-1])
        if apart and "_exps." in name:
            for expert, matrix in enumerate(array):
                add(writers[0], name.replace("_exps", f".{expert}"), matrix, kind)
        else:
            add(writers[index % files], name, array, kind)
        numbers[name] = plain(array, kind)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names[0], _plain_checkpoint(source, to / "plain", backs, numbers)


def dequantised(source: Path, file: Path, to: Path) -> Path:
    """Writes the checkpoint that a GGUF file made of `source` stands for, by the library's own reader."""
    config = json.loads((source / "config.json").read_text())
    _, backs = _pieces(load_file(source / "model.safetensors"), config, split_heads=True)
    numbers = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in gguf.GGUFReader(file).tensors
    }
    return _plain_checkpoint(source, to, backs, numbers)


def _plain_checkpoint(
    source: Path, to: Path, backs: Mapping[str, Back], numbers: Mapping[str, Array]
) -> Path:
    shutil.copytree(source, to)
    found = {name: torch.from_numpy(np.ascontiguousarray(back(numbers))) for name, back in backs.items()}
    save_file(found, to / "model.safetensors", {"format": "pt"})
    return to


def fitting(kind: str, columns: int) -> str:
    """The type, or the one that the converter takes where rows have no whole number of its blocks."""
    fits = columns % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0
    return kind if fits else "Q8_0" if columns % 32 == 0 else "F16"


def add(writer: GGUFWriter, name: str, array: Array, kind: str) -> None:
    """Adds a tensor in a type."""
    if kind in ("F32", "F16"):
        writer.add_tensor(name, array.astype(np.float32 if kind == "F32" else np.float16))
    else:
        writer.add_tensor(name, quantized(array, kind), raw_dtype=GGMLQuantizationType[kind])


def quantized(array: Array, kind: str) -> Array:
    """The bytes [.., row_bytes] of an array in a type."""
    if kind not in k_quants.WRITERS:
        return gguf.quantize(array, GGMLQuantizationType[kind])
    blocks = k_quants.WRITERS[kind](np.ascontiguousarray(array, dtype=np.float32).reshape(-1, 256))
    return blocks.reshape(*array.shape[:-1], -1)


def plain(array: Array, kind: str) -> Array:
    """The numbers that a type keeps of an array, in float32."""
    if kind in ("F32", "F16"):
        return array.astype(np.float32 if kind == "F32" else np.float16).astype(np.float32)
    return gguf.dequantize(quantized(array, kind), GGMLQuantizationType[kind]).astype(np.float32)


def permuted(matrix: Array, heads: int) -> Array:
    """As the converter orders rows of queries and keys of llama: the two of a rotated pair side by side."""
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def unpermuted(matrix: Array, heads: int) -> Array:
    return matrix.reshape(heads, -1, 2, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def _pieces(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], split_heads: bool, legacy: bool = False
) -> tuple[dict[str, Array], dict[str, Back]]:
    pieces: dict[str, Array] = {}
    backs: dict[str, Back] = {}
    experts: dict[str, dict[int, Array]] = {}
    names = gguf.get_tensor_name_map(_arch(config), config["num_hidden_layers"] + 4)
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if (expert := EXPERT.fullmatch(name)) is not None:
            to, index = f"blk.{expert[2]}.{WORDS[expert[4]]}.weight", int(expert[3])
            experts.setdefault(to, {})[index] = array
            backs[name] = lambda file, to=to, index=index: file[to][index]  # type: ignore[misc]
            continue
        if config["model_type"] in gguf_linear.KINDS and gguf_linear.changed(name):
            parts, backs[name] = gguf_linear.piece(name, array, config, names, legacy)
        else:
            parts, backs[name] = _piece(name, array, config, names, split_heads)
        pieces |= parts
    for to, each in experts.items():
        pieces[to] = np.stack([each[index] for index in range(len(each))])
    return pieces, backs


def _arch(config: Mapping[str, Any]) -> gguf.MODEL_ARCH:
    wanted = ARCHITECTURES[config["model_type"]]
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)


def _piece(
    name: str, array: Array, config: Mapping[str, Any], names: gguf.TensorNameMap, split_heads: bool
) -> tuple[dict[str, Array], Back]:
    """The tensors of the file that one of transformers becomes, and the way back."""
    block = ".".join(["blk", *name.split(".")[2:3]])
    if "block_sparse_moe.input_linear" in name:
        gate, up = np.split(array, 2, axis=1)
        found = {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
        return found, lambda file: np.concatenate([file[each] for each in found], axis=1)
    if config["model_type"] == "gpt_oss" and ".experts." in name:
        return _gpt_oss(name, array, block)
    if name.endswith("kv_b_proj.weight") and split_heads:
        return _latent(array, config, block)
    mapped = {
        "e_score_correction_bias": "exp_probs_b.bias", "self_attn.sinks": "attn_sinks.weight",
        "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
        "feed_forward.expert_bias": "exp_probs_b.bias",
    }  # fmt: skip
    to = next((f"{block}.{mine}" for theirs, mine in mapped.items() if name.endswith(theirs)), None)
    to = "token_embd_norm.weight" if name == "model.embedding_norm.weight" else to
    to = to or names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert to is not None, name
    shape = array.shape
    if config["model_type"] in ("mixtral", "granitemoe") and re.search(r"\.[qk]_proj\.", name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return {to: permuted(array, heads)}, lambda file: unpermuted(file[to], heads)
    return {to: array.squeeze()}, lambda file: file[to].reshape(shape)


def _gpt_oss(name: str, array: Array, block: str) -> tuple[dict[str, Array], Back]:
    ending = "bias" if name.endswith("_bias") else "weight"
    rows = array if ending == "bias" else array.swapaxes(1, 2)

    def turned(found: Array) -> Array:
        return found if ending == "bias" else found.swapaxes(1, 2)

    if "down_proj" in name:
        down = f"{block}.ffn_down_exps.{ending}"
        return {down: rows}, lambda file: turned(file[down])
    gate, up = (f"{block}.ffn_{word}_exps.{ending}" for word in ("gate", "up"))

    def back(file: Mapping[str, Array]) -> Array:
        whole = np.stack([file[gate], file[up]], axis=2)
        return turned(whole.reshape(whole.shape[0], -1, *whole.shape[3:]))

    return {gate: rows[:, 0::2], up: rows[:, 1::2]}, back


def _latent(array: Array, config: Mapping[str, Any], block: str) -> tuple[dict[str, Array], Back]:
    heads, width = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = array.reshape(heads, -1, array.shape[1])
    key, value = f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight"
    found = {key: np.ascontiguousarray(both[:, :width].swapaxes(1, 2)), value: both[:, width:]}
    return found, lambda file: np.concatenate([file[key].swapaxes(1, 2), file[value]], axis=1).reshape(
        array.shape
    )


def metadata(writer: GGUFWriter, config: Mapping[str, Any], split_heads: bool) -> None:
    """Writes what the converter writes for a model."""
    kind, extra = config["model_type"], config.get("num_nextn_predict_layers", 0)
    extra = extra if kind in ("glm4_moe", *gguf_linear.KINDS) else 0
    writer.add_block_count(config["num_hidden_layers"] + extra)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["norm_eps" if kind == "lfm2_moe" else "rms_norm_eps"])
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(config[key] for key in experts if key in config))
    writer.add_expert_used_count(config.get("num_experts_per_tok", config.get("moe_k")))
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("n_group") is not None and kind != "deepseek_v2":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    _rope(writer, config, kind)
    if "kv_lora_rank" in config:
        _latent_keys(writer, config, split_heads)
    else:
        heads = config["num_key_value_heads"]
        if kind == "lfm2_moe":
            heads = [0 if layer == "conv" else heads for layer in config["layer_types"]]
        writer.add_head_count_kv(heads)
        if config.get("head_dim") is not None:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1"):
        _gate(writer, config, kind)
    _of_family(writer, config, kind)


def _rope(writer: GGUFWriter, config: Mapping[str, Any], kind: str) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(rope[key])
        if rope.get("mscale_all_dim") is not None:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _latent_keys(writer: GGUFWriter, config: Mapping[str, Any], split_heads: bool) -> None:
    rank, rotated, nope = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    if config.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    if not split_heads:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(nope + rotated)
        writer.add_value_length(config["v_head_dim"])
        return
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(nope + rotated)
    writer.add_value_length_mla(config["v_head_dim"])


def _gate(writer: GGUFWriter, config: Mapping[str, Any], kind: str) -> None:
    if kind == "deepseek_v2" and config.get("topk_method") == "group_limited_greedy":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if kind != "glm4_moe_lite":  # whose config.json does not say it
        sigmoid = gguf.ExpertGatingFuncType.SIGMOID
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if kind == "deepseek_v2" else sigmoid)
    dense = config.get("first_k_dense_replace")
    writer.add_leading_dense_block_count(1 if dense is None else dense)
    writer.add_expert_shared_count(config.get("n_shared_experts") or 0)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob") or kind in ("glm4_moe", "dots1"):
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _of_family(writer: GGUFWriter, config: Mapping[str, Any], kind: str) -> None:
    if kind in ("mixtral", "granitemoe"):
        writer.add_vocab_size(config["vocab_size"])
        own = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(config.get("head_dim") or own)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind in gguf_linear.KINDS:
        gguf_linear.metadata(writer, config)
    if kind == "olmoe" and config.get("clip_qkv") is not None:
        writer.add_clamp_kqv(config["clip_qkv"])
    if kind == "glm4_moe":
        partial = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config["head_dim"] * partial))
        writer.add_nextn_predict_layers(config.get("num_nextn_predict_layers", 0))
    if kind == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if kind == "minimax_m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        partial = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(config.get("rotary_dim") or int(config["head_dim"] * partial))
    if kind == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if kind == "granitemoe":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def byte_tokens(writer: GGUFWriter) -> None:
    """Writes a vocabulary of one token a byte, and one of two, which nothing is asked of but to be there."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*sorted(alphabet), "ab"])
    writer.add_token_types([1] * 257)
    writer.add_token_merges(["a b"])
