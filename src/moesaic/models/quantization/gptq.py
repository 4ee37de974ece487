"""GPTQ and AWQ: int4 and int8 in words of 32 bits, with zero points. Matrices are stored transposed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.kernels.blocks import pack_groups
from moesaic.models.config import Fields
from moesaic.models.quantization.scheme import (
    BAND,
    FLOATS,
    Bytes,
    CodedMatrix,
    Floats,
    Kinds,
    Matrix,
    Part,
    choose_group_type,
    groups_of,
    unpack,
)

Words = npt.NDArray[np.int32]
SIGN = np.uint8(0x80)
"""The zero point of symmetric codes of eight bits, and the bit that turns these to int8."""
UNIT = 32
"""Groups must be multiples of this many columns: those of the types that they are converted to."""
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Which of the eight codes of an AWQ word each column has."""
AUTO_ROUND, AUTO_ROUND_AWQ = "auto_round", "auto_round:auto_awq"
PACKINGS = {AUTO_ROUND: 0, "auto_round:gptqmodel": 0, "auto_round:auto_gptq": 1, AUTO_ROUND_AWQ: 0}
"""auto-round's names of packings -> what is added to stored zero points."""


@dataclass(frozen=True)
class Gptq:
    """`qweight` [columns * bits / 32, rows], `qzeros` [groups, rows * bits / 32], `scales` [groups, rows]."""

    bits: int
    group: int
    zero_point_offset: int
    """What is added to stored zero points: 1 in the first version of the format, 0 in the second."""
    act_order: bool
    """Whether `g_idx` gives each column any group. Such matrices become float32."""
    symmetric: bool = False
    """Whether every zero point is the middle of the codes."""

    def find(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        if kinds(f"{name}.qweight") is None:
            return None
        groups = groups_of(name, columns, self.group, UNIT)
        per_word = 32 // self.bits
        parts = [
            Part(f"{name}.qweight", ("I32",), (-(-columns // per_word), rows)),
            Part(f"{name}.qzeros", ("I32",), (groups, -(-rows // per_word))),
            Part(f"{name}.scales", FLOATS, (groups, rows)),
        ]
        in_any_order = self.act_order and groups > 1
        if in_any_order or kinds(f"{name}.g_idx") is not None:
            parts.append(Part(f"{name}.g_idx", ("I32",), (columns,)))
        if in_any_order:
            return Matrix(name, rows, columns, "float32", tuple(parts), partial(self._any_order, columns))
        dtype = choose_group_type(self.bits, self.group, columns, self.symmetric, kinds, f"{name}.scales")
        if dtype is None:
            dtype = f"int{self.bits}_offset"
            return Matrix(name, rows, columns, dtype, tuple(parts), partial(self._in_order, columns))
        return Matrix(name, rows, columns, dtype, tuple(parts), partial(self._in_blocks, dtype, columns))

    def _read_zeros(self, zeros: Words, rows: int) -> Bytes:
        """Zero points [rows, groups]."""
        stored_zeros = unpack(zeros, self.bits, rows)
        mask = np.uint8((1 << self.bits) - 1)
        return np.ascontiguousarray(((stored_zeros + np.uint8(self.zero_point_offset)) & mask).T)

    def _parts(
        self, columns: int, words: Words, zeros: Words, scales: Floats
    ) -> tuple[Bytes, Floats, Floats]:
        """Codes [rows, columns], zero points [rows, groups], scales [rows, groups]."""
        codes = unpack(np.ascontiguousarray(words.T), self.bits, columns)
        zero_points = self._read_zeros(zeros, scales.shape[1])
        return codes, zero_points.astype(np.float32), np.ascontiguousarray(scales.T)

    def _in_blocks(
        self,
        dtype: str,
        columns: int,
        words: Words,
        zeros: Words,
        scales: Floats,
        group_of: Words | None = None,
    ) -> Bytes:
        _check_order(columns, len(scales), group_of)
        zero_points = self._read_zeros(zeros, scales.shape[1])
        packed_codes = np.ascontiguousarray(words.T).view(np.uint8)
        if self.bits == 4:
            return _pack_int4(dtype, packed_codes, scales, zero_points)
        if not self.symmetric:
            return pack_groups(dtype, packed_codes, scales.T, zero_points)
        wrong = zero_points[zero_points != SIGN]
        if len(wrong):
            raise CheckpointError(f"qzeros: got a zero point of {wrong[0]}; allowed with sym: {SIGN}")
        return pack_groups(dtype, packed_codes ^ SIGN, scales.T)

    def _in_order(
        self, columns: int, words: Words, zeros: Words, scales: Floats, group_of: Words | None = None
    ) -> CodedMatrix:
        _check_order(columns, len(scales), group_of)
        codes, zero, scale = self._parts(columns, words, zeros, scales)
        return CodedMatrix(codes, scale, -(scale * zero))

    def _any_order(self, columns: int, words: Words, zeros: Words, scales: Floats, group_of: Words) -> Floats:
        codes, zero, scale = self._parts(columns, words, zeros, scales)
        wrong = group_of[(group_of < 0) | (group_of >= scale.shape[1])]
        if len(wrong):
            raise CheckpointError(f"g_idx: got {wrong[0]}; allowed: 0 to {scale.shape[1] - 1}")
        numbers = np.empty(codes.shape, dtype=np.float32)
        # In bands, since codes and scales of the whole matrix as float32 would take twice the result's
        # memory.
        for begin in range(0, len(numbers), BAND):
            band = slice(begin, begin + BAND)
            np.multiply(codes[band] - zero[band][:, group_of], scale[band][:, group_of], out=numbers[band])
        return numbers


def _check_order(columns: int, groups: int, group_of: Words | None) -> None:
    """Raises CheckpointError unless groups are columns side by side. group_of: the group of each column."""
    if group_of is not None and not np.array_equal(group_of, np.arange(columns) // -(-columns // groups)):
        raise CheckpointError(
            "g_idx: columns in another order; allowed: only with desc_act, without static_groups"
        )


@dataclass(frozen=True)
class Awq:
    """`qweight` [columns, rows / 8], `qzeros` [groups, rows / 8], `scales` [groups, rows]."""

    group: int

    def find(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        if kinds(f"{name}.qweight") is None:
            return None
        groups = groups_of(name, columns, self.group, UNIT)
        parts = (
            Part(f"{name}.qweight", ("I32",), (columns, -(-rows // 8))),
            Part(f"{name}.qzeros", ("I32",), (groups, -(-rows // 8))),
            Part(f"{name}.scales", FLOATS, (groups, rows)),
        )
        dtype = choose_group_type(4, self.group, columns, False, kinds, f"{name}.scales")
        if dtype is None:
            return Matrix(name, rows, columns, "int4_offset", parts, self._code)
        return Matrix(name, rows, columns, dtype, parts, partial(self._in_blocks, dtype))

    def _in_blocks(self, dtype: str, words: Words, zeros: Words, scales: Floats) -> Bytes:
        rows = scales.shape[1]
        zero_points = np.ascontiguousarray(self._codes(zeros, rows).T)
        return _pack_int4(dtype, _pair_columns(words, rows), scales, zero_points)

    def _code(self, words: Words, zeros: Words, scales: Floats) -> CodedMatrix:
        rows = scales.shape[1]
        zero, scale = self._codes(zeros, rows).T.astype(np.float32), np.ascontiguousarray(scales.T)
        codes = np.ascontiguousarray(self._codes(words, rows).T)
        return CodedMatrix(codes, scale, -(scale * zero))

    @staticmethod
    def _codes(words: Words, rows: int) -> Bytes:
        file_order = unpack(words, 4, words.shape[1] * 8).reshape(len(words), -1, 8)
        codes: Bytes = file_order[:, :, AWQ_ORDER].reshape(len(words), -1)[:, :rows]
        return codes


def _pack_int4(dtype: str, packed_codes: Bytes, scales: Floats, zero_points: Bytes) -> Bytes:
    """The rows of a type "int4_g...". scales: [groups, rows].

    Programs multiply codes and zero points by the scale before they subtract, so that 0 has a positive sign.
    It would not have it with a negative scale, as auto-round has some. So those change their sign, and codes
    and zero points become 15 less themselves.
    """
    row_scales = np.ascontiguousarray(scales.T)
    if (is_negative := np.signbit(row_scales)).any():
        every_bit = is_negative * np.uint8(0xFF)
        packed_codes = packed_codes ^ every_bit.repeat(packed_codes.shape[1] // scales.shape[0], axis=1)
        zero_points, row_scales = zero_points ^ every_bit & np.uint8(15), np.abs(row_scales)
    return pack_groups(dtype, packed_codes, row_scales, zero_points)


def _pair_columns(words: Words, rows: int) -> Bytes:
    """AWQ's words [columns, rows / 8] as codes [rows, columns / 2], two a byte."""
    halves = np.ascontiguousarray(words, dtype="<i4").view(np.uint32).reshape(len(words) // 2, 2, -1)
    even_columns, odd_columns, low = halves[:, 0], halves[:, 1], np.uint32(0x0F0F0F0F)
    # Byte i of the first has the codes at 2 i of both columns, of the second those at 2 i + 1.
    low_codes = (even_columns & low) | (odd_columns & low) << np.uint32(4)
    high_codes = (even_columns >> np.uint32(4) & low) | (odd_columns & ~low)
    pairs = np.empty((8, words.shape[1], len(even_columns)), dtype=np.uint8)
    for place, code in enumerate(AWQ_ORDER):
        of_code = (high_codes if code % 2 else low_codes).view(np.uint8)[:, code // 2 :: 4]
        pairs[place] = of_code.T
    return np.ascontiguousarray(pairs.transpose(1, 0, 2)).reshape(8 * words.shape[1], -1)[:rows]


def _group(fields: Fields, name: str) -> int:
    """Columns of a group; -1: a row is a group."""
    size = fields.integer(name, minimum=-1)
    if size == 0:
        raise CheckpointError(f"config.json: quantization_config.{name}: got 0; allowed: -1, or at least 1")
    return size


def _bits(fields: Fields) -> int:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise CheckpointError(f"config.json: quantization_config.bits: got {bits}; allowed: 4, 8")
    return bits


def parse_gptq(fields: Fields) -> Gptq:
    """Reads quantization_config with quant_method "gptq"."""
    bits, group = _bits(fields), _group(fields, "group_size")
    # Static groups are columns side by side, whatever the order in which columns were rounded.
    act_order = fields.flag("desc_act", False) and not fields.flag("static_groups", False)
    symmetric = fields.flag("sym", False)
    fields.require_value("checkpoint_format", "gptq", "gptq_v2", None)
    fields.require_value("is_marlin_format", False, None)
    zero_point_offset = 0 if fields.raw("checkpoint_format", None) == "gptq_v2" else 1
    fields.require_value("lm_head", False)
    for name in fields.names:
        fields.ignore(name)  # how it was made: dataset, damp_percent and others
    fields.refuse_unread()
    return Gptq(bits, group, zero_point_offset, act_order, symmetric)


def parse_awq(fields: Fields) -> Awq:
    """Reads quantization_config with quant_method "awq"."""
    fields.require_value("bits", 4)
    fields.require_value("w_bit", 4)
    group = _group(fields, "q_group_size" if "q_group_size" in fields.names else "group_size")
    fields.require_value("version", "gemm", "GEMM", reason="others are packed in another order")
    fields.require_value("zero_point", True)
    for name in fields.names:
        fields.ignore(name)
    fields.refuse_unread()
    return Awq(group)


def parse_auto_round(fields: Fields) -> Gptq | Awq:
    """Reads quantization_config with quant_method "auto-round": the tensors of GPTQ or AWQ.

    `extra_config` is not used: a matrix is quantised if the checkpoint has its quantised tensors.
    """
    fields.require_value("data_type", "int")
    fields.require_value("packing_format", *PACKINGS)
    packing = fields.raw("packing_format", AUTO_ROUND)
    if packing == AUTO_ROUND_AWQ:
        fields.require_value("bits", 4)
        scheme: Gptq | Awq = Awq(_group(fields, "group_size"))
    else:
        scheme = Gptq(_bits(fields), _group(fields, "group_size"), PACKINGS[packing], act_order=False)
    for name in fields.names:
        fields.ignore(name)  # how it was made: iters, seqlen, sym and others
    fields.refuse_unread()
    return scheme
