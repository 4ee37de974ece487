"""Writes a checkpoint in the formats of other programs, and what a program that dequantises it would compute.

Each format is written as its definition says, number by number and without moesaic's code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Name and matrix [rows, columns] -> the tensors in the file, and the dequantised matrix in float32."""
MATRICES = re.compile(
    r".*\.(q_proj|k_proj|v_proj|o_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj"
    r"|gate_proj|up_proj|down_proj|w1|w2|w3|conv\.in_proj|out_proj)\.weight"
)
COLUMNS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
"""Experts of gpt-oss, which have no other quantised matrices."""
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which column each of the eight codes of an AWQ word is, from the lowest bits up."""


@dataclass(frozen=True)
class Format:
    """How matrices are written, and the quantization_config that says so."""

    write: Quantizer
    config: dict[str, Any]
    columns: bool = False
    """Whether it is for the experts of gpt-oss."""


def quantize(source: Path, to: Path, form: Format, kept: str = "") -> tuple[Path, Path]:
    """Writes the checkpoint `source` quantised and dequantised. Returns both directories.

    kept: a regular expression of names left as they are.
    """
    quantised, plain = to / "quantised", to / "plain"
    tensors: Tensors = {}
    floats: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        matrices = COLUMNS if form.columns else MATRICES
        if matrices.fullmatch(name) and not (kept and re.fullmatch(kept, name)):
            written, floats[name] = form.write(name.removesuffix(".weight"), tensor.float())
            tensors |= written
        else:
            tensors[name] = tensor
            floats[name] = tensor.float()
    for path, found in ((quantised, tensors), (plain, floats)):
        shutil.copytree(source, path)
        save_file(
            {name: one.contiguous() for name, one in found.items()},
            path / "model.safetensors",
            {"format": "pt"},
        )
    file = quantised / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": form.config}))
    return quantised, plain


def fp8_blocks(rows: int) -> Quantizer:
    """Blocks of `rows` x 128."""

    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, plain = torch.zeros_like(matrix, dtype=torch.float8_e4m3fn), torch.zeros_like(matrix)
        scales = torch.zeros(-(-matrix.shape[0] // rows), -(-matrix.shape[1] // 128))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * rows, (i + 1) * rows), slice(j * 128, (j + 1) * 128)
                scales[i, j] = matrix[block].abs().max() / 448
                codes[block] = (matrix[block] / scales[i, j]).to(torch.float8_e4m3fn)
                plain[block] = codes[block].float() * scales[i, j]
        return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, plain

    return write


def fp8_powers(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 128 x 128 whose scales are powers of two, as the checkpoints of DeepSeek-V3.1 have them."""
    codes, plain = torch.zeros_like(matrix, dtype=torch.float8_e4m3fn), torch.zeros_like(matrix)
    scales = torch.zeros(-(-matrix.shape[0] // 128), -(-matrix.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scales[i, j] = 2.0 ** torch.ceil(torch.log2(matrix[block].abs().max() / 448))
            codes[block] = (matrix[block] / scales[i, j]).to(torch.float8_e4m3fn)
            plain[block] = codes[block].float() * scales[i, j]
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, plain


def fp8_rows(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = matrix.abs().amax(1, keepdim=True) / 448
    codes = (matrix / scales).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes.float() * scales


def fp8_matrix(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (matrix.abs().max() / 448).reshape(1)
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale


def with_static_scales(write: Quantizer) -> Quantizer:
    """Also writes a scale of the matrix's inputs, which a program that dequantises does not need."""

    def both(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, plain = write(name, matrix)
        return {**tensors, f"{name}.input_scale": torch.tensor(0.37)}, plain

    return both


def rounded(
    matrix: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns] from 0 on, scales and zero points [rows, groups], and the dequantised matrix."""
    rows, columns = matrix.shape
    size = columns if group == -1 else group
    groups = matrix.reshape(rows, columns // size, size)
    most = 2**bits - 1
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        scales = (groups.abs().amax(2) / (2 ** (bits - 1) - 1)).to(dtype)
        zeros = torch.full_like(low, 2 ** (bits - 1))
    else:
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most)
    codes = ((groups / scales.float()[:, :, None]).round() + zeros[:, :, None]).clamp(0, most)
    plain = (codes - zeros[:, :, None]) * scales.float()[:, :, None]
    return codes.reshape(rows, columns).long(), scales, zeros.long(), plain.reshape(rows, columns)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, m] packed into int32 [rows, m * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    packed = torch.zeros(len(codes), padded.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        packed |= padded[:, place::per_word] << (bits * place)
    return packed.to(torch.uint32).view(torch.int32)


def packed(bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Quantizer:
    """compressed-tensors, pack-quantized."""

    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, plain = rounded(matrix, bits, group, symmetric, dtype)
        tensors = {
            f"{name}.weight_packed": words(codes, bits),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = words(zeros.T.contiguous(), bits).T
        return tensors, plain

    return write


def packed_in_any_order(bits: int, group: int, symmetric: bool) -> Quantizer:
    """compressed-tensors, pack-quantized, with columns of any group."""

    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = matrix.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        back = torch.argsort(order)
        codes, scales, zeros, plain = rounded(matrix[:, order], bits, group, symmetric, torch.bfloat16)
        tensors = {
            f"{name}.weight_packed": words(codes[:, back].contiguous(), bits),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(matrix.shape),
            f"{name}.weight_g_idx": (torch.arange(columns) // group)[back].to(torch.int32),
        }
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = words(zeros.T.contiguous(), bits).T
        return tensors, plain[:, back]

    return write


def int8_rows(symmetric: bool) -> Quantizer:
    """compressed-tensors, int-quantized."""

    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, plain = rounded(matrix, 8, -1, symmetric, torch.float32)
        tensors = {f"{name}.weight": (codes - 128).to(torch.int8), f"{name}.weight_scale": scales}
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, plain

    return write


def gptq(bits: int, group: int, stored_zero: int, act_order: bool) -> Quantizer:
    """stored_zero: what is subtracted from zero points in the file."""

    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = matrix.shape[1]
        order = (
            torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
            if act_order
            else torch.arange(columns)
        )
        codes, scales, zeros, plain = rounded(matrix[:, order], bits, group, False, torch.float16)
        back = torch.argsort(order)
        tensors = {
            f"{name}.qweight": words(codes[:, back].contiguous(), bits).T,
            f"{name}.qzeros": words(((zeros - stored_zero) & (2**bits - 1)).T.contiguous(), bits),
            f"{name}.scales": scales.T,
            f"{name}.g_idx": (torch.arange(columns) // group)[back].to(torch.int32),
        }
        return tensors, plain[:, back]

    return write


def awq(group: int) -> Quantizer:
    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, plain = rounded(matrix, 4, group, False, torch.float16)

        def mixed(of: torch.Tensor) -> torch.Tensor:
            by_word = of.T.reshape(of.shape[1], -1, 8)[:, :, list(AWQ_COLUMNS)]
            return words(by_word.reshape(of.shape[1], -1).contiguous(), 4)

        return {
            f"{name}.qweight": mixed(codes),
            f"{name}.qzeros": mixed(zeros),
            f"{name}.scales": scales.T,
        }, plain

    return write


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(name: str, matrices: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """matrices [experts, columns, rows]."""
    groups = matrices.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3) / 6).clamp(min=2.0**-100).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1)
    plain = (E2M1[codes] * exponents.exp2()[..., None]).flatten(2).transpose(1, 2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}, plain


def nvfp4(codes: str, factor_name: str, input_name: str, divides: bool) -> Quantizer:
    """Scales in E4M3 of 16 numbers, multiplied by one number of the matrix, or divided by it."""

    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups, largest = matrix.unflatten(1, (-1, 16)), matrix.abs().max() / (448 * 6)
        stored = (groups.abs().amax(2) / 6 / largest).to(torch.float8_e4m3fn)
        factor = 1 / largest if divides else largest
        scales = (stored.float() / factor if divides else stored.float() * factor)[..., None]
        chosen = (groups[..., None] / scales[..., None].clamp(min=1e-30) - E2M1).abs().argmin(-1)
        packed_codes = (chosen[..., 0::2] | chosen[..., 1::2] << 4).to(torch.uint8).flatten(1)
        tensors = {f"{name}.{codes}": packed_codes, f"{name}.weight_scale": stored}
        tensors |= {f"{name}.{factor_name}": factor.reshape([1] if divides else [])}
        tensors |= {f"{name}.{input_name}": torch.tensor([123.0])}
        return tensors, (E2M1[chosen] * scales).flatten(1)

    return write


def packed_mxfp4(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As `mxfp4`, for any matrix [rows, columns]."""
    tensors, plain = mxfp4(name, matrix.T[None])
    codes, exponents = tensors[f"{name}_blocks"][0].flatten(1), tensors[f"{name}_scales"][0]
    return {f"{name}.weight_packed": codes, f"{name}.weight_scale": exponents}, plain[0].T


def modelopt(*ignored: str, **changes: Any) -> dict[str, Any]:
    """As ModelOpt 0.41 writes it."""
    floats = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {
            "group_0": {"input_activations": floats, "weights": floats, "targets": ["Linear"]}
        },
        "ignore": ["lm_head", *ignored], "quant_algo": "NVFP4", "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, **changes,
    }  # fmt: skip


def compressed_tensors(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it. inputs: its `input_activations`."""
    group = {
        "targets": ["Linear"], "input_activations": inputs, "output_activations": None, "format": form,
        "weights": {
            "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None,
            "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
            "observer_kwargs": {}, **weights,
        },
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None, "version": "0.12.2",
        "config_groups": {"group_0": group}, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def _gptq_config(bits: int, form: str, act_order: bool) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": act_order, "sym": False,
        "checkpoint_format": form, "lm_head": False, "damp_percent": 0.01, "true_sequential": True,
    }  # fmt: skip


FORMATS = {
    "fp8 blocks": Format(
        fp8_blocks(32),
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [32, 128],
        },
    ),
    "fp8 rows": Format(fp8_rows, compressed_tensors("float-quantized", type="float")),
    "fp8 matrix": Format(fp8_matrix, compressed_tensors("float-quantized", type="float", strategy="tensor")),
    "fp8 matrix, static": Format(
        with_static_scales(fp8_matrix),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "int8 rows": Format(int8_rows(True), compressed_tensors("int-quantized")),
    "int8 rows, zero points": Format(int8_rows(False), compressed_tensors("int-quantized", symmetric=False)),
    "packed int4": Format(
        packed(4, 32, True), compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32)
    ),
    "packed int4, zero points": Format(
        packed(4, -1, False, torch.float16), compressed_tensors("pack-quantized", num_bits=4, symmetric=False)
    ),
    "packed int8": Format(packed(8, -1, True), compressed_tensors("pack-quantized")),
    "packed int8, zero points": Format(
        packed(8, 32, False),
        compressed_tensors("pack-quantized", symmetric=False, strategy="group", group_size=32),
    ),
    "gptq": Format(gptq(4, 32, 1, False), _gptq_config(4, "gptq", False)),
    "gptq v2, act order": Format(gptq(8, 32, 0, True), _gptq_config(8, "gptq_v2", True)),
    "awq": Format(
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "nvfp4": Format(
        nvfp4("weight_packed", "weight_global_scale", "input_global_scale", True),
        compressed_tensors(
            "nvfp4-pack-quantized", {"dynamic": "local", "num_bits": 4},
            num_bits=4, type="float", strategy="tensor_group", group_size=16,
            scale_dtype="torch.float8_e4m3fn", zp_dtype=None,
        ),
    ),
    "nvfp4, modelopt": Format(nvfp4("weight", "weight_scale_2", "input_scale", False), modelopt()),
    "packed mxfp4": Format(
        packed_mxfp4,
        compressed_tensors(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32,
            scale_dtype="torch.uint8", zp_dtype="torch.uint8",
        ),
    ),
}  # fmt: skip
MXFP4 = Format(
    mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, columns=True
)
GROUPS_OF_128 = {
    "packed int8, zero points": Format(
        packed(8, 128, False),
        compressed_tensors("pack-quantized", symmetric=False, strategy="group", group_size=128),
    ),
    "int8 rows, zero points": FORMATS["int8 rows, zero points"],
    "nvfp4": FORMATS["nvfp4"],
    "nvfp4, modelopt": FORMATS["nvfp4, modelopt"],
    "gptq, 8 bits": Format(gptq(8, 128, 1, False), _gptq_config(8, "gptq", False) | {"group_size": 128}),
    "gptq, static groups": Format(
        gptq(4, 128, 1, False),
        _gptq_config(4, "gptq", True) | {"group_size": 128, "static_groups": True},
    ),
    "gptq, rows in any order": Format(
        gptq(4, 128, 0, True), _gptq_config(4, "gptq_v2", True) | {"group_size": -1}
    ),
}
"""Formats of a model whose rows have 128 numbers, or a multiple of them."""
POWERS = Format(fp8_powers, {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"})
STORED = {
    "fp8 blocks": "fp8", "fp8 rows": "fp8", "fp8 matrix": "fp8", "fp8 matrix, static": "fp8",
    "int8 rows": "int8",
    "int8 rows, zero points": "int8_offset",
    "packed int4": "int4_g32", "packed int4, zero points": "int4_g32",
    "packed int8": "int8", "packed int8, zero points": "int8_offset", "gptq": "int4_g32",
    "gptq v2, act order": "float32", "awq": "int4_g32",
    "nvfp4": "int8_16", "nvfp4, modelopt": "int8_16", "packed mxfp4": "mxfp4_e8m0",
}  # fmt: skip
"""The type in memory of each format's experts."""
