"""compressed-tensors (llm-compressor): int4 and int8 in words of 32 bits, int8, FP8, NVFP4 and MXFP4."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.core.weight_types import INTEGER_GROUP_TYPES, QUANTIZATIONS
from moesaic.kernels.blocks import pack_groups
from moesaic.models.config import Fields, shorten
from moesaic.models.quantization.fp8 import Fp8, block_of
from moesaic.models.quantization.nvfp4 import GROUP, Nvfp4, PackedMxfp4
from moesaic.models.quantization.scheme import (
    FLOATS,
    Bytes,
    CodedMatrix,
    Floats,
    Groups,
    Kinds,
    Matrix,
    Part,
    Scheme,
    choose_group_type,
    groups_of,
    unpack,
)

MIDDLE = 8
"""The code of 4 bits that stands for zero in symmetric groups."""
SIGN = np.uint8(0x80)
"""The bit that turns codes of int8 to those of uint8, 128 higher."""
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
FLOATS_OF_4_BITS: Mapping[tuple[Any, int], Scheme] = {
    ("tensor_group", GROUP): Nvfp4("weight_packed", "weight_global_scale", divides=True),
    ("group", 32): PackedMxfp4("weight_packed"),
}
"""Strategy and size of a group -> NVFP4 or MXFP4."""


@dataclass(frozen=True)
class PackedIntegers:
    """`weight_packed` int32 [rows, columns * bits / 32], where code 0 is the lowest number of the type."""

    bits: int
    group: int
    """Columns of a group; -1: a row is a group."""
    symmetric: bool
    in_order: bool = True
    """Whether groups are columns side by side. Else `weight_g_idx` gives each column any group, and the
    matrices become float32."""

    def find(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        if kinds(f"{name}.weight_packed") is None:
            return None
        unit = QUANTIZATIONS[f"int{self.bits}"].group if self.in_order else 1
        groups = groups_of(name, columns, self.group, unit)
        per_word = 32 // self.bits
        parts = [
            Part(f"{name}.weight_packed", ("I32",), (rows, -(-columns // per_word))),
            Part(f"{name}.weight_scale", FLOATS, (rows, groups)),
            Part(f"{name}.weight_shape", ("I64", "I32"), (2,)),
        ]
        if not self.symmetric:
            parts.append(Part(f"{name}.weight_zero_point", ("I32",), (-(-rows // per_word), groups)))
        if not self.in_order:
            parts.append(Part(f"{name}.weight_g_idx", ("I32",), (columns,)))
            return Matrix(
                name, rows, columns, "float32", tuple(parts), partial(self._make_ordered, rows, columns)
            )
        scales = f"{name}.weight_scale"
        dtype = choose_group_type(self.bits, self.group, columns, self.symmetric, kinds, scales)
        dtype = dtype or f"int{self.bits}" + ("" if self.symmetric else "_offset")
        return Matrix(name, rows, columns, dtype, tuple(parts), partial(self._make, dtype, rows, columns))

    def _make_ordered(
        self,
        rows: int,
        columns: int,
        words: npt.NDArray[np.int32],
        scales: Floats,
        shape: npt.NDArray[np.int64],
        *extra_arrays: npt.NDArray[np.int32],
    ) -> Floats:
        """The numbers. extra_arrays: zero points if it is asymmetric, and the group of each column."""
        group_of = extra_arrays[-1]
        wrong = group_of[(group_of < 0) | (group_of >= scales.shape[1])]
        if len(wrong):
            raise CheckpointError(f"weight_g_idx: got {wrong[0]}; allowed: 0 to {scales.shape[1] - 1}")
        _check_shape(shape, rows, columns)
        zero = np.full_like(scales, 1 << (self.bits - 1))
        if len(extra_arrays) > 1:
            zero = self._unpack_zeros(extra_arrays[0], rows).astype(np.float32)
        codes = unpack(words, self.bits, columns)
        numbers: Floats = (codes - zero[:, group_of]) * scales[:, group_of]
        return numbers

    def _make(
        self,
        dtype: str,
        rows: int,
        columns: int,
        words: npt.NDArray[np.int32],
        scales: Floats,
        shape: npt.NDArray[np.int64],
        zeros: npt.NDArray[np.int32] | None = None,
    ) -> CodedMatrix | Bytes:
        """The blocks if `dtype` is of INTEGER_GROUP_TYPES, else the codes, scales and offsets."""
        _check_shape(shape, rows, columns)
        zero_points = None if zeros is None else self._unpack_zeros(zeros, rows)
        if dtype in INTEGER_GROUP_TYPES:
            packed_codes: Bytes = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
            if zero_points is None and self.bits == 8:
                return pack_groups(dtype, packed_codes ^ SIGN, scales)
            return pack_groups(dtype, packed_codes, scales, MIDDLE if zero_points is None else zero_points)
        codes = unpack(words, self.bits, columns)
        if zero_points is None:
            return CodedMatrix(codes if self.bits == 4 else codes ^ SIGN, scales)
        return CodedMatrix(codes, scales, -(scales * zero_points.astype(np.float32)))

    def _unpack_zeros(self, zeros: npt.NDArray[np.int32], rows: int) -> Bytes:
        """[rows, groups]. Zero points are packed along the rows, not along the columns as codes are."""
        return unpack(np.ascontiguousarray(zeros.T), self.bits, rows).T


def _check_shape(shape: npt.NDArray[np.int64], rows: int, columns: int) -> None:
    if shape.tolist() != [rows, columns]:
        raise CheckpointError(f"weight_shape: got {shape.tolist()}; allowed: {[rows, columns]}")


@dataclass(frozen=True)
class PlainIntegers:
    """`weight` int8 [rows, columns], with scales of groups or rows, and zero points if it is asymmetric."""

    group: int
    symmetric: bool

    def find(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        if kinds(f"{name}.weight") != "I8":
            return None
        groups = groups_of(name, columns, self.group, QUANTIZATIONS["int8"].group)
        parts = [
            Part(f"{name}.weight", ("I8",), (rows, columns)),
            Part(f"{name}.weight_scale", FLOATS, (rows, groups)),
        ]
        if not self.symmetric:
            parts.append(Part(f"{name}.weight_zero_point", ("I8",), (rows, groups)))
        scales = f"{name}.weight_scale"
        dtype = choose_group_type(8, self.group, columns, self.symmetric, kinds, scales)
        if dtype is None:
            dtype = "int8" if self.symmetric else "int8_offset"
            return Matrix(name, rows, columns, dtype, tuple(parts), self._make)
        return Matrix(name, rows, columns, dtype, tuple(parts), partial(self._make_blocks, dtype))

    def _make_blocks(
        self,
        dtype: str,
        codes: npt.NDArray[np.int8],
        scales: Floats,
        zeros: npt.NDArray[np.int8] | None = None,
    ) -> Bytes:
        code_bytes: Bytes = np.ascontiguousarray(codes).view(np.uint8)
        if zeros is None:
            return pack_groups(dtype, code_bytes, scales)
        return pack_groups(dtype, code_bytes ^ SIGN, scales, zeros.view(np.uint8) ^ SIGN)

    def _make(
        self, codes: npt.NDArray[np.int8], scales: Floats, zeros: npt.NDArray[np.int8] | None = None
    ) -> CodedMatrix:
        code_bytes: Bytes = codes.view(np.uint8)
        if zeros is None:
            return CodedMatrix(code_bytes, scales)
        return CodedMatrix(code_bytes ^ SIGN, scales, -(scales * (zeros.astype(np.float32) + 128)))


def parse(fields: Fields) -> Scheme:
    """Reads quantization_config with quant_method "compressed-tensors".

    What is said of activations is not used: they are not quantised. `ignore` and `targets` are not used: a
    matrix is quantised if the checkpoint has its quantised tensors.
    """
    fields.require_value("quantization_status", "compressed", "frozen", None)
    sparsity = fields.child("sparsity_config")
    if sparsity is not None:
        sparsity.require_value("format", "dense", None)
        sparsity.ignore(
            "targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass"
        )
        sparsity.refuse_unread()
    fields.require_value("moe_sparsity_config", None, {})
    fields.require_value("transform_config", None, {})
    fields.ignore("quant_method", "ignore", "version", "global_compression_ratio")
    fields.ignore("kv_cache_scheme")  # the cache has a type of its own
    form = _form(fields.raw("format", None), "quantization_config.format")
    groups = fields.raw("config_groups", None)
    fields.refuse_unread()
    if (
        not isinstance(groups, dict)
        or not groups
        or not all(isinstance(one, dict) for one in groups.values())
    ):
        raise CheckpointError(
            "config.json: quantization_config.config_groups: allowed: an object of groups, at least one"
        )
    schemes = [
        _scheme(Fields(group, f"quantization_config.config_groups.{name}."), form)
        for name, group in groups.items()
    ]
    kinds = dict.fromkeys(schemes)
    if len({type(one) for one in kinds}) < len(kinds):
        raise CheckpointError(
            "config.json: quantization_config.config_groups: two groups with the same tensors and other "
            "sizes; allowed: groups that the tensors' names and types tell apart"
        )
    return Groups(tuple(kinds)) if len(kinds) > 1 else schemes[0]


def _form(form: Any, key: str) -> Any:
    if form is not None and form not in FORMATS and form != "mixed-precision":
        raise CheckpointError(
            f"config.json: {key}: got {shorten(repr(form))}; allowed: {', '.join(FORMATS)}, or else the "
            "model itself, or its version in FP8, GPTQ, AWQ or GGUF"
        )
    return form


def _scheme(group: Fields, form: Any) -> Scheme:
    """The scheme of one group of matrices."""
    group.ignore("targets", "input_activations", "output_activations")
    form = _form(group.raw("format", None), "quantization_config.config_groups.format") or form
    weights = group.child("weights")
    group.refuse_unread()
    if weights is None:
        raise CheckpointError("config.json: quantization_config.config_groups: weights is missing")
    bits, kind = weights.integer("num_bits"), weights.raw("type", "int")
    strategy = weights.raw("strategy", None)
    size = weights.integer("group_size") if strategy in ("group", "tensor_group") else -1
    symmetric, block = weights.flag("symmetric", True), weights.raw("block_structure", None)
    weights.require_value("dynamic", False)
    weights.require_value("actorder", None, "static", "weight", "group")
    in_order = weights.raw("actorder", None) != "group"
    weights.ignore("group_size", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.refuse_unread()
    if kind == "float" and bits == 8 and symmetric and strategy in ("tensor", "channel", "block"):
        return Fp8(_block(block)) if strategy == "block" else Fp8(None)
    if kind == "float" and bits == 4 and symmetric and (strategy, size) in FLOATS_OF_4_BITS:
        return FLOATS_OF_4_BITS[strategy, size]
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        got = f"{bits} bits of {shorten(repr(kind))} by {shorten(repr(strategy))}"
        raise CheckpointError(
            f"config.json: quantization_config: got {got}; allowed: int of 4 or 8 bits by group or channel, "
            "symmetric float of 8 bits by tensor, channel or block, or of 4 bits by tensor_group of 16 "
            "(NVFP4) or group of 32 (MXFP4)"
        )
    if form not in FORMATS[1:4]:
        return PackedIntegers(bits, size, symmetric, in_order or strategy != "group")
    if not in_order:
        raise CheckpointError(
            f"config.json: quantization_config: got actorder 'group' with {form}; allowed: with {FORMATS[0]}"
        )
    return PlainIntegers(size, symmetric)


def _block(block: Any) -> tuple[int, int]:
    """A block such as [128, 128] or "128x128"."""
    words = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", block) if isinstance(block, str) else None
    return block_of([int(word) for word in words.groups()] if words else block, "block_structure")
