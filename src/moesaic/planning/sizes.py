"""The sizes of a model as a machine computes it: with its experts in the type that they have in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesaic.core.text_config import TEXT
from moesaic.core.weight_types import (
    BLOCK,
    BLOCK_TYPES,
    COMPRESSED_DTYPE,
    GROUP_TYPES,
    NUMBER_BYTES,
    is_quantized,
    row_bytes,
    split_dtype,
)
from moesaic.cost.reading import read
from moesaic.cost.sizes import Latent, ModelSizes
from moesaic.kernels.table import Kernels
from moesaic.models import files, registry
from moesaic.models.conversion import (
    DECOMPRESSED,
    conversion_of,
    is_left_plain,
    read_by_config,
    scratch_of,
)
from moesaic.models.conversion import type_by_config as type_by_config
from moesaic.models.headers import INDEX, SINGLE, Headers

ROW_BYTES = 4.0
"""Bytes of one number of a row, which is float32. On a CPU cached numbers are float32 by default, too."""
IN_COLUMNS = ("dbrx", "gpt_oss")
"""Families whose files have experts in columns."""
QUANTIZATION = "quantization_config"


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json that says nothing of quantisation, nor of compression."""
    plain = {key: value for key, value in raw.items() if key != QUANTIZATION}
    if isinstance(plain.get(TEXT), dict):
        plain[TEXT] = {key: value for key, value in plain[TEXT].items() if key != QUANTIZATION}
    return plain


def read_config_sizes(raw: Mapping[str, Any], name: str) -> ModelSizes:
    """The sizes in a parsed config.json alone.

    Raises CheckpointError for what `cost.reading.read` refuses, and for an unknown quantisation.
    """
    if not registry.is_quantised(dict(raw)):
        return read(raw, name)
    sizes = read(without_quantization(raw), name)
    return convert_sizes(sizes, type_by_config(raw, sizes.hidden, sizes.expert_width) or "float32", raw)


def convert_sizes(model: ModelSizes, expert_type: str, raw: Mapping[str, Any]) -> ModelSizes:
    """The sizes on a CPU with quantised experts that become `expert_type`, where the files are not here.

    raw: the parsed config.json, which says what files have of an expert.
    """
    sizes = in_format(model, expert_type, gpu=False, plain_parts=_find_plain_parts(raw))
    scratch = scratch_of(expert_type, sizes.hidden * sizes.expert_width)
    size = read_by_config(raw, sizes.hidden, sizes.expert_width)
    read = None if size is None else float(size) + 4.0 * sizes.expert_biases
    return replace(sizes, conversion=expert_type, read=read, staging=(read or sizes.expert_bytes) + scratch)


def decompress_sizes(model: ModelSizes) -> ModelSizes:
    """The sizes where compressed experts are decompressed on their way to the fast level."""
    return replace(model, has_compressed_experts=False, conversion=DECOMPRESSED)


def read_checkpoint_sizes(
    path: Path, name: str, kernels: Kernels, dtype: str = "auto", device: str = "cpu"
) -> ModelSizes:
    """The sizes of a checkpoint. The files say what quantised experts and those in columns take.

    device: of the fast level, "cpu" or "cuda"; `kernels` are its kernels.
    """
    raw = files.read_config(path)
    model = read_config_sizes(raw, name)
    is_quantized = registry.is_quantised(raw)
    if not (is_quantized or model.has_compressed_experts) and raw.get("model_type") not in IN_COLUMNS:
        return model if dtype == "auto" else model.with_number(float(NUMBER_BYTES[dtype]))
    layout = registry.expert_layout(path, kernels, device, dtype)
    if is_quantized:
        model = replace(
            in_format(model, layout.largest, gpu=False), ties_embeddings=registry.has_tied_embeddings(path)
        )
        other_bytes = registry.bytes_outside_experts(path, kernels, dtype, device)
        model = replace(
            model,
            number=other_bytes / model.other_parameters,
            quantized_dtype=layout.largest,
            mean_expert=layout.num_bytes / layout.num_experts / len(layout.layers) - 4 * model.expert_biases,
        )
    elif dtype != "auto":
        model = model.with_number(float(NUMBER_BYTES[dtype]))
    model = replace(model, has_compressed_experts=layout.dtype == COMPRESSED_DTYPE)
    conversion = conversion_of(Headers(path), layout)
    if conversion is None:
        return model
    model = replace(
        model, conversion=conversion.name, read=float(conversion.read), staging=float(conversion.staging)
    )
    return model if device == "cpu" else over_ram(model)


def over_ram(model: ModelSizes) -> ModelSizes:
    """The sizes where RAM is the slow level: experts are converted there, and then the link carries them."""
    return replace(model, read=None, staging=0.0)


def has_weights(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a directory with weights and not only a config.json."""
    return files.is_gguf(path) or (path / SINGLE).is_file() or (path / INDEX).is_file()


def in_format(model: ModelSizes, name: str, gpu: bool, plain_parts: Collection[str] = ()) -> ModelSizes:
    """The sizes of the model computed from one type.

    gpu: rows have the type of the weights. plain_parts: "attention", "shared" (experts) and "dense" (layers),
    if these are not quantised beside quantised routed experts.
    """
    number = _number(model, name, plain_parts)
    return replace(
        model,
        number=number,
        has_compressed_experts=name == COMPRESSED_DTYPE,
        quantized_dtype=name if is_quantized(split_dtype(name)[0]) else None,
        mean_expert=None,
        activation_number=number if gpu else ROW_BYTES,
        conversion=None,
        read=None,
        staging=0.0,
    )


def _find_plain_parts(raw: Mapping[str, Any]) -> list[str]:
    """The parts of `in_format` that a parsed config.json leaves unquantised in all layers.

    The first and the second layer stand for all.
    """
    modules = {
        "attention": ("layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"),
        "shared": ("layers.1.mlp.shared_experts.down_proj",),
        "dense": ("layers.0.mlp.down_proj",),
    }
    return [part for part, names in modules.items() if all(is_left_plain(raw, f"model.{n}") for n in names)]


def _number(model: ModelSizes, name: str, plain_parts: Collection[str]) -> float:
    """Bytes of a number of all but the experts, as a mean, if the experts have this type.

    Beside quantised experts, other matrices have the type of gate and up. Gates and the heads' matrices of
    latent attention are float32, and files have the embedding and the LM head in bf16, except for GGUF files.
    Files in MXFP4 have everything beside the experts in bf16.
    """
    kind, plain = split_dtype(name)[0], float(NUMBER_BYTES["bfloat16"])
    if not is_quantized(kind) or kind in ("mxfp4", "mxfp4_e8m0"):
        return float(NUMBER_BYTES.get(name, plain))
    attention = model.attention
    num_parameters = {
        "attention": model.layers * sum(attention.projection_sizes(model.hidden)),
        "shared": model.moe_layers * 3 * model.hidden * model.shared_width,
        "dense": (model.layers - model.moe_layers) * 3 * model.hidden * model.dense_width,
    }
    num_plain, num_float32 = sum(num_parameters[part] for part in plain_parts), model.gates
    if isinstance(attention, Latent) and "attention" not in plain_parts:
        num_float32 += (
            model.layers * attention.heads * (attention.nope_width + attention.value) * attention.rank
        )
    quantized_number = row_bytes(kind, BLOCK) / BLOCK
    embedding_number = quantized_number if kind in BLOCK_TYPES and kind not in GROUP_TYPES else plain
    num_quantized = model.other_parameters - num_float32 - num_plain - model.embeddings
    return (
        quantized_number * num_quantized
        + plain * num_plain
        + NUMBER_BYTES["float32"] * num_float32
        + embedding_number * model.embeddings
    ) / model.other_parameters
